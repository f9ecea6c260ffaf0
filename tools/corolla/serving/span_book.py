"""Which steps a span knows: who waits for them, and what came of the last one of each session."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import TypeVar

from corolla.errors import InvalidValueError, OverloadedError
from corolla.wire.messages import SpanOutput, SpanStep

logger = logging.getLogger(__name__)

Respond = Callable[[SpanOutput | Exception], None]
"""Takes the one answer to a request."""
MAX_WAITING = 4096
"""Steps that may be waited for before they have come."""
MAX_PAST = 8192
"""Ids that are remembered of steps without outputs: of past ones, so that late copies do not run again, and of those
that failed."""

_Key = tuple[str, int]
"""A step's id and its first block: a route may come to a server twice."""
Remembered = TypeVar("Remembered")


@dataclass(frozen=True)
class _Waiter:
    respond: Respond
    duplicate: bool
    deadline: float

    def answer(self, outcome: SpanOutput | Exception) -> None:
        """One who cannot be answered is no reason to leave out the others."""
        if self.duplicate and isinstance(outcome, SpanOutput):
            outcome = replace(outcome, duplicate=True)
        try:
            self.respond(outcome)
        except Exception:
            logger.exception("a step could not be answered")


@dataclass
class _Entry:
    """A step: waited for until it has `arrived`, computed until it has an `output`.

    `sessions` are those of which it is the last step that was done.
    """

    session_ids: tuple[str, ...]
    arrived: bool = False
    output: SpanOutput | None = None
    waiters: list[_Waiter] = field(default_factory=list)
    sessions: set[str] = field(default_factory=set)


class StepBook:
    """Sees to it that each step is computed once and everybody who asks gets its output.

    The output of a step is kept until each of its sessions has done another one or has ended.
    """

    def __init__(self) -> None:
        self._guard = Lock()
        self._entries: dict[_Key, _Entry] = {}
        self._last: dict[tuple[str, int], _Key] = {}
        self._past: dict[_Key, None] = {}
        self._failed: dict[_Key, Exception] = {}
        self._waiting = 0
        self.duplicates = 0

    def wait(self, step: SpanStep, respond: Respond, deadline: float) -> None:
        """Waits for a step that somebody else sends. OverloadedError, InvalidValueError as of `arrive`."""
        with self._guard:
            outcome = self._failed.get(_key(step)) or self._entry(step).output
            if outcome is None:
                if self._waiting >= MAX_WAITING:
                    raise OverloadedError(f"{MAX_WAITING} steps are waited for already; retry later")
                self._waiting += 1
                self._entry(step).waiters.append(_Waiter(respond, False, deadline))
                return
        respond(outcome)

    def arrive(self, step: SpanStep, respond: Respond) -> bool:
        """Takes a step that came with its hidden states; tells whether it is to be computed now.

        InvalidValueError for the id of another step, or of one after which its sessions have gone on.
        """
        with self._guard:
            self._failed.pop(_key(step), None)
            entry = self._entry(step)
            first = not entry.arrived
            entry.arrived = True
            self.duplicates += not first
            if entry.output is None:
                self._waiting += 1
                entry.waiters.append(_Waiter(respond, not first, float("inf")))
                return first
            output = entry.output
        respond(replace(output, duplicate=True))
        return False

    def finish(self, step: SpanStep, outcome: SpanOutput | Exception) -> None:
        """Answers everybody who waits for a step. One that failed may be sent again."""
        key = _key(step)
        with self._guard:
            entry = self._entries[key]
            waiters, entry.waiters = entry.waiters, []
            self._waiting -= len(waiters)
            if isinstance(outcome, Exception):
                del self._entries[key]
                _remember(self._failed, key, outcome)
            else:
                entry.output = outcome
                self._keep(key, entry)
        for waiter in waiters:
            waiter.answer(outcome)

    def expire(self, now: float) -> None:
        """Gives up on steps that did not come in time."""
        expired: list[_Waiter] = []
        with self._guard:
            for key, entry in list(self._entries.items()):
                late = [waiter for waiter in entry.waiters if waiter.deadline < now]
                if late:
                    expired += late
                    entry.waiters = [waiter for waiter in entry.waiters if waiter.deadline >= now]
                    if not entry.arrived and not entry.waiters:
                        del self._entries[key]
            self._waiting -= len(expired)
        for waiter in expired:
            waiter.answer(OverloadedError("step_id: the step did not come in time; send its hidden_states"))

    def sessions(self) -> set[str]:
        """Those of which an output is kept."""
        with self._guard:
            return {session_id for session_id, _ in self._last}

    def forget(self, session_ids: Iterable[str]) -> None:
        """Drops what is kept of sessions that have ended."""
        ended = set(session_ids)
        with self._guard:
            for session_id, start in [last for last in self._last if last[0] in ended]:
                self._release(session_id, self._last.pop((session_id, start)))

    @property
    def kept(self) -> int:
        """Steps that are waited for, computed, or kept."""
        return len(self._entries)

    def _entry(self, step: SpanStep) -> _Entry:
        key = _key(step)
        if key in self._past:
            self.duplicates += step.states is not None
            raise InvalidValueError("step_id", step.step_id, "the id of a new step; this one's sessions have gone on")
        entry = self._entries.setdefault(key, _Entry(step.session_ids))
        if entry.session_ids != step.session_ids:
            raise InvalidValueError("step_id", step.step_id, "an id that no other step has")
        return entry

    def _keep(self, key: _Key, entry: _Entry) -> None:
        for session_id in entry.session_ids:
            before = self._last.get((session_id, key[1]))
            self._last[session_id, key[1]] = key
            entry.sessions.add(session_id)
            if before is not None:
                self._release(session_id, before)

    def _release(self, session_id: str, key: _Key) -> None:
        entry = self._entries[key]
        entry.sessions.discard(session_id)
        if not entry.sessions:
            del self._entries[key]
            _remember(self._past, key, None)


def _remember(known: dict[_Key, Remembered], key: _Key, value: Remembered) -> None:
    known[key] = value
    if len(known) > MAX_PAST:
        del known[next(iter(known))]


def _key(step: SpanStep) -> _Key:
    assert step.blocks is not None
    return step.step_id, step.blocks.start
