"""Other servers inside the test's process: block ranges of a LocalServer behind the interface of a connection.

They can be killed, stopped, slowed down and cut off from each other at any moment.
"""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from queue import SimpleQueue

import torch

from corolla.errors import CorollaError, NotFoundError
from corolla.kv.session import OpenRequest
from corolla.kv.table import SessionTable
from corolla.peers.record import PeerRecord, PeerState, Throughput
from corolla.remote.errors import PeerRefusalError, PeerUnreachableError
from corolla.serving.blocks import BlocksRequest, BlocksService
from corolla.wire.messages import Hop, SpanOutput, SpanStep
from corolla.wire.states import WireStates, decode, encode

FAST = Throughput(inference=1000.0, forward=10000.0, network=10000.0)


@dataclass
class _Known:
    """A step that came, and who waits for its output."""

    waiting: "list[Future[SpanOutput]]" = field(default_factory=list)
    reply: SpanOutput | None = None


class FakePeer:
    """One server: `blocks` of a service, one step at a time.

    `before_step` is called before each; `counts` has steps, pushes, duplicates and awaits.
    """

    def __init__(self, network: "FakeNetwork", name: str, blocks: range, service: BlocksService, table: SessionTable):
        self.name = name
        self.blocks = blocks
        self.counts: Counter[str] = Counter()
        self.before_step: Callable[[SpanStep], None] = lambda _: None
        self.after_push: Callable[[], None] = lambda: None
        self.cut_off_from: set[str] = set()
        self.loses_pushes = False
        self.adapters: set[str] = set()
        self.opened: list[tuple[int, str]] = []
        self._network = network
        self._service = service
        self._table = table
        self._sessions: set[str] = set()
        self._known: dict[str, _Known] = defaultdict(_Known)
        self._queue: SimpleQueue[tuple[SpanStep, Future[SpanOutput] | None]] = SimpleQueue()
        self._alive = True
        self._awake = threading.Event()
        self._awake.set()
        threading.Thread(target=self._run, daemon=True).start()

    def record(self, **changes: object) -> PeerRecord:
        """What it announces."""
        status = self._table.status()
        record = PeerRecord(
            self.name, self.name, "model", "revision", self.blocks.start, self.blocks.stop, PeerState.ONLINE, FAST,
            "float32", "none", False, status.free_tokens, status.total_tokens, tuple(self.adapters),
        )  # fmt: skip
        return replace(record, **changes)  # type: ignore[arg-type]

    @property
    def open_sessions(self) -> int:
        return len(self._sessions)

    def kill(self) -> None:
        """All that it knew is lost; who waits for it gets an error."""
        self._alive = False
        self._awake.set()
        for known in list(self._known.values()):
            for future in known.waiting:
                _fail(future, PeerUnreachableError(f"{self.name}: connection lost"))
        for session_id in list(self._sessions):
            self._forget(session_id)

    def restart(self) -> None:
        """Under the same address, empty."""
        self._known.clear()
        self._alive = True

    def hang(self) -> None:
        """It neither answers nor fails, until `wake`."""
        self._awake.clear()

    def wake(self) -> None:
        self._awake.set()

    def open(self, max_length: int, adapter: str, timeout: float, idle_timeout: float) -> str:
        self._check()
        if not self._awake.wait(0.2):
            raise PeerUnreachableError(f"{self.name}: deadline exceeded")
        self.opened.append((max_length, adapter))
        session = self._table.open(OpenRequest(max_length, timeout, idle_timeout=idle_timeout))
        self._sessions.add(session.id)
        return session.id

    def close_session(self, session_id: str) -> None:
        self._check()
        self._forget(session_id)

    def lose_a_session(self) -> None:
        """One of them is gone, as if it had expired."""
        self._forget(next(iter(self._sessions)))

    def submit(self, step: SpanStep, timeout: float) -> "Future[SpanOutput]":
        self._check()
        future: Future[SpanOutput] = Future()
        self._queue.put((step, future))
        return future

    def push(self, source: str, step: SpanStep) -> bool:
        """What another server hands over; whether it can."""
        if not self._alive or source in self.cut_off_from:
            return False
        if not self.loses_pushes:
            self.counts["received"] += 1
            self._queue.put((step, None))
        return True

    def _check(self) -> None:
        if not self._alive:
            raise PeerUnreachableError(f"{self.name}: connection refused")

    def _forget(self, session_id: str) -> None:
        self._sessions.discard(session_id)
        self._table.close(session_id)

    def _run(self) -> None:
        while True:
            step, future = self._queue.get()
            self._awake.wait()
            if not self._alive:
                _fail(future, PeerUnreachableError(f"{self.name}: connection lost"))
                continue
            try:
                self._take(step, future)
            except CorollaError as error:
                for waiting in [future, *self._known.pop(step.step_id, _Known()).waiting]:
                    _fail(waiting, error)

    def _take(self, step: SpanStep, future: "Future[SpanOutput] | None") -> None:
        known = self._known[step.step_id]
        if known.reply is not None:
            self.counts["duplicates"] += step.states is not None
            _answer(future, replace(known.reply, duplicate=True))
            return
        if future is not None:
            known.waiting.append(future)
        if step.states is None:
            self.counts["awaits"] += 1
            return
        self.before_step(step)
        if not self._alive:
            raise PeerUnreachableError(f"{self.name}: connection lost")
        assert step.blocks == self.blocks
        self.counts["steps"] += 1
        request = BlocksRequest(decode(step.states, torch.float32), list(step.session_ids), list(step.starts))
        (output,) = self._service.run([request])
        if isinstance(output, CorollaError):
            status = "NOT_FOUND" if isinstance(output, NotFoundError) else "INVALID_ARGUMENT"
            raise PeerRefusalError(self.name, f"{status}: {output}")
        states = encode(output, step.states.encoding)
        pushed = bool(step.next) and self._network.push(self.name, step, states)
        self.counts["pushed"] += pushed
        self.after_push()
        known.reply = SpanOutput(states, pushed, self._table.status().free_tokens, 0.001, duplicate=False)
        for waiting in known.waiting:
            _answer(waiting, known.reply)


class FakeNetwork:
    """Servers by name, which is also their address, and the directory that lists them."""

    def __init__(self) -> None:
        self.peers_by_name: dict[str, FakePeer] = {}
        self.kept: set[str] = set()
        self._records: dict[str, PeerRecord] = {}
        self._changed = threading.Condition()

    def add(self, peer: FakePeer) -> FakePeer:
        self.peers_by_name[peer.name] = peer
        self.announce(peer.record())
        return peer

    def announce(self, record: PeerRecord) -> None:
        with self._changed:
            self._records[record.peer_id] = record
            self._changed.notify_all()

    def vanish(self, name: str) -> None:
        """Out of the directory."""
        with self._changed:
            self._records.pop(name, None)
            self._changed.notify_all()

    def connect(self, address: str) -> FakePeer:
        return self.peers_by_name[address]

    def push(self, source: str, step: SpanStep, states: WireStates) -> bool:
        hop: Hop = step.next[0]
        onward = SpanStep(hop.session_ids, step.starts, step.step_id, states, hop.blocks, step.next[1:])
        return self.peers_by_name[hop.address].push(source, onward)

    def peers(self) -> Sequence[PeerRecord]:
        with self._changed:
            return list(self._records.values())

    def wait_for_change(self, timeout: float) -> bool:
        with self._changed:
            return self._changed.wait(timeout)

    def keep(self, addresses: Collection[str]) -> None:
        self.kept = set(addresses)

    def close(self) -> None:
        """Nothing to end."""


def _answer(future: "Future[SpanOutput] | None", reply: SpanOutput) -> None:
    if future is not None and not future.done():
        future.set_result(reply)


def _fail(future: "Future[SpanOutput] | None", error: CorollaError) -> None:
    if future is not None and not future.done():
        future.set_exception(error)
