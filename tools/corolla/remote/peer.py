"""What routes need of a connection to another server, and of the blocks of this process."""

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import Protocol

import torch

from corolla.wire.messages import SpanOutput, SpanStep


class Peer(Protocol):
    """Another server, for use by several threads. See corolla.remote.server."""

    def open(self, max_length: int, adapter: str, timeout: float, idle_timeout: float) -> str:
        """The id of a new session; waits for room up to `timeout` seconds. Raises PeerError, or OverloadedError."""

    def close_session(self, session_id: str) -> None:
        """Ends a session; PeerError."""

    def submit(self, step: SpanStep, timeout: float) -> "Future[SpanOutput]":
        """Sends a step; the future fails with PeerError, at the latest after `timeout` seconds."""


class Peers(Protocol):
    """Connections to servers by their addresses, for use by several threads."""

    def connect(self, address: str) -> Peer:
        """The connection to a server, which is kept for the next caller."""

    def keep(self, addresses: Collection[str]) -> None:
        """Ends connections to other servers than these, unless steps are under way on them."""

    def close(self) -> None:
        """Ends all connections."""


class LocalBlocks(Protocol):
    """The blocks of the asking process, for use by several threads."""

    def step(
        self, hidden_states: torch.Tensor, session_ids: Sequence[str], starts: Sequence[int], blocks: range
    ) -> torch.Tensor:
        """Hidden states [n, T, H] through some of the blocks."""
