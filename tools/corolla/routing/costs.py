"""What a step costs in seconds, peer by peer: see docs/routing.md for the formula and where the constants come from."""

from collections.abc import Sequence
from itertools import chain, repeat
from math import inf
from statistics import median
from typing import Any

import numpy as np

from corolla.peers.record import PeerRecord
from corolla.routing.measurements import Measurements
from corolla.routing.query import RouteQuery
from corolla.routing.route import LOCAL
from corolla.routing.shortest_path import HOME, PathCosts

HOP_SECONDS = 0.001
"""What a server adds to a step besides the bare round trip and the time it reports."""
UNKNOWN_ROUND_TRIP = 0.1
"""Seconds to a peer and back when no round trip to any peer is known."""
NO_ROOM_SECONDS = 10.0
"""For a session that has to wait until others end: more than any step takes, so that routes with room come first."""
BUSY_FACTOR = 1.0
"""By so much a step takes longer, relative to one on an idle server, when the whole KV cache is in use."""


def generation_costs(
    peers: Sequence[PeerRecord], usable: np.ndarray, query: RouteQuery, measured: Measurements
) -> PathCosts:
    """The expected seconds of a step of one token. Peer i of `peers` has index i + 1, after the asker itself.

    `usable` [P + 1, B] includes the asker.
    """
    own = next((peer for peer in peers if peer.peer_id == query.peer_id), None)
    room = np.array([peer.free_tokens >= query.max_length for peer in peers], bool)
    own_seconds = announced_block_seconds(own) if own is not None else 0.0
    return PathCosts(
        usable=usable,
        block=np.array(
            [
                measured.block_seconds(LOCAL, own_seconds),
                *(measured.block_seconds(peer.peer_id, announced_block_seconds(peer)) for peer in peers),
            ]
        ),
        enter=np.array([0.0, *(HOP_SECONDS + NO_ROOM_SECONDS * ~room)]),
        home=np.array([0.0, *home_trips(peers, own, measured)]),
        **_known_trips(peers, query),
    )


def announced_block_seconds(peer: PeerRecord) -> float:
    """Of a step of one token, from what the peer says about its speed and its load."""
    load = 1.0 - min(peer.free_tokens / peer.total_tokens, 1.0) if peer.total_tokens else 0.0
    return (1.0 + BUSY_FACTOR * load) / peer.throughput.inference if peer.throughput.inference > 0 else inf


def home_trips(peers: Sequence[PeerRecord], own: PeerRecord | None, measured: Measurements) -> list[float]:
    """Seconds from the asker to each peer, one way: as measured, else as one of both announces, else as is typical."""
    round_trips = [_round_trip(peer, own, measured) for peer in peers]
    known = [seconds for seconds in round_trips if seconds is not None]
    typical = median(known) if known else UNKNOWN_ROUND_TRIP
    return [(typical if seconds is None else seconds) / 2 for seconds in round_trips]


def _round_trip(peer: PeerRecord, own: PeerRecord | None, measured: Measurements) -> float | None:
    seen = measured.round_trip(peer.peer_id)
    if seen is not None or own is None:
        return seen
    announced = (own.round_trips.get(peer.peer_id), peer.round_trips.get(own.peer_id))
    return min((seconds for seconds in announced if seconds is not None), default=None)


def _known_trips(peers: Sequence[PeerRecord], query: RouteQuery) -> dict[str, Any]:
    """The trips from peer to peer that are announced by either, and the ends of the way."""
    indices = {peer.peer_id: index for index, peer in enumerate(peers, HOME + 1) if peer.peer_id != query.peer_id}
    announcing = [peers[index - 1].round_trips for index in indices.values()]
    near = np.repeat(np.array(list(indices.values()), np.int64), [len(round_trips) for round_trips in announcing])
    far = np.fromiter(map(indices.get, chain.from_iterable(announcing), repeat(HOME)), np.int64, len(near))
    seconds = np.fromiter(chain.from_iterable(each.values() for each in announcing), np.float64, len(near))
    known = far != HOME
    near, far, seconds = near[known], far[known], seconds[known]
    senders, receivers, trips = np.concatenate([near, far]), np.concatenate([far, near]), np.tile(seconds / 2, 2)
    order = np.argsort(receivers, kind="stable")
    return {
        "senders": senders[order],
        "receivers": receivers[order],
        "trips": trips[order],
        "before": indices.get(query.before, HOME),
        "after": indices.get(query.after, HOME),
    }
