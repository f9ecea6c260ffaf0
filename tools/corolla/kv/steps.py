"""From the rows of a step to the sessions they continue, with every check before any work."""

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from corolla.errors import InvalidValueError, OverloadedError
from corolla.kv.records import now_ns
from corolla.kv.session import Session
from corolla.kv.table import SessionTable, UnknownSessionError


@dataclass(frozen=True)
class Row:
    """One row of a step: new positions of a session from `start_position` on."""

    session_id: str
    start_position: int


class PositionError(InvalidValueError):
    """A step does not continue what is cached of its session, or passes its end."""

    def __init__(self, start: int, allowed: str) -> None:
        super().__init__("start_position", start, allowed)


@dataclass(frozen=True)
class StepRows:
    """Rows that passed every check, pinned while they run.

    `starts` [B] is where their `new_tokens` begin, `cached` [B] what was cached before the step. Row i continues
    row `sources[i]` if sources are given; `signature` then tells this step from others.
    """

    sessions: list[Session]
    records: NDArray[np.int64]
    starts: list[int]
    cached: list[int]
    new_tokens: int
    sources: list[int] | None
    signature: int

    def part(self, offset: int, new_tokens: int) -> "StepRows":
        """The rows restricted to some of their new positions."""
        return replace(self, starts=[start + offset for start in self.starts], new_tokens=new_tokens)


class SessionSteps:
    """What one process knows of the sessions it steps, for the blocks it hosts.

    Sessions are looked up in SQL once and remembered; each step then reads only shared memory.
    """

    def __init__(self, table: SessionTable, blocks: range, generation: Callable[[], int] = lambda: 0) -> None:
        """`generation` gives another number once the arena's memory was lost; see DeviceExports."""
        self._generation = generation
        self._table = table
        self._records = table.records
        self._lengths = table.records.lengths[:, blocks.start : blocks.stop]
        self._marks = table.records.marks[:, blocks.start : blocks.stop]
        self._known: dict[str, Session] = {}
        self.process_number = secrets.randbits(62)

    def part(self, blocks: range) -> "SessionSteps":
        """The same for some of the blocks."""
        return SessionSteps(self._table, blocks, self._generation)

    @contextmanager
    def running(self, rows: Sequence[Row], new_tokens: int, sources: list[int] | None = None) -> Iterator[StepRows]:
        """Checks the rows, pins their sessions for the length of the block and records the new lengths at its end.

        A start before the cached length rolls the session back to it. No session may occur twice. Raises
        UnknownSessionError, InvalidValueError for a source that is no row, or PositionError for a negative
        start, a gap or a step past max_length; nothing has changed then.
        """
        pinned: list[Session] = []
        generation = self._generation()
        try:
            for row in rows:
                pinned.append(self._pin(row.session_id))
            checked = self._checked(pinned, [row.start_position for row in rows], new_tokens, sources)
            if checked.starts != checked.cached:
                self.truncate(checked, list(map(min, checked.starts, checked.cached)))
            yield checked
            if self._generation() != generation:
                raise OverloadedError("the memory of the KV cache was lost during the step; repeat it")
            ends = [start + new_tokens for start in checked.starts]
            self._lengths[checked.records] = np.array(ends)[:, None]
            self._marks[checked.records] = (self.process_number, checked.signature)
            self._records.used[checked.records] = now_ns()
        finally:
            for session in pinned:
                self._table.pins.release(session.record)

    @contextmanager
    def held(self, session_id: str) -> Iterator[Session]:
        """Pins a session for many steps, which then cost no system calls."""
        session = self._pin(session_id)
        try:
            yield session
        finally:
            self._table.pins.release(session.record)

    def length(self, session_id: str) -> int:
        """Positions cached in every block of this process; UnknownSessionError."""
        return int(self._lengths[self._look_up(session_id).record].min())

    def adapter(self, session_id: str) -> int:
        """The number of the session's adapter; UnknownSessionError."""
        return self._look_up(session_id).adapter

    def marks(self, rows: StepRows) -> NDArray[np.int64]:
        """The marks [B, blocks, 2] of the last step of each row's session; see SessionRecords."""
        return self._marks[rows.records]

    def truncate(self, rows: StepRows, lengths: list[int]) -> None:
        """Declares positions from `lengths` [B] on as lost, until a step records new lengths."""
        self._lengths[rows.records] = np.array(lengths)[:, None]

    def _pin(self, session_id: str) -> Session:
        session = self._look_up(session_id)
        self._table.pins.acquire(session.record)
        if self._records.epochs[session.record] != session.epoch:
            self._table.pins.release(session.record)
            self._known.pop(session_id, None)
            raise UnknownSessionError(session_id)
        return session

    def _look_up(self, session_id: str) -> Session:
        session = self._known.get(session_id)
        if session is not None and self._records.epochs[session.record] == session.epoch:
            return session
        self._known.pop(session_id, None)
        if len(self._known) > 2 * self._table.layout.pages:
            self._known = {
                known: s for known, s in list(self._known.items()) if self._records.epochs[s.record] == s.epoch
            }
        session = self._table.find(session_id)
        self._known[session_id] = session
        return session

    def _checked(
        self, sessions: list[Session], starts: list[int], new_tokens: int, sources: list[int] | None
    ) -> StepRows:
        records = np.array([session.record for session in sessions])
        cached: list[int] = self._lengths[records].min(axis=1).tolist()
        signature = 0
        available = cached
        if sources is not None:
            _check_sources(sources, sessions)
            available = [cached[source] for source in sources]
            signature = _signature(sources, sessions, starts, new_tokens)
        for session, start, length in zip(sessions, starts, available, strict=True):
            if not 0 <= start <= session.max_length - new_tokens:
                allowed = f"0 to max_length {session.max_length} less the {new_tokens} new positions"
                raise PositionError(start, f"{allowed}; open a longer session")
            if start > length:
                raise PositionError(start, f"0 to {length}, the positions cached; repeat the inputs from there")
        return StepRows(sessions, records, starts, cached, new_tokens, sources, signature)


def _check_sources(sources: list[int], sessions: list[Session]) -> None:
    for session, source in zip(sessions, sources, strict=True):
        if not 0 <= source < len(sessions):
            raise InvalidValueError("hypo_ids", source, f"0 to {len(sessions) - 1}, rows of the same request")
        if sessions[source].adapter != session.adapter:
            raise InvalidValueError("hypo_ids", source, "a row whose session has the same adapter")


def _signature(sources: list[int], sessions: list[Session], starts: list[int], new_tokens: int) -> int:
    """The same number in every process for the same reordering step; never 0."""
    epochs = tuple(session.epoch for session in sessions)
    return hash((tuple(sources), epochs, tuple(starts), new_tokens)) or 1
