"""Which servers hold which blocks, as arrays, and how well that is balanced."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from corolla.peers.record import PeerRecord, PeerState, Throughput

_ALMOST_NOTHING = 0.02
"""Share of the mean below which a block counts as if nobody held it."""


@dataclass(frozen=True)
class Placement:
    """N servers over the blocks 0 to `blocks` - 1 of a model.

    starts, sizes  int   [N]: each holds the blocks [start, start + size)
    rates          float [N]: tokens per second that it carries through all of them
    online         bool  [N]: it can be used now, and is not about to start or to move
    movable        bool  [N]: it takes other blocks if the swarm is short of them
    """

    blocks: int
    peer_ids: tuple[str, ...]
    starts: np.ndarray
    sizes: np.ndarray
    rates: np.ndarray
    online: np.ndarray
    movable: np.ndarray

    @classmethod
    def of(cls, peers: Sequence[PeerRecord], blocks: int) -> "Placement":
        """From the records of all who hold blocks or soon will, in the order of their names."""
        staying = sorted(
            (peer for peer in peers if peer.state is not PeerState.OFFLINE and 0 <= peer.start < peer.end <= blocks),
            key=lambda peer: peer.peer_id,
        )
        return cls(
            blocks,
            tuple(peer.peer_id for peer in staying),
            starts=np.array([peer.start for peer in staying], np.int64),
            sizes=np.array([len(peer.blocks) for peer in staying], np.int64),
            rates=np.array([rate(peer.throughput, len(peer.blocks)) for peer in staying], np.float64),
            online=np.array([peer.state is PeerState.ONLINE for peer in staying], bool),
            movable=np.array([peer.movable for peer in staying], bool),
        )

    @property
    def held(self) -> np.ndarray:
        """bool [N, B]: does it hold the block?"""
        block = np.arange(self.blocks)
        return (self.starts[:, None] <= block) & (block < (self.starts + self.sizes)[:, None])

    @property
    def carried(self) -> np.ndarray:
        """float [B]: tokens per second that all holders of a block carry together."""
        return self.rates @ self.held

    @property
    def weakest(self) -> float:
        """Tokens per second through the weakest block: what the swarm carries at most."""
        return float(self.carried.min())

    @property
    def mean(self) -> float:
        """Tokens per second if all blocks had the same: no placement of these servers carries more."""
        return float(self.rates @ self.sizes) / self.blocks

    def moved(self, server: int, start: int) -> "Placement":
        """With one of the servers elsewhere."""
        starts = self.starts.copy()
        starts[server] = start
        return replace(self, starts=starts)


def rate(throughput: Throughput, size: int) -> float:
    """Tokens per second that a server with so many blocks carries through all of them."""
    return min(throughput.inference / size, throughput.network)


def worth(carried: np.ndarray, mean: float) -> np.ndarray:
    """How good it is that so much is carried: the scarcer a block, the steeper. Its sum over blocks never falls."""
    square = (carried / (mean or 1.0) + _ALMOST_NOTHING) ** 2
    return -1.0 / square**2
