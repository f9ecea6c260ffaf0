"""Which adapters a server has: one table for all its processes, in the database of its sessions.

A session has the adapter that it was opened with for as long as it lives. Unloading an adapter takes its name away, so
that no new session gets it; those that have it go on, and its entry goes when the last of them has ended.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import apsw

from corolla.errors import InvalidValueError, NotFoundError
from corolla.kv.database import Database

NONE = 0
"""The number of no adapter."""

_NAME = re.compile(r"[\w.:-]{1,128}")

SCHEMA = """
CREATE TABLE IF NOT EXISTS adapters (
    number INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, source TEXT NOT NULL, key TEXT NOT NULL,
    rank INTEGER NOT NULL, unloaded INTEGER NOT NULL DEFAULT 0);
CREATE UNIQUE INDEX IF NOT EXISTS adapter_names ON adapters (name) WHERE NOT unloaded;
"""


@dataclass(frozen=True)
class NewAdapter:
    """An adapter that is prepared in the disk cache as `key`, from a `source` as a repository writes it."""

    name: str
    source: str
    key: str
    rank: int


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter of the server. Its `number` is never used again; `sessions` are open or waiting with it."""

    number: int
    name: str
    source: str
    key: str
    rank: int
    sessions: int


class UnknownAdapterError(NotFoundError):
    """No adapter of that name is loaded."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        super().__init__(
            f"adapter: {name[:80]!r} is not loaded on this server; loaded: {', '.join(known) or 'none'}; load it with "
            "`corolla adapters load`"
        )


def check_adaptable(name: str, tensor_parallel: int) -> None:
    """InvalidValueError for an adapter, with its name, to blocks in several shards."""
    if tensor_parallel > 1:
        raise InvalidValueError("adapter", name, f"none where tensor_parallel, {tensor_parallel} here, is above 1")


def check_name(name: str) -> str:
    """The name itself; InvalidValueError for one that is not allowed."""
    if not _NAME.fullmatch(name):
        raise InvalidValueError("adapter", name, "1 to 128 letters, digits and . : _ -")
    return name


def number_of(connection: apsw.Connection, name: str | None) -> int:
    """The number of a loaded adapter; NONE for no name or an empty one. UnknownAdapterError."""
    if not name:
        return NONE
    row = connection.execute("SELECT number FROM adapters WHERE name = ? AND NOT unloaded", (name,)).fetchone()
    if row is None:
        known = [row[0] for row in connection.execute("SELECT name FROM adapters WHERE NOT unloaded ORDER BY name")]
        raise UnknownAdapterError(name, known)
    number: int = row[0]
    return number


class AdapterTable:
    """The adapters of a server, as every process sees them; `database` is that of its SessionTable."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def load(self, adapter: NewAdapter) -> None:
        """Gives an adapter to all processes; InvalidValueError if another one has its name."""
        check_name(adapter.name)
        with self._database.transaction() as connection:
            _forget_unused(connection)
            if connection.execute("SELECT 1 FROM adapters WHERE name = ? AND NOT unloaded", (adapter.name,)).fetchone():
                raise InvalidValueError("adapter", adapter.name, "a name that is not in use; unload that one first")
            _insert(connection, adapter)

    def load_first(self, adapters: Sequence[NewAdapter]) -> None:
        """Loads those of the repository, unless this server had adapters before."""
        with self._database.transaction() as connection:
            if not had_adapters(connection):
                for adapter in adapters:
                    _insert(connection, adapter)

    def unload(self, name: str) -> None:
        """Takes an adapter's name away; UnknownAdapterError."""
        with self._database.transaction() as connection:
            connection.execute("UPDATE adapters SET unloaded = 1 WHERE number = ?", (number_of(connection, name),))
            _forget_unused(connection)

    def loaded(self) -> list[LoadedAdapter]:
        """Those that have a name, by name."""
        return self._select("NOT unloaded")

    def find(self, number: int) -> LoadedAdapter:
        """The adapter of that number; NotFoundError when it was unloaded and no session has it any more."""
        for adapter in self._select("number = ?", number):
            return adapter
        raise NotFoundError("adapter: it was unloaded meanwhile; load it again")

    def number(self, name: str) -> int:
        """See `number_of`."""
        return number_of(self._database.connection(), name)

    def numbers(self) -> set[int]:
        """Those of all adapters that may still be needed."""
        return {row[0] for row in self._database.connection().execute("SELECT number FROM adapters")}

    def name(self, number: int) -> str:
        """The name of an adapter, maybe unloaded; empty for NONE."""
        return self.find(number).name if number != NONE else ""

    def had_any(self) -> bool:
        """Whether this server has or had adapters."""
        return had_adapters(self._database.connection())

    def _select(self, condition: str, *values: int) -> list[LoadedAdapter]:
        rows = self._database.connection().execute(
            "SELECT number, name, source, key, rank,"
            " (SELECT COUNT(*) FROM sessions WHERE adapter = number)"
            " + (SELECT COUNT(*) FROM waiting WHERE adapter = number)"
            f" FROM adapters WHERE {condition} ORDER BY name",
            values,
        )
        return [LoadedAdapter(*row) for row in rows]


def had_adapters(connection: apsw.Connection) -> bool:
    """Whether there were ever any."""
    return connection.execute("SELECT 1 FROM sqlite_sequence WHERE name = 'adapters'").fetchone() is not None


def _insert(connection: apsw.Connection, adapter: NewAdapter) -> None:
    connection.execute(
        "INSERT INTO adapters (name, source, key, rank) VALUES (?, ?, ?, ?)",
        (adapter.name, adapter.source, adapter.key, adapter.rank),
    )


def _forget_unused(connection: apsw.Connection) -> None:
    connection.execute(
        "DELETE FROM adapters WHERE unloaded"
        " AND number NOT IN (SELECT adapter FROM sessions UNION SELECT adapter FROM waiting)"
    )
