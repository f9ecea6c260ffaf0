"""A server that leaves opens no new sessions, and those in use may finish."""

from contextlib import closing
from pathlib import Path

import apsw
import numpy as np

from corolla.errors import OverloadedError
from corolla.kv.pins import RecordPins
from corolla.kv.records import now_ns
from corolla.kv.run_directory import PINS, SESSIONS, USED

IN_USE_SECONDS = 5.0
"""A session without a step for so long is not waited for: its client is idle, or has gone to another server."""
_MARK = "draining"


class DrainingError(OverloadedError):
    """The server leaves and takes no new sessions."""

    def __init__(self) -> None:
        super().__init__("this server is about to stop or to take other blocks; ask another one, or this one later")


def begin_draining(directory: Path) -> None:
    """From now on, no process of the server with this run directory opens sessions."""
    (directory / _MARK).touch()


def is_draining(directory: Path) -> bool:
    """Has the server been told to leave?"""
    return (directory / _MARK).exists()


def sessions_in_use(directory: Path) -> int:
    """How many sessions have a step running or had one lately, or wait for room; 0 before the first process made any.

    Reads the files of the session table without the table, as `corolla serve` runs no models.
    """
    if not (directory / SESSIONS).exists():
        return 0
    connection = apsw.Connection(str(directory / SESSIONS), flags=apsw.SQLITE_OPEN_READWRITE)
    with closing(connection), closing(RecordPins(directory / PINS)) as pins:
        records = [row[0] for row in connection.execute("SELECT record FROM sessions WHERE NOT closing")]
        waiting: int = connection.execute("SELECT COUNT(*) FROM waiting").fetchone()[0]
        last_steps = np.fromfile(directory / USED, np.int64)
        recently = now_ns() - int(IN_USE_SECONDS * 1e9)
        return waiting + sum(last_steps[record] > recently or not pins.is_free(record) for record in records)
