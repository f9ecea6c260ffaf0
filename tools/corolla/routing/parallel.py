"""Routes for parallel forwards: together they let most tokens through, whatever time one of them takes."""

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from corolla.peers.record import PeerRecord
from corolla.routing.bans import Bans
from corolla.routing.find import as_route
from corolla.routing.query import RouteQuery
from corolla.routing.route import Route
from corolla.routing.shortest_path import HOME, PathCosts, shortest_path
from corolla.routing.usable import usable_blocks

SHARPNESS = 8
"""What is twice as busy as another costs 2 ** SHARPNESS times as much: nearly only the busiest count."""
COMPUTE, NETWORK = 0, 1
_NONE = np.zeros(0, np.int64)


def forward_routes(
    peers: Sequence[PeerRecord], blocks: range, query: RouteQuery, bans: Bans, count: int
) -> list[Route]:
    """`count` routes through `blocks`, for equal shares of the work, on which what is busiest is least busy.

    A server computes and receives at the same time, so either may be what it is busy with. As deterministic as
    `find_route`; raises NoRouteError.
    """
    peers = sorted(peers, key=lambda peer: peer.peer_id)
    usable = usable_blocks(peers, blocks, query, bans.running())
    work = _work(peers, query)
    likely = work * [np.maximum(usable.sum(axis=1) / 2, 1.0), np.ones(len(usable))]
    load = np.zeros_like(work)
    no_trips = np.zeros(len(usable))
    routes = []
    for _ in range(count):
        busy = load + likely
        price = work * (busy / max(busy.max(), np.finfo(float).tiny)) ** SHARPNESS
        path = shortest_path(PathCosts(usable, price[COMPUTE], price[NETWORK], no_trips, _NONE, _NONE, no_trips[:0]))
        for index, group in groupby(path):
            load[:, index] += work[:, index] * [len(list(group)), 1]
        routes.append(as_route(peers, blocks, path))
    return routes


def _work(peers: Sequence[PeerRecord], query: RouteQuery) -> np.ndarray:
    """[2, P + 1]: seconds per token of computing a block, and of receiving hidden states; 0 where that is not known."""
    work = np.zeros((2, 1 + len(peers)))
    for index, peer in enumerate(peers, HOME + 1):
        seconds = [1 / tokens if tokens > 0 else 0.0 for tokens in (peer.throughput.forward, peer.throughput.network)]
        work[:, index] = seconds
        if peer.peer_id == query.peer_id:
            work[COMPUTE, HOME] = seconds[COMPUTE]
    return work
