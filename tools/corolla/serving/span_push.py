"""Sending the output of a span straight on to the next server of its route."""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock
from typing import Protocol

from corolla.remote.connection import PeerConnection
from corolla.remote.errors import PeerError
from corolla.wire.messages import SpanOutput, SpanStep
from corolla.wire.states import WireStates

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
MAX_OUTSTANDING = 256
"""Pushes to one server that may be without an answer; more are not sent."""


class Connection(Protocol):
    """See corolla.remote.connection.PeerConnection."""

    @property
    def outstanding(self) -> int: ...

    @property
    def suspect(self) -> bool: ...

    def submit(
        self, step: SpanStep, *, acknowledge: bool, on_handed: Callable[[bool], None] = ...
    ) -> "Future[SpanOutput]": ...

    def close(self) -> None: ...


class Pushes:
    """One connection per next server; a dead one holds up nobody. `sent` and `failed` count pushes."""

    def __init__(self, connect: Callable[[str], Connection] = PeerConnection) -> None:
        self._connect = connect
        self._guard = Lock()
        self._connections: dict[str, Connection] = {}
        self.sent = self.failed = 0

    def push(self, step: SpanStep, output: WireStates, on_handed: Callable[[bool], None]) -> None:
        """Hands the output of a step to its next hop; `on_handed` learns soon whether it could be. Never blocks."""
        hop, *rest = step.next
        following = SpanStep(
            hop.session_ids, step.starts, step.step_id, output, hop.blocks, tuple(rest), timeout=step.timeout
        )
        connection = self._connection(hop.address)
        if connection.suspect:  # it may take seconds to know; the caller is not to wait for it
            self._count(False)
            on_handed(False)
            connection.submit(following, acknowledge=True).add_done_callback(self._answered)
            return
        if connection.outstanding >= MAX_OUTSTANDING:
            self._count(False)
            on_handed(False)
            return

        def handed(went_out: bool) -> None:
            self._count(went_out)
            on_handed(went_out)

        answer = connection.submit(following, acknowledge=True, on_handed=handed)
        answer.add_done_callback(self._answered)

    def close(self) -> None:
        """Ends all connections."""
        for connection in self._connections.values():
            connection.close()

    def _connection(self, address: str) -> Connection:
        """The least recently used one makes room, if it is idle."""
        with self._guard:
            connection = self._connections.pop(address, None)
            if connection is None:
                connection = self._connect(address)
                idle = [known for known, other in self._connections.items() if not other.outstanding]
                if len(self._connections) >= MAX_CONNECTIONS and idle:
                    self._connections.pop(idle[0]).close()
            self._connections[address] = connection
            return connection

    def _count(self, went_out: bool) -> None:
        with self._guard:
            self.sent += went_out
            self.failed += not went_out

    def _answered(self, answer: "Future[SpanOutput]") -> None:
        """Whoever waits for the step learns of errors by himself."""
        if isinstance(error := answer.exception(), PeerError):
            logger.info("a pushed step was not done: %s", error)
