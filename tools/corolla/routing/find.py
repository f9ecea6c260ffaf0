"""The route of a session: the one on which a token is expected soonest."""

from collections.abc import Sequence
from itertools import groupby

from corolla.peers.record import PeerRecord
from corolla.routing.bans import Bans
from corolla.routing.costs import generation_costs
from corolla.routing.measurements import Measurements
from corolla.routing.query import RouteQuery
from corolla.routing.route import LOCAL, Route, Span
from corolla.routing.shortest_path import HOME, shortest_path
from corolla.routing.usable import usable_blocks


def find_route(
    peers: Sequence[PeerRecord], blocks: range, query: RouteQuery, measured: Measurements, bans: Bans
) -> Route:
    """The route through `blocks` with the least expected time per token; of equal ones always the same.

    The order of `peers` does not matter. A server may be used for a part of its blocks, and more than once. Raises
    NoRouteError if nobody can be used for some block.
    """
    peers = sorted(peers, key=lambda peer: peer.peer_id)
    usable = usable_blocks(peers, blocks, query, bans.running())
    path = shortest_path(generation_costs(peers, usable, query, measured))
    return as_route(peers, blocks, path)


def as_route(peers: Sequence[PeerRecord], blocks: range, path: Sequence[int]) -> Route:
    """Spans from the peer of each block, HOME or its place among `peers` plus one."""
    spans = []
    start = blocks.start
    for index, group in groupby(path):
        end = start + len(list(group))
        peer_id, address = (LOCAL, "") if index == HOME else (peers[index - 1].peer_id, peers[index - 1].address)
        spans.append(Span(peer_id, address, start, end))
        start = end
    return tuple(spans)
