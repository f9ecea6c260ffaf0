"""The session table: who has which pages, who waits for some. SQLite, so that a killed process leaves it whole."""

import math
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import apsw
import numpy as np

from corolla.errors import InvalidValueError, NotFoundError, OverloadedError
from corolla.kv import adapters
from corolla.kv.database import Database
from corolla.kv.draining import DrainingError, is_draining
from corolla.kv.layout import KVLayout
from corolla.kv.pins import RecordPins
from corolla.kv.records import CLOSED, SessionRecords, now_ns
from corolla.kv.run_directory import PINS, SESSIONS, prepared_run_directory
from corolla.kv.session import CacheStatus, OpenRequest, Session, SessionStatus
from corolla.processes import ProcessIdentity

PATIENCE = 1.0
"""Seconds after which a waiting request is not overtaken any more by later ones that would fit."""
FIRST_POLL, LONGEST_POLL = 0.002, 0.05
"""Seconds between looks at the table while waiting for room: soon at first, then ever less often."""
CANCEL_POLL_NS = 100_000_000
"""Nanoseconds between questions whether a waiting request was cancelled."""

_SCHEMA = """
PRAGMA journal_mode = WAL;
CREATE TABLE IF NOT EXISTS sessions (
    record INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, epoch INTEGER NOT NULL, max_length INTEGER NOT NULL,
    idle_ns INTEGER NOT NULL, adapter INTEGER NOT NULL, closing INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS pages (
    page INTEGER PRIMARY KEY, record INTEGER NOT NULL, position INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS pages_of_record ON pages (record, position);
CREATE TABLE IF NOT EXISTS waiting (
    ticket INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, max_length INTEGER NOT NULL,
    priority INTEGER NOT NULL, idle_ns INTEGER NOT NULL, adapter INTEGER NOT NULL, arrived_ns INTEGER NOT NULL,
    deadline_ns INTEGER NOT NULL, process TEXT NOT NULL);
"""


class CacheFullError(OverloadedError):
    """No room for a session within its timeout."""


class UnknownSessionError(NotFoundError):
    """No session of that id is open on this server."""

    def __init__(self, session_id: str) -> None:
        super().__init__(
            f"session_id: {session_id[:40]!r} is not open on this server (closed, expired or never opened); "
            "open a new session and repeat its inputs from position 0"
        )


class SessionTable:
    """Opens, finds and closes sessions; every process of a server has its own object on the same file.

    Records and pages are given out and taken back in one transaction.
    """

    def __init__(self, directory: Path, layout: KVLayout, context_length: int) -> None:
        self.layout = layout
        self._directory = directory
        self._longest = min(context_length, layout.slots)
        self.database = Database(directory / SESSIONS)
        with prepared_run_directory(directory, layout):
            self.records = SessionRecords(directory, layout)
            self.pins = RecordPins(directory / PINS)
            self.database.connection().execute(_SCHEMA + adapters.SCHEMA).fetchall()

    def open(self, request: OpenRequest, is_cancelled: Callable[[], bool] = lambda: False) -> Session:
        """Reserves pages for `request.max_length` positions, waiting its turn up to `request.timeout`.

        Raises InvalidValueError for a length that could never fit, UnknownAdapterError, DrainingError, and
        CacheFullError when the timeout ends or `is_cancelled` tells that nobody waits for the session any more.
        """
        self.check(request)
        if is_draining(self._directory):
            raise DrainingError
        session_id = secrets.token_hex(16)
        deadline = now_ns() + int(request.timeout * 1e9)
        with self.database.transaction() as connection:
            connection.execute(
                "INSERT INTO waiting (id, max_length, priority, idle_ns, adapter, arrived_ns, deadline_ns, process)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    session_id,
                    request.max_length,
                    request.priority,
                    int(request.idle_timeout * 1e9),
                    adapters.number_of(connection, request.adapter),
                    now_ns(),
                    deadline,
                    str(ProcessIdentity.current()),
                ),
            )
            self._grant(connection)
        look_at, pause = now_ns(), FIRST_POLL
        while (session := self._find(session_id)) is None:
            if now_ns() >= look_at:
                look_at = now_ns() + CANCEL_POLL_NS
                deadline = now_ns() if is_cancelled() else deadline
            if now_ns() >= deadline:
                return self._last_look(session_id, request)
            time.sleep(pause)
            pause = min(1.5 * pause, LONGEST_POLL)
            if self._may_have_room(session_id):
                with self.database.transaction() as connection:
                    self._grant(connection)
        return session

    def find(self, session_id: str) -> Session:
        """The open session of that id; UnknownSessionError if there is none."""
        session = self._find(session_id)
        if session is None:
            raise UnknownSessionError(session_id)
        return session

    def close(self, session_id: str) -> int:
        """Ends a session and frees its pages; steps that are running on it are let finish first.

        Returns the tokens given back; raises UnknownSessionError.
        """
        with self.database.transaction() as connection:
            row = connection.execute(
                "SELECT record FROM sessions WHERE id = ? AND NOT closing", (session_id,)
            ).fetchone()
            if row is None:
                raise UnknownSessionError(session_id)
            reserved = self._reserved_tokens(connection, row[0])
            self._end(connection, row[0])
            self._grant(connection)
        return reserved

    def reap(self) -> None:
        """Frees sessions that were idle too long, and serves the waiting line."""
        with self.database.transaction() as connection:
            self._grant(connection)

    def forget_block(self, block: int) -> None:
        """Declares nothing cached in a block, for all sessions: their next steps report the gap."""
        self.records.lengths[:, block] = 0

    def status(self) -> CacheStatus:
        """How much of the cache is free, and how many sessions are open and waiting."""
        connection = self.database.connection()
        used, opened, waiting = connection.execute(
            "SELECT (SELECT COUNT(*) FROM pages), (SELECT COUNT(*) FROM sessions WHERE NOT closing),"
            " (SELECT COUNT(*) FROM waiting)"
        ).fetchone()
        layout = self.layout
        return CacheStatus(layout.slots, layout.slots - used * layout.page_size, opened, waiting)

    def sessions(self) -> list[SessionStatus]:
        """All open sessions, oldest first."""
        connection = self.database.connection()
        rows = connection.execute(
            "SELECT record, id, max_length, idle_ns, (SELECT name FROM adapters WHERE number = adapter) FROM sessions"
            " WHERE NOT closing ORDER BY epoch"
        ).fetchall()
        return [
            SessionStatus(
                id=session_id,
                max_length=max_length,
                reserved_tokens=self._pages_for(max_length) * self.layout.page_size,
                length=_stepped_length(self.records.lengths[record].tolist()),
                idle_seconds=(now_ns() - int(self.records.used[record])) / 1e9,
                idle_timeout=idle_ns / 1e9,
                adapter=adapter or "",
            )
            for record, session_id, max_length, idle_ns, adapter in rows
        ]

    def check(self, request: OpenRequest) -> None:
        """Raises InvalidValueError for values that can never be served."""
        if not 1 <= request.max_length <= self._longest:
            raise InvalidValueError(
                "max_length", request.max_length, f"1 to {self._longest} (the model's context, at most the whole cache)"
            )
        if not (math.isfinite(request.timeout) and 0 <= request.timeout <= 3600):
            raise InvalidValueError("timeout", request.timeout, "0 to 3600 seconds")
        if not (math.isfinite(request.idle_timeout) and 0 < request.idle_timeout <= 86400):
            raise InvalidValueError("idle_timeout", request.idle_timeout, "more than 0, up to 86400 seconds")

    def _find(self, session_id: str) -> Session | None:
        connection = self.database.connection()
        rows = connection.execute(
            "SELECT s.record, s.epoch, s.max_length, s.adapter, p.page FROM sessions s JOIN pages p USING (record)"
            " WHERE s.id = ? AND NOT s.closing ORDER BY p.position",
            (session_id,),
        ).fetchall()
        if not rows:
            return None
        record, epoch, max_length, adapter, _ = rows[0]
        pages = np.array([row[4] for row in rows])
        page_size = self.layout.page_size
        return Session(
            id=session_id,
            record=record,
            epoch=epoch,
            max_length=max_length,
            pages=pages.astype(np.int32),
            slots=(pages[:, None] * page_size + np.arange(page_size)).ravel(),
            contiguous=bool((np.diff(pages) == 1).all()),
            adapter=adapter,
        )

    def _last_look(self, session_id: str, request: OpenRequest) -> Session:
        with self.database.transaction() as connection:
            self._grant(connection)
            gave_up = connection.execute("DELETE FROM waiting WHERE id = ? RETURNING ticket", (session_id,)).fetchall()
        if not gave_up and (session := self._find(session_id)) is not None:
            return session
        status = self.status()
        raise CacheFullError(
            f"no room for max_length {request.max_length} within {request.timeout:g} s: {status.free_tokens} of "
            f"{status.total_tokens} tokens are free, {status.waiting} requests wait; retry, give a longer timeout, "
            "or serve with more --attn-cache-tokens"
        )

    def _may_have_room(self, session_id: str) -> bool:
        """Cheap look without a write lock: is anything free, expired or ended that this waiter could get?"""
        connection = self.database.connection()
        row = connection.execute("SELECT max_length FROM waiting WHERE id = ?", (session_id,)).fetchone()
        if row is None:
            return False
        used = connection.execute("SELECT COUNT(*) FROM pages").fetchone()[0]
        return self.layout.pages - used >= self._pages_for(row[0]) or bool(self._ended(connection))

    def _grant(self, connection: apsw.Connection) -> None:
        """Frees what has ended, then serves the line: by priority, then arrival.

        Who does not fit is passed over by later ones that do, but not once it has waited for PATIENCE.
        """
        for record in self._ended(connection):
            self._end(connection, record)
        line = connection.execute(
            "SELECT ticket, id, max_length, idle_ns, adapter, arrived_ns, deadline_ns, process FROM waiting"
            " ORDER BY priority, ticket"
        ).fetchall()
        if not line:
            return
        now = now_ns()
        used = {row[0] for row in connection.execute("SELECT page FROM pages")}
        free = [page for page in range(self.layout.pages) if page not in used]
        for ticket, session_id, max_length, idle_ns, adapter, arrived, deadline, process in line:
            if (now > deadline + int(1e9)) or not ProcessIdentity.parse(process).is_alive():
                connection.execute("DELETE FROM waiting WHERE ticket = ?", (ticket,))
                continue
            count = self._pages_for(max_length)
            if count <= len(free):
                pages = _choose(free, count)
                free = sorted(set(free).difference(pages))
                self._allocate(connection, ticket, session_id, max_length, idle_ns, adapter, pages)
            elif now - arrived > PATIENCE * 1e9:
                break

    def _allocate(
        self,
        connection: apsw.Connection,
        ticket: int,
        session_id: str,
        max_length: int,
        idle_ns: int,
        adapter: int,
        pages: list[int],
    ) -> None:
        taken = {row[0] for row in connection.execute("SELECT record FROM sessions")}
        record = next(record for record in range(self.layout.pages) if record not in taken)
        self.records.lengths[record] = 0
        self.records.used[record] = now_ns()
        connection.execute(
            "INSERT INTO sessions (record, id, epoch, max_length, idle_ns, adapter) VALUES (?, ?, ?, ?, ?, ?)",
            (record, session_id, ticket, max_length, idle_ns, adapter),
        )
        connection.executemany(
            "INSERT INTO pages (page, record, position) VALUES (?, ?, ?)",
            [(page, record, position) for position, page in enumerate(pages)],
        )
        connection.execute("DELETE FROM waiting WHERE ticket = ?", (ticket,))
        self.records.epochs[record] = ticket

    def _ended(self, connection: apsw.Connection) -> list[int]:
        """Records to free: closed ones that were busy then, and those idle for too long that no one holds."""
        now = now_ns()
        rows = connection.execute("SELECT record, epoch, idle_ns, closing FROM sessions").fetchall()
        return [
            record
            for record, epoch, idle_ns, closing in rows
            if (
                closing
                or self.records.epochs[record] != epoch  # whoever closed it died before it was written down
                or now - int(self.records.used[record]) > idle_ns
            )
            and self.pins.is_free(record)
        ]

    def _end(self, connection: apsw.Connection, record: int) -> None:
        """No new step can start from here on; the pages are freed now, or once the running steps are done."""
        self.records.epochs[record] = CLOSED
        if self.pins.is_free(record):
            connection.execute("DELETE FROM pages WHERE record = ?", (record,))
            connection.execute("DELETE FROM sessions WHERE record = ?", (record,))
        else:
            connection.execute("UPDATE sessions SET closing = 1 WHERE record = ?", (record,))

    def _reserved_tokens(self, connection: apsw.Connection, record: int) -> int:
        count: int = connection.execute("SELECT COUNT(*) FROM pages WHERE record = ?", (record,)).fetchone()[0]
        return count * self.layout.page_size

    def _pages_for(self, max_length: int) -> int:
        return -(-max_length // self.layout.page_size)


def _stepped_length(lengths: list[int]) -> int:
    """Positions cached in every block that was stepped at all."""
    return min((length for length in lengths if length), default=0)


def _choose(free: list[int], count: int) -> list[int]:
    """Pages out of the sorted `free`: the first run of neighbours long enough, else the first ones."""
    start = 0
    for index, page in enumerate(free):
        if page - free[start] != index - start:
            start = index
        if index - start + 1 == count:
            return free[start : index + 1]
    return free[:count]
