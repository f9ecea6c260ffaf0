"""The registry of one machine: an SQLite file, written by the servers themselves."""

import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import apsw
from filelock import FileLock

from corolla.errors import EnvironmentProblemError, InvalidValueError
from corolla.kv.database import Database
from corolla.peers.location import RegistryLocation
from corolla.peers.record import PeerRecord, Peers
from corolla.peers.registry import PeerIdTakenError, RegistryAwayError, read_records
from corolla.peers.watch import Closing
from corolla.server.checks import SHARED_MEMORY

POLL_SECONDS = 0.2
"""How often a watch looks whether anything was written."""

_SCHEMA = """
PRAGMA journal_mode = WAL;
CREATE TABLE IF NOT EXISTS owners (owner TEXT PRIMARY KEY, boot TEXT NOT NULL, expires_ns INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS peers (
    model TEXT NOT NULL, peer_id TEXT NOT NULL, owner TEXT NOT NULL, record TEXT NOT NULL,
    PRIMARY KEY (model, peer_id));
"""


class SqliteRegistry:
    """Times of expiry are on CLOCK_BOOTTIME; those of an earlier boot of the machine are over."""

    def __init__(self, location: RegistryLocation, ttl: float) -> None:
        if location.host:
            raise InvalidValueError("registry", location.text, "sqlite:///absolute/path, or sqlite:// for the default")
        self._url = location.text
        self._file = Path(location.path) if location.path not in ("", "/") else None
        self._ttl_ns = int(ttl * 1e9)
        self._owner = secrets.token_hex(16)
        self._boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        self._mine: dict[tuple[str, str], str] = {}
        self._opened: tuple[tuple[int, int], Database] | None = None

    def put(self, record: PeerRecord) -> None:
        with self._transaction() as connection:
            self._check_owner(connection, record.model, record.peer_id)
            self._mine[record.model, record.peer_id] = record.to_json()
            self._write(connection)

    def keep_alive(self) -> None:
        with self._transaction() as connection:
            for model, peer_id in self._mine:
                self._check_owner(connection, model, peer_id)
            self._write(connection)

    def remove(self, model: str, peer_id: str) -> None:
        self._mine.pop((model, peer_id), None)
        with self._transaction() as connection:
            connection.execute(
                "DELETE FROM peers WHERE model = ? AND peer_id = ? AND owner = ?", (model, peer_id, self._owner)
            )

    def list(self, model: str) -> Peers:
        return self._list(model)[0]

    def models(self) -> Sequence[str]:
        with self._connected() as connection:
            return [
                row[0]
                for row in connection.execute(
                    "SELECT DISTINCT model FROM peers JOIN owners USING (owner) WHERE boot = ? AND expires_ns > ?"
                    " ORDER BY model",
                    (self._boot, _now_ns()),
                )
            ]

    def changes(self, model: str, closing: Closing) -> Iterator[Peers]:
        records, version, expires_ns = self._list(model)
        yield records
        identity = self._opened and self._opened[0]
        while not closing.wait(POLL_SECONDS):
            with self._connected() as connection:
                if self._opened and self._opened[0] != identity:
                    raise RegistryAwayError(self._url, "another file has taken its place")
                if connection.pragma("data_version") == version and _now_ns() < expires_ns:
                    continue
            records, version, expires_ns = self._list(model)
            yield records

    def close(self) -> None:
        self._opened = None

    def _list(self, model: str) -> tuple[Peers, int, int]:
        """The records, the version of the file they are of, and when the first of them expires."""
        with self._connected() as connection:
            version = connection.pragma("data_version")
            rows = connection.execute(
                "SELECT record, expires_ns FROM peers JOIN owners USING (owner) WHERE model = ? AND boot = ?"
                " AND expires_ns > ?",
                (model, self._boot, _now_ns()),
            ).fetchall()
        return read_records(row[0] for row in rows), version, min((row[1] for row in rows), default=2**63)

    def _write(self, connection: apsw.Connection) -> None:
        """Brings the file to what this object has put."""
        connection.execute(
            "INSERT INTO owners (owner, boot, expires_ns) VALUES (?, ?, ?)"
            " ON CONFLICT (owner) DO UPDATE SET expires_ns = excluded.expires_ns",
            (self._owner, self._boot, _now_ns() + self._ttl_ns),
        )
        connection.executemany(
            "INSERT INTO peers (model, peer_id, owner, record) VALUES (?, ?, ?, ?) ON CONFLICT (model, peer_id)"
            " DO UPDATE SET record = excluded.record WHERE record != excluded.record",
            [(*key, self._owner, record) for key, record in self._mine.items()],
        )

    def _check_owner(self, connection: apsw.Connection, model: str, peer_id: str) -> None:
        row = connection.execute(
            "SELECT owner FROM peers WHERE model = ? AND peer_id = ?", (model, peer_id)
        ).fetchone()
        if row is not None and row[0] != self._owner:
            raise PeerIdTakenError(model, peer_id)

    @contextmanager
    def _transaction(self) -> Iterator[apsw.Connection]:
        """Begins with the removal of what has expired."""
        with self._connected() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                connection.execute("DELETE FROM owners WHERE boot != ? OR expires_ns <= ?", (self._boot, _now_ns()))
                connection.execute("DELETE FROM peers WHERE owner NOT IN (SELECT owner FROM owners)")
                yield connection
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")

    @contextmanager
    def _connected(self) -> Iterator[apsw.Connection]:
        """The connection of this thread, to the file that has the name now."""
        path = self._path()
        try:
            if self._opened is None or self._opened[0] != _identity(path):
                self._opened = _open(path)
            yield self._opened[1].connection()
        except (apsw.Error, OSError) as error:
            raise RegistryAwayError(self._url, f"{error}; if {path} is damaged, remove it") from error

    def _path(self) -> Path:
        return self._file or _default_file()


def _now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _open(path: Path) -> tuple[tuple[int, int], Database]:
    if not path.parent.is_dir():
        raise FileNotFoundError(f"no folder {path.parent}")
    with FileLock(f"{path}.lock"):
        database = Database(path)
        database.connection().execute(_SCHEMA).fetchall()
        identity = _identity(path)
    assert identity is not None
    return identity, database


def _default_file() -> Path:
    """One per user, in memory, as it is of no use after the next boot."""
    folder = SHARED_MEMORY / f"corolla-registry-{_user()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != _user():
        raise EnvironmentProblemError(f"{folder}: belongs to another user; pass --registry sqlite:///path/of/a/file")
    return folder / "peers.sqlite"


def _user() -> int:
    return os.getuid()
