"""Bursts of generations, some of whose clients leave: who left when, and what was computed for nobody."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Event, Timer
from typing import Any

from corolla.errors import CorollaError
from corolla.generate.sequence import Finished
from corolla.kv.table import SessionTable
from corolla.serving.blocks import BlocksService
from corolla.serving.grouping import BlocksRequest

END_SECONDS = 300.0
"""By then every generation of a burst has ended."""


class BurstClient:
    """The output of one generation, with the client that waits for it.

    That the client has left is noticed where a stream of the server notices it: on sending, or when asked to look.
    All times are seconds of one clock, 0 for what has not happened.
    """

    def __init__(self) -> None:
        self.cancelled = False
        self.left = 0.0
        self.freed = 0.0
        self.ended = 0.0
        self.tokens = 0
        self.error: Exception | None = None
        self.is_freed = Event()
        self.session_id = ""

    def leave(self) -> None:
        """The client cancels."""
        self.left = time.perf_counter()

    @property
    def has_left(self) -> bool:
        """Whether the client cancelled before its generation was over."""
        return self.left > 0 and not self.ended

    def poll(self) -> None:
        """See corolla.generate.sequence.Output."""
        self.cancelled = self.has_left

    def begin(self, session_id: str) -> None:
        """See corolla.generate.sequence.Output."""
        self.session_id = session_id

    def send(self, text: str, finished: Finished | None) -> None:
        """See corolla.generate.sequence.Output."""
        if finished is None:
            self.poll()
        else:
            self.tokens = finished.num_output_tokens
            self.ended = time.perf_counter()

    def fail(self, error: Exception) -> None:
        """See corolla.generate.sequence.Output."""
        self.error = error
        self.is_freed.set()


@dataclass
class Watch:
    """What happens to the clients of the burst that runs: `wasted` positions were computed after the client left."""

    clients: Sequence[BurstClient] = ()
    wasted_prompts: int = 0
    wasted_tokens: int = 0

    def begin(self, clients: Sequence[BurstClient]) -> None:
        """Starts at nothing."""
        self.clients, self.wasted_prompts, self.wasted_tokens = clients, 0, 0

    def computes(self, requests: Sequence[BlocksRequest]) -> None:
        """Told of every step of the chain before it runs."""
        gone = {client.session_id for client in self.clients if client.has_left}
        for request in requests:
            if request.session_ids and request.session_ids[0] in gone:
                positions = request.hidden_states.shape[1]
                if positions > 1:
                    self.wasted_prompts += positions
                else:
                    self.wasted_tokens += 1

    def frees(self, session_id: str) -> None:
        """Told of every session whose pages are free again."""
        for client in self.clients:
            if client.session_id == session_id:
                client.freed = time.perf_counter()
                client.is_freed.set()


@dataclass(frozen=True)
class WatchedChain(BlocksService):
    """A chain that tells what it computes."""

    watch: Watch = field(kw_only=True)

    def run(self, requests: Sequence[BlocksRequest]) -> list[Any]:
        """See BlocksService."""
        self.watch.computes(requests)
        return super().run(requests)


class WatchedTable(SessionTable):
    """A session table that tells what it frees."""

    watch = Watch()

    def close(self, session_id: str) -> int:
        """See SessionTable."""
        freed = super().close(session_id)
        self.watch.frees(session_id)
        return freed


def leave_after(client: BurstClient, seconds: float) -> Timer:
    """Lets a client leave later, from a thread."""
    timer = Timer(seconds, client.leave)
    timer.start()
    return timer


def wait_until_freed(clients: Sequence[BurstClient]) -> None:
    """Until all pages are back; CorollaError where a generation failed or does not end."""
    deadline = time.monotonic() + END_SECONDS
    for client in clients:
        ended = client.is_freed.wait(deadline - time.monotonic())
        if client.error is not None:
            raise client.error
        if not ended:
            raise CorollaError(f"a generation did not end within {END_SECONDS:.0f} s; try a smaller burst")
