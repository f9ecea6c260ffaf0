"""The cheapest way through consecutive blocks over peers that each hold some of them: exact, and free of policy."""

from dataclasses import dataclass

import numpy as np

HOME = 0
"""Index of the asking process."""


@dataclass(frozen=True)
class PathCosts:
    """P peers, of which HOME is the first, and B blocks. Costs are of any one unit, and none is negative.

    usable   bool  [P, B]: may peer p compute block b?
    block    float [P]: of one block
    enter    float [P]: of each span, besides the trip to it; 0 for HOME
    home     float [P]: of the trip between the peer and home, 0 for HOME
    senders, receivers int [E], trips float [E]: known trips from peer to peer, which are taken where they cost less
        than the way through home; receivers ascend
    before, after: where the input lies and the output is wanted
    """

    usable: np.ndarray
    block: np.ndarray
    enter: np.ndarray
    home: np.ndarray
    senders: np.ndarray
    receivers: np.ndarray
    trips: np.ndarray
    before: int = HOME
    after: int = HOME


def shortest_path(costs: PathCosts) -> list[int]:
    """The peer of each block [B], so that the sum of all costs is least; of equal ways one that is always the same.

    Every block must be usable somewhere. Takes O(P + E) per block.
    """
    *layers, done = _forward(costs)
    path = [_predecessor(costs, done, costs.after, 0.0)]
    for done in reversed(layers):
        path.append(_predecessor(costs, done, path[-1], float(costs.enter[path[-1]])))
    assert path.pop() == costs.before
    return path[::-1]


def _forward(costs: PathCosts) -> list[np.ndarray]:
    """[b][p]: the least cost of the first b blocks with the last of them at peer p."""
    done = np.full(len(costs.block), np.inf)
    done[costs.before] = 0.0
    best = [done]
    groups = np.flatnonzero(np.diff(costs.receivers, prepend=-1))
    grouped = costs.receivers[groups]
    usable = costs.usable.T.copy()
    for block in range(costs.usable.shape[1]):
        arrival = (done + costs.home).min() + costs.home
        if len(groups):
            direct = np.minimum.reduceat(done[costs.senders] + costs.trips, groups)
            arrival[grouped] = np.minimum(arrival[grouped], direct)
        done = np.where(usable[block], np.minimum(done, arrival + costs.enter) + costs.block, np.inf)
        best.append(done)
    return best


def _predecessor(costs: PathCosts, done: np.ndarray, peer: int, enter: float) -> int:
    """Who computed the blocks up to here, with the costs `done`, if the way goes on at `peer`."""
    arrival = done + costs.home + costs.home[peer]
    known = slice(*np.searchsorted(costs.receivers, [peer, peer + 1]))
    np.minimum.at(arrival, costs.senders[known], done[costs.senders[known]] + costs.trips[known])
    sender = int(arrival.argmin())
    return peer if done[peer] <= arrival[sender] + enter else sender
