"""From the rows of a step to the cache positions it reads and writes, with every check before any work."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from corolla.errors import InvalidValueError
from corolla.kv.arena import KVArena
from corolla.kv.records import now_ns
from corolla.kv.session import Session
from corolla.kv.table import SessionTable, UnknownSessionError


@dataclass(frozen=True)
class Row:
    """One row of a step: `new_tokens` positions of a session from `start_position` on."""

    session_id: str
    start_position: int


class PositionError(InvalidValueError):
    """A step does not continue what is cached of its session, or passes its end."""

    def __init__(self, start: int, allowed: str) -> None:
        super().__init__("start_position", start, allowed)


@dataclass(frozen=True)
class StepRows:
    """Rows that passed every check, pinned while they run. All have the same number of new positions."""

    sessions: list[Session]
    starts: list[int]
    new_tokens: int


class SessionSteps:
    """What one process knows of the sessions it steps, for the blocks it hosts.

    Sessions are looked up in SQL once and remembered; each step then reads only shared memory.
    """

    def __init__(self, table: SessionTable, blocks: range) -> None:
        self._table = table
        self._records = table.records
        self._blocks = slice(blocks.start, blocks.stop)
        self._known: dict[str, Session] = {}

    @contextmanager
    def running(self, rows: Sequence[Row], new_tokens: int) -> Iterator[StepRows]:
        """Checks the rows, pins their sessions for the length of the block and records the new lengths at its end.

        A start before the cached length rolls the session back to it. No session may occur twice. Raises
        UnknownSessionError, or PositionError for a negative start, a gap or a step past max_length; nothing has
        changed then.
        """
        pinned: list[Session] = []
        try:
            for row in rows:
                session = self._pin(row.session_id)
                pinned.append(session)
                self._check_position(session, row.start_position, new_tokens)
            starts = [row.start_position for row in rows]
            yield StepRows(pinned, starts, new_tokens)
            now = now_ns()
            for session, start in zip(pinned, starts, strict=True):
                self._records.lengths[session.record, self._blocks] = start + new_tokens
                self._records.used[session.record] = now
        finally:
            for session in pinned:
                self._table.pins.release(session.record)

    def length(self, session_id: str) -> int:
        """Positions cached in every block of this process; UnknownSessionError."""
        return self._length(self._look_up(session_id))

    def _length(self, session: Session) -> int:
        return int(self._records.lengths[session.record, self._blocks].min())

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
                known: s for known, s in self._known.items() if self._records.epochs[s.record] == s.epoch
            }
        session = self._table.find(session_id)
        self._known[session_id] = session
        return session

    def _check_position(self, session: Session, start: int, new_tokens: int) -> None:
        if start < 0:
            raise PositionError(start, f"0 to {session.max_length}")
        if start + new_tokens > session.max_length:
            raise PositionError(
                start,
                f"at most max_length {session.max_length} less the {new_tokens} new tokens; open a longer session",
            )
        cached = self._length(session)
        if start > cached:
            raise PositionError(start, f"0 to {cached}, as {cached} positions are cached; repeat the inputs from there")


class PagedCache:
    """The cache argument of transformers' decoder layers for one step over the shared arena.

    `update` stores the new keys and values of a block and returns all up to the step's end. Rows shorter than
    the longest see their own last position repeated, which `attention_mask` hides: a row never reads a slot of
    another session, not even one that is masked.
    """

    def __init__(self, arena: KVArena, rows: StepRows) -> None:
        self._arena = arena
        self._new_tokens = rows.new_tokens
        page_size = arena.layout.page_size
        starts = torch.tensor(rows.starts)
        self.position_ids = starts[:, None] + torch.arange(rows.new_tokens)
        ends = [start + rows.new_tokens for start in rows.starts]
        self._length = max(ends)
        session = rows.sessions[0]
        self._run: slice | None = None
        if len(rows.sessions) == 1 and session.contiguous:
            self._run = slice(session.first_slot, session.first_slot + self._length)
            self._write = session.first_slot + self.position_ids.flatten()
        else:
            table = torch.nn.utils.rnn.pad_sequence([s.page_slots for s in rows.sessions], batch_first=True)
            self._write = _slots(table, self.position_ids, page_size).flatten()
            last = torch.tensor(ends)[:, None] - 1
            self._read = _slots(table, torch.arange(self._length).clamp(max=last), page_size).flatten()
        self.attention_mask = self._mask(rows.starts)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, kv_heads, T, head_dim] of block `layer_idx` in, [B, kv_heads, L, head_dim] out."""
        cache = self._arena[layer_idx]
        return self._store(cache.keys, key_states), self._store(cache.values, value_states)

    def _store(self, slots: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        batch, heads, new_tokens, head_dim = states.shape
        slots.index_copy_(0, self._write, states.transpose(1, 2).reshape(batch * new_tokens, heads, head_dim))
        if self._run is not None:
            return slots[self._run].transpose(0, 1)[None]
        return slots.index_select(0, self._read).view(batch, self._length, heads, head_dim).transpose(1, 2)

    def _mask(self, starts: list[int]) -> torch.Tensor | None:
        """Which of L positions each new one sees, [B, 1, T, L] bool; None where a plain causal mask will do."""
        if min(starts) == max(starts) and (self._new_tokens == 1 or starts[0] == 0):
            return None
        return (torch.arange(self._length) <= self.position_ids[..., None])[:, None]


def _slots(page_slots: torch.Tensor, positions: torch.Tensor, page_size: int) -> torch.Tensor:
    """The slots [B, N] of `positions` [B, N], with the rows' pages `page_slots` [B, P]."""
    return page_slots.gather(1, positions // page_size) + positions % page_size
