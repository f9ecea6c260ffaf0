"""The other servers of a model: routes through them, sessions on them, and what to do when one fails."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event, Lock, Thread
from typing import Protocol

import torch

from corolla.errors import CorollaError, OverloadedError
from corolla.peers.record import PeerRecord, PeerState
from corolla.remote.errors import PeerRefusalError
from corolla.remote.patience import FAILOVER_TIMEOUT, PUSH_GRACE, STEP_TIMEOUT, Patience
from corolla.remote.peer import LocalBlocks, Peers
from corolla.remote.runner import RouteRow, RouteRunner
from corolla.remote.sessions import RouteSessions, SpanSession
from corolla.remote.trip import AbandonedError, SpanError, TripContext
from corolla.routing.bans import Bans
from corolla.routing.find import find_route
from corolla.routing.measurements import Measurements
from corolla.routing.query import RouteQuery
from corolla.routing.route import LOCAL, Route, Span
from corolla.routing.usable import NoRouteError, written_ranges

logger = logging.getLogger(__name__)

IDLE_MARGIN = 60.0
"""Seconds for which servers keep a session longer than a failover may take: its owner may have died."""
REPLAY_CHUNK = 512
"""Positions of one session that are sent again at once."""
LOOK_SECONDS = 0.5
"""How often it is looked whether the servers have changed."""
STAY_SECONDS = 5.0
"""For which a server that leaves is stayed with when nobody else can take its sessions."""
ROOM_SECONDS = 1.0
"""How long one wait in the line of a full server takes, before others are asked again."""
OPENING, CLOSING = 32, 4
"""Sessions that can be opened, and those that can be closed at the same time."""
FEW_POSITIONS = 16
"""A step of so many takes about as long as one of one position."""


class Directory(Protocol):
    """Who is there; see corolla.peers.directory."""

    def peers(self) -> Sequence[PeerRecord]:
        """All servers of the model, as last known."""

    def wait_for_change(self, timeout: float) -> bool:
        """Until they change, at most `timeout` seconds; whether they did."""

    def close(self) -> None:
        """Ends its work."""


@dataclass(frozen=True)
class SwarmSettings:
    """`blocks` of the whole model; the process itself hosts `hosted`, and its own server is `peer_id`.

    Hidden states travel in `encoding`; see corolla.wire.states.

    Seconds: `failover_timeout` to find another server for a running generation; see Patience for the others.
    """

    blocks: range
    encoding: str
    hosted: range = range(0)
    peer_id: str = LOCAL
    failover_timeout: float = FAILOVER_TIMEOUT
    step_timeout: float = STEP_TIMEOUT
    push_grace: float = PUSH_GRACE


@dataclass(frozen=True)
class Need:
    """What a sequence needs of every server: room for `max_length` positions, and an adapter unless that is empty.

    `own_id` is the sequence's session in the asking process.
    """

    max_length: int
    adapter: str
    own_id: str
    is_cancelled: Callable[[], bool] = field(default=lambda: False, compare=False)


class LeavingError(CorollaError):
    """A server announced that it will stop."""


class UnavailableBlocksError(OverloadedError):
    """Servers hold these blocks, but none of them took the session."""

    def __init__(self, missing: list[int], refusals: Mapping[str, SpanError]) -> None:
        reasons = "; ".join(f"{error.span.address}: {error.error}" for error in refusals.values())
        super().__init__(
            f"no server can be used for blocks {written_ranges(missing)} ({reasons}); try again later, or start "
            "another server for them"
        )


class Swarm:
    """Sessions of sequences on the servers of a model. For use by several threads."""

    def __init__(
        self,
        directory: Directory,
        peers: Peers,
        settings: SwarmSettings,
        local: LocalBlocks | None = None,
    ) -> None:
        self._directory = directory
        self._peers = peers
        self._settings = settings
        self.measured = Measurements()
        self.bans = Bans()
        patience = Patience(settings.step_timeout, settings.push_grace, self._expected)
        self.context = TripContext(peers, self, settings.encoding, patience)
        self._runner = RouteRunner(self.context, local)
        self._calls = ThreadPoolExecutor(OPENING, thread_name_prefix="peer-calls")
        self._closing = ThreadPoolExecutor(CLOSING, thread_name_prefix="peer-closing")
        self._records: dict[str, PeerRecord] = {}
        self._leaving: frozenset[str] = frozenset()
        self._staying: dict[str, float] = {}
        self._open_at: Counter[str] = Counter()
        self._counting = Lock()
        self._closed = Event()
        self._look()
        Thread(target=self._watch, name="peers", daemon=True).start()

    def attach(self, need: Need, timeout: float) -> RouteSessions:
        """Finds a route through the model and opens sessions on it, waiting for room and servers up to `timeout`.

        Raises NoRouteError with the blocks that nobody holds, OverloadedError, and AbandonedError.
        """
        return RouteSessions(self._cover(self._settings.blocks, need, time.monotonic() + timeout))

    def run(self, rows: Sequence[RouteRow], is_abandoned: Callable[[], bool]) -> list[torch.Tensor | CorollaError]:
        """See RouteRunner.run. Rows on a server that is about to stop get an error, so that they are moved."""
        leaving = self._leaving_span(rows[0].sessions.route) if self._leaving else None
        if leaving is not None:
            return [SpanError(leaving, LeavingError("the server stops"))] * len(rows)
        return self._runner.run(rows, is_abandoned)

    def repair(self, sessions: RouteSessions, need: Need, cached: int, failed: SpanError) -> RouteSessions:
        """Sessions with other servers for the span that failed, all of them with `cached` positions.

        The other spans keep theirs. What the lost server was sent is sent to the new ones. Waits for a server up to
        the `failover_timeout`; raises NoRouteError with the blocks that nobody holds, or AbandonedError.
        """
        deadline = time.monotonic() + self._settings.failover_timeout
        if isinstance(failed.error, LeavingError):
            return self._move(sessions, need, cached, failed.span)
        self._blame(failed)
        while True:
            try:
                return self._replace(sessions, need, cached, failed.span, deadline)
            except SpanError as error:
                logger.info("a generation could not go on: %s", error)
                if time.monotonic() >= deadline:
                    raise
                self._blame(error)

    def release(self, sessions: Sequence[SpanSession]) -> None:
        """Closes sessions on other servers, without waiting; on those that do not answer they expire."""
        for session in sessions:
            if session.is_remote and not self._closed.is_set():
                self._closing.submit(self._close, session)

    def close(self) -> None:
        """Ends all work; steps that run get errors of their own."""
        self._closed.set()
        self._calls.shutdown(wait=False)
        self._closing.shutdown(wait=False)
        self._directory.close()
        self._peers.close()

    def answered(self, span: Span, positions: int, computed: float, waited: float | None) -> None:
        """See Observer."""
        if positions <= FEW_POSITIONS:
            self.measured.saw_step(span.peer_id, len(span.blocks), computed)
            if waited is not None:
                self.measured.saw_round_trip(span.peer_id, max(0.0, waited - computed))
        if span.peer_id != LOCAL:
            self.bans.success(span.peer_id)

    def _replace(
        self, sessions: RouteSessions, need: Need, cached: int, span: Span, deadline: float
    ) -> RouteSessions:
        index = sessions.route.index(span)
        old = sessions.spans[index]
        neighbours = [other.span.peer_id for other in sessions.spans]
        before = neighbours[index - 1] if index else LOCAL
        after = neighbours[index + 1] if index + 1 < len(neighbours) else LOCAL
        new = self._cover(span.blocks, need, deadline, before, after)
        with self._released_on_error(new):
            self._replay(old, RouteSessions(new), cached, need)
        logger.info("blocks %d:%d of a generation moved from %s to %s", span.start, span.end, span.address, _names(new))
        self.release([old])
        with self.context.counting:
            self.context.counters.moves += 1
        return sessions.replaced({span: new})

    def _move(self, sessions: RouteSessions, need: Need, cached: int, span: Span) -> RouteSessions:
        """To another server if there is one now; else it is stayed with the one that leaves."""
        try:
            return self._replace(sessions, need, cached, span, time.monotonic())
        except AbandonedError:
            raise
        except CorollaError as error:
            logger.info("%s stops, and nobody else can go on for it yet: %s", span.address, error)
            self._staying[span.peer_id] = time.monotonic() + STAY_SECONDS
            return sessions

    def _replay(self, old: SpanSession, new: RouteSessions, cached: int, need: Need) -> None:
        for start in range(0, cached, REPLAY_CHUNK):
            end = min(start + REPLAY_CHUNK, cached)
            (result,) = self._runner.run([RouteRow(old.history.read(start, end), new, start)], need.is_cancelled)
            if isinstance(result, CorollaError):
                raise result
            if need.is_cancelled():
                raise AbandonedError("nobody waits for the generation any more")

    def _cover(
        self, blocks: range, need: Need, deadline: float, before: str = LOCAL, after: str = LOCAL
    ) -> tuple[SpanSession, ...]:
        """Sessions on servers that hold the blocks. Who has no room or fails is passed over while there are others."""
        passed: dict[str, SpanError] = {}
        patience = 0.0
        while True:
            query = RouteQuery(
                need.max_length, need.adapter, self._settings.hosted, self._settings.peer_id,
                blocked=frozenset(passed), before=before, after=after,
            )  # fmt: skip
            problem: CorollaError
            try:
                route = find_route(self._directory.peers(), blocks, query, self.measured, self.bans)
                return self._open(route, need, patience)
            except NoRouteError as error:
                problem = UnavailableBlocksError(error.missing, passed) if passed else error
                patience = ROOM_SECONDS if passed else 0.0
                passed.clear()
            except SpanError as error:
                self._blame(error)
                passed[error.span.peer_id] = error
                problem = UnavailableBlocksError(list(error.span.blocks), passed)
            if need.is_cancelled() or self._closed.is_set():
                raise AbandonedError("nobody waits for the generation any more")
            left = deadline - time.monotonic()
            if left <= 0:
                raise problem
            patience = min(patience, left)
            if not passed:
                self._directory.wait_for_change(min(LOOK_SECONDS, left))

    def _open(self, route: Route, need: Need, patience: float) -> tuple[SpanSession, ...]:
        """All at once; those that were opened are closed again if another cannot be."""
        futures = [self._calls.submit(self._open_one, span, need, patience) for span in route]
        opened: list[SpanSession] = []
        errors: list[SpanError] = []
        for future in futures:
            try:
                opened.append(future.result())
            except SpanError as error:
                errors.append(error)
        if errors:
            self.release(opened)
            raise errors[0]
        return tuple(opened)

    def _open_one(self, span: Span, need: Need, patience: float) -> SpanSession:
        if span.peer_id == LOCAL:
            return SpanSession(span, need.own_id)
        idle = self._settings.failover_timeout + IDLE_MARGIN
        try:
            peer = self._peers.connect(span.address)
            session = SpanSession(span, peer.open(need.max_length, need.adapter, patience, idle))
        except CorollaError as error:
            raise SpanError(span, error) from error
        self._count_open(span.address, 1)
        return session

    def _close(self, session: SpanSession) -> None:
        try:
            self._peers.connect(session.span.address).close_session(session.id)
        except CorollaError as error:
            logger.debug("a session on %s could not be closed: %s", session.span.address, error)
        finally:
            self._count_open(session.span.address, -1)

    def _count_open(self, address: str, change: int) -> None:
        with self._counting:
            self._open_at[address] += change

    @contextmanager
    def _released_on_error(self, sessions: Sequence[SpanSession]) -> Iterator[None]:
        try:
            yield
        except CorollaError:
            self.release(sessions)
            raise

    def _blame(self, failed: SpanError) -> None:
        """A server that works, and only has no such session or no room, is not left alone for that."""
        error = failed.error
        if isinstance(error, PeerRefusalError) and error.status in ("NOT_FOUND", "INVALID_ARGUMENT"):
            return
        if not isinstance(error, OverloadedError):
            logger.warning("%s", failed)
            self.bans.ban(failed.span.peer_id)

    def _expected(self, span: Span, positions: int) -> float:
        record = self._records.get(span.peer_id)
        if record is None or not (record.throughput.inference > 0 and record.throughput.forward > 0):
            return 0.0
        one = self.measured.block_seconds(span.peer_id, 1 / record.throughput.inference)
        return len(span.blocks) * max(one, positions / record.throughput.forward)

    def _leaving_span(self, route: Route) -> Span | None:
        now = time.monotonic()
        return next(
            (s for s in route if s.peer_id in self._leaving and now >= self._staying.get(s.peer_id, 0.0)), None
        )

    def _watch(self) -> None:
        while not self._closed.is_set():
            self._directory.wait_for_change(LOOK_SECONDS)
            self._look()

    def _look(self) -> None:
        peers = self._directory.peers()
        self._records = {peer.peer_id: peer for peer in peers}
        self._leaving = frozenset(peer.peer_id for peer in peers if peer.state is PeerState.OFFLINE)
        staying = {peer.address for peer in peers if peer.state is not PeerState.OFFLINE}
        with self._counting:
            self._open_at = +self._open_at
            used = set(self._open_at)
        self._peers.keep(staying | used)  # a server cannot end while somebody is connected to it


def _names(sessions: Sequence[SpanSession]) -> str:
    return ", ".join(session.span.address or "this server" for session in sessions)
