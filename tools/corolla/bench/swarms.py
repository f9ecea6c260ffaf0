"""Swarms made at random, for measurements and tests of what works on the records of peers."""

import random

from corolla.peers.record import PeerRecord, PeerState, Throughput


def random_swarm(peers: int, blocks: int, seed: int, neighbours: int = 8) -> list[PeerRecord]:
    """Servers that differ in size, speed, load and place; every block is held by at least one, if peers suffice.

    Each knows its round trips to up to so many neighbours, of those that hold the block after its last.
    """
    chance = random.Random(seed)
    places = [(chance.random(), chance.random()) for _ in range(peers)]
    ranges = [_random_range(chance, blocks) for _ in range(peers)]
    size = max(1, blocks // 8)
    for index, start in enumerate(range(0, blocks, size)):
        if index < peers:
            ranges[index] = range(start, min(start + size, blocks))
    followers = [[j for j in range(peers) if j != i and ranges[i].stop in ranges[j]] for i in range(peers)]
    return [
        _record(
            chance,
            i,
            ranges[i],
            {
                _name(j): 0.001 + 0.1 * _distance(places[i], places[j])
                for j in chance.sample(followers[i], min(neighbours, len(followers[i])))
            },
        )
        for i in range(peers)
    ]


def _record(chance: random.Random, index: int, held: range, round_trips: dict[str, float]) -> PeerRecord:
    total = chance.choice([4096, 16384, 65536])
    speed = chance.uniform(200.0, 4000.0)
    return PeerRecord(
        peer_id=_name(index),
        address=f"10.{index // 65536}.{index // 256 % 256}.{index % 256}:8001",
        model="model",
        revision="main",
        start=held.start,
        end=held.stop,
        state=PeerState.ONLINE,
        throughput=Throughput(speed, 40.0 * speed, 5000.0),
        dtype="bfloat16",
        quant="none",
        generates=False,
        free_tokens=chance.randint(0, total),
        total_tokens=total,
        round_trips=round_trips,
    )


def _random_range(chance: random.Random, blocks: int) -> range:
    size = chance.randint(1, max(1, blocks // 4))
    start = chance.randint(0, blocks - size)
    return range(start, start + size)


def _name(index: int) -> str:
    return f"peer-{index:04d}"


def _distance(a: tuple[float, float], b: tuple[float, float]) -> float:
    return ((a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2) ** 0.5
