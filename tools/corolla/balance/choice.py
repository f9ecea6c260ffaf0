"""Which blocks a server takes that joins a swarm."""

from collections.abc import Sequence

import numpy as np

from corolla.balance.placement import Placement, rate, worth
from corolla.errors import InvalidValueError
from corolla.peers.record import PeerRecord, PeerState, Throughput


def choose_blocks(peers: Sequence[PeerRecord], blocks: int, size: int, throughput: Throughput) -> range:
    """The `size` consecutive blocks, of those of a model, that gain most from a server of this throughput.

    Of equal ones the first, so that servers line up without gaps. `peers` are the others of the swarm.
    """
    if not 1 <= size <= blocks:
        raise InvalidValueError("num_blocks", size, f"1 to {blocks}, the blocks of the model")
    placement = Placement.of(peers, blocks)
    own = rate(throughput, size)
    start = best_start(placement.carried, own, size, placement.mean + own * size / blocks)
    return range(start, start + size)


def choose_again(peers: Sequence[PeerRecord], blocks: int, own: PeerRecord) -> range:
    """The blocks of a server that has just announced its choice, for when others chose at the same moment.

    It keeps them unless another that starts as well, with a lower `peer_id`, has some of them too.
    """
    others = [peer for peer in peers if peer.peer_id != own.peer_id]
    before = [peer for peer in others if peer.state is PeerState.JOINING and peer.peer_id < own.peer_id]
    if not any(block in peer.blocks for peer in before for block in own.blocks):
        return own.blocks
    return choose_blocks(others, blocks, len(own.blocks), own.throughput)


def best_start(carried: np.ndarray, own: float, size: int, mean: float) -> int:
    """Where `size` blocks gain most from `own` tokens per second more than what is `carried` [B]."""
    gains = worth(carried + own, mean) - worth(carried, mean)
    return int(np.lib.stride_tricks.sliding_window_view(gains, size).sum(axis=1).argmax())
