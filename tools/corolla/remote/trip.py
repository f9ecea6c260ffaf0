"""One step through consecutive spans on other servers, which push it from one to the next."""

import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Protocol

import torch

from corolla.errors import CorollaError
from corolla.remote.errors import PeerUnreachableError
from corolla.remote.patience import Patience
from corolla.remote.peer import Peers
from corolla.remote.sessions import SpanSession
from corolla.routing.route import Span
from corolla.wire.messages import Hop, SpanOutput, SpanStep
from corolla.wire.states import WireStates, decode, encode

POLL_SECONDS = 0.1
"""How often somebody who waits asks whether the answer is still wanted."""
LINK_REST_SECONDS = 30.0
"""For which no push is tried between two servers after one was late."""


class SpanError(CorollaError):
    """A span could not make a step; `error` is what its server said, or that it said nothing."""

    def __init__(self, span: Span, error: CorollaError) -> None:
        super().__init__(f"blocks {span.start}:{span.end} on {span.address}: {error}")
        self.span = span
        self.error = error


class AbandonedError(CorollaError):
    """Nobody wants the step's output any more."""


class Observer(Protocol):
    """Is told how servers did."""

    def answered(self, span: Span, positions: int, computed: float, waited: float | None) -> None:
        """A step took `computed` seconds there, and `waited` with the way there and back, if that is known."""


@dataclass
class TripCounters:
    """What all trips of a process have done.

    `steps` through `spans` servers took `one_way_trips`: n + 1 for n servers if every push arrived, and one more for
    each of the `fallbacks`, in which the asker sent on an output itself. `moves` are sessions that another server took.
    """

    steps: int = 0
    spans: int = 0
    one_way_trips: int = 0
    fallbacks: int = 0
    moves: int = 0


@dataclass
class Links:
    """Ways from server to server on which a push was late; they are left alone for a while."""

    _resting: dict[tuple[str, str], float] = field(default_factory=dict)

    def rest(self, source: Span, target: Span) -> None:
        """A push from `source` to `target` did not arrive in time."""
        self._resting[source.address, target.address] = time.monotonic() + LINK_REST_SECONDS

    def usable(self, source: Span, target: Span) -> bool:
        """Whether a push may be tried."""
        return time.monotonic() >= self._resting.get((source.address, target.address), 0.0)


@dataclass(frozen=True)
class TripContext:
    """What all trips have in common: hidden states travel in `encoding`."""

    peers: Peers
    observer: Observer
    encoding: str
    patience: Patience = field(default_factory=Patience)
    links: Links = field(default_factory=Links)
    counters: TripCounters = field(default_factory=TripCounters)
    counting: Lock = field(default_factory=Lock)


class Trip:
    """One step of n sequences; it is under way as soon as it is made.

    The first server is sent the step, with the way it is to go on; each later one is told at the same moment to expect
    it, and answers when it has computed what was pushed to it. Every answer holds the output, so that the asker knows
    what each server was sent and can send it himself if a push fails or is late. All messages of a step have one id, by
    which servers tell what they have already.
    """

    def __init__(
        self,
        context: TripContext,
        sessions: Sequence[Sequence[SpanSession]],
        starts: Sequence[int],
        hidden_states: torch.Tensor,
    ) -> None:
        """`sessions` are those of the n rows on each span, `hidden_states` [n, T, H] from `starts` on."""
        self._context = context
        self._sessions = sessions
        self._spans = [rows[0].span for rows in sessions]
        self._starts = tuple(starts)
        self._dtype = hidden_states.dtype
        self._positions = hidden_states.shape[0] * hidden_states.shape[1]
        self._id = secrets.token_hex(16)
        self._fallbacks = 0
        self._answers: list[list[Future[SpanOutput]]] = [[] for _ in sessions]
        self._inputs = [encode(hidden_states, context.encoding)]
        self._sent_at = time.monotonic()
        self._launch(0)

    def result(self, is_abandoned: Callable[[], bool] = lambda: False) -> torch.Tensor:
        """The output of the last span [n, T, H], once all have answered; the inputs of each go into the histories.

        Raises SpanError, and AbandonedError as soon as `is_abandoned` says so.
        """
        pushed = False
        for index in range(len(self._spans)):
            reply = self._reply(index, pushed, is_abandoned)
            assert reply.states is not None, "only acknowledgements have none"
            self._inputs.append(reply.states)
            pushed = reply.pushed
        states = [decode(inputs, self._dtype) for inputs in self._inputs]
        for sessions, inputs in zip(self._sessions, states, strict=False):
            for session, row, start in zip(sessions, inputs, self._starts, strict=True):
                session.history.write(start, row)
        self._count()
        return states[-1]

    def _reply(self, index: int, pushed: bool, is_abandoned: Callable[[], bool]) -> SpanOutput:
        """What a span's server answers, which was `pushed` the step by the one before, or is sent it now."""
        span, patience = self._spans[index], self._context.patience
        late = False
        if pushed:
            grace = time.monotonic() + patience.grace(span, self._positions)
            answer = self._first_answer(index, grace, is_abandoned)
            late = answer is None or answer.exception() is not None
        if index and (late or not pushed):
            self._fallbacks += 1
            self._launch(index)
        if late:
            self._answers[index][-1].add_done_callback(partial(self._rest_if_lost, index))
        timeout = patience.deadline(span, self._positions)
        answer = self._first_answer(index, time.monotonic() + timeout, is_abandoned)
        if answer is None:
            raise SpanError(span, PeerUnreachableError(f"no answer within {timeout:.1f} s"))
        error = answer.exception()
        if isinstance(error, CorollaError):
            raise SpanError(span, error) from error
        reply = answer.result()
        waited = time.monotonic() - self._sent_at if index == 0 else None
        self._context.observer.answered(span, self._positions, reply.seconds, waited)
        return reply

    def _rest_if_lost(self, index: int, answer: Future[SpanOutput]) -> None:
        """Where a step that was sent again is no duplicate, it never arrived by the push."""
        if not answer.cancelled() and answer.exception() is None and not answer.result().duplicate:
            self._context.links.rest(self._spans[index - 1], self._spans[index])

    def _first_answer(
        self, index: int, deadline: float, is_abandoned: Callable[[], bool]
    ) -> "Future[SpanOutput] | None":
        """An answer of a span, without an error unless all have one; None at the deadline."""
        answers = self._answers[index]
        while True:
            left = deadline - time.monotonic()
            done, running = wait(answers, max(0.0, min(POLL_SECONDS, left)), FIRST_COMPLETED)
            good = [answer for answer in done if answer.exception() is None]
            if good or not running:
                return good[0] if good else answers[-1]
            if left <= 0:
                return None
            if is_abandoned():
                raise AbandonedError("nobody waits for the step any more")
            answers = list(running)

    def _launch(self, index: int) -> None:
        """Sends a span the step, and asks those that it will be pushed on to for their outputs."""
        reached = self._reached_from(index)
        self._send(index, self._inputs[index], tuple(map(self._hop, range(index + 1, reached + 1))))
        for later in range(index + 1, reached + 1):
            if not self._answers[later]:
                self._send(later)

    def _send(self, index: int, states: WireStates | None = None, hops: tuple[Hop, ...] = ()) -> None:
        hop = self._hop(index)
        timeout = sum(self._context.patience.deadline(span, self._positions) for span in self._spans[: index + 1])
        step = SpanStep(hop.session_ids, self._starts, self._id, states, hop.blocks, hops, timeout)
        try:
            self._answers[index].append(self._context.peers.connect(hop.address).submit(step, timeout))
        except CorollaError as error:
            raise SpanError(self._spans[index], error) from error

    def _hop(self, index: int) -> Hop:
        span = self._spans[index]
        return Hop(span.address, span.blocks, tuple(session.id for session in self._sessions[index]))

    def _reached_from(self, index: int) -> int:
        """The last span that a step reaches by pushes."""
        links = self._context.links
        while index + 1 < len(self._spans) and links.usable(self._spans[index], self._spans[index + 1]):
            index += 1
        return index

    def _count(self) -> None:
        with self._context.counting:
            counters = self._context.counters
            counters.steps += 1
            counters.spans += len(self._spans)
            counters.one_way_trips += len(self._spans) + 1 + self._fallbacks
            counters.fallbacks += self._fallbacks
