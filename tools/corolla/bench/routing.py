"""How long it takes to find routes in a swarm made at random."""

import random
import statistics
from dataclasses import dataclass

from corolla.bench.lengths import milliseconds
from corolla.bench.swarms import random_swarm
from corolla.bench.tables import markdown
from corolla.routing.bans import Bans
from corolla.routing.find import find_route
from corolla.routing.measurements import Measurements
from corolla.routing.parallel import forward_routes
from corolla.routing.query import RouteQuery

FORWARD_ROUTES = 16


@dataclass(frozen=True)
class RoutingTimes:
    """Milliseconds over repetitions: of one route for a generation, and of one of many for parallel forwards."""

    peers: int
    blocks: int
    median: float
    longest: float
    forward: float


def measure_routing(peers: int, blocks: int, repetitions: int) -> RoutingTimes:
    """A new swarm for every repetition; the distance to each server is known."""
    times = [_measure(peers, blocks, seed) for seed in range(repetitions)]
    generation, forward = zip(*times, strict=True)
    return RoutingTimes(peers, blocks, statistics.median(generation), max(generation), statistics.median(forward))


def _measure(peers: int, blocks: int, seed: int) -> tuple[float, float]:
    swarm = random_swarm(peers, blocks, seed)
    measured, bans, query = Measurements(), Bans(), RouteQuery(max_length=1024)
    chance = random.Random(seed)
    for peer in swarm:
        measured.saw_round_trip(peer.peer_id, chance.uniform(0.001, 0.15))
    return (
        milliseconds(lambda: find_route(swarm, range(blocks), query, measured, bans)),
        milliseconds(lambda: forward_routes(swarm, range(blocks), query, bans, FORWARD_ROUTES)) / FORWARD_ROUTES,
    )


def table(times: RoutingTimes) -> str:
    """In Markdown."""
    return markdown(
        ["peers", "blocks", "route, median ms", "longest ms", f"each of {FORWARD_ROUTES} forward routes, ms"],
        [[str(times.peers), str(times.blocks), *(f"{t:.1f}" for t in (times.median, times.longest, times.forward))]],
    )
