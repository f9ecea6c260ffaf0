"""The SQLite file that the processes of a server share: what a process killed inside a transaction did is undone."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import local

import apsw


class Database:
    """One connection per thread.

    `synchronous = OFF` suits a directory in memory: a killed process loses nothing, and a lost machine has lost the
    cache as well.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._connections = local()

    def connection(self) -> apsw.Connection:
        """That of this thread."""
        connection: apsw.Connection | None = getattr(self._connections, "connection", None)
        if connection is None:
            connection = apsw.Connection(os.fspath(self._file))
            connection.set_busy_timeout(10_000)
            connection.pragma("synchronous", "OFF")
            self._connections.connection = connection
        return connection

    @contextmanager
    def transaction(self) -> Iterator[apsw.Connection]:
        """Writes all or nothing."""
        connection = self.connection()
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield connection
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")
