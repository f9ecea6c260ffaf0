"""Routes on simulated swarms: the least expected time, whatever the swarm; who may be used; bans and measurements."""

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corolla.bench.swarms import random_swarm
from corolla.peers.record import PeerRecord, PeerState, Throughput
from corolla.routing.bans import FIRST_BAN_SECONDS, LONGEST_BAN_SECONDS, Bans
from corolla.routing.costs import HOP_SECONDS, NO_ROOM_SECONDS, UNKNOWN_ROUND_TRIP
from corolla.routing.find import find_route
from corolla.routing.measurements import HALF_LIFE_SECONDS, Measurements
from corolla.routing.parallel import forward_routes
from corolla.routing.query import RouteQuery
from corolla.routing.route import LOCAL, Route, Span
from corolla.routing.usable import NoRouteError
from registries import idle_server

ANY = RouteQuery(max_length=100)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def peer(name: str, start: int, end: int, seconds: float = 0.001, **fields: object) -> PeerRecord:
    """An idle server that takes `seconds` per block."""
    speed = Throughput(1 / seconds, 1000.0, 1000.0)
    return idle_server(name, range(start, end), **{"throughput": speed} | fields)


def route(
    peers: Sequence[PeerRecord], blocks: int, query: RouteQuery = ANY, measured: Measurements | None = None,
    bans: Bans | None = None,
) -> Route:
    return find_route(peers, range(blocks), query, measured or Measurements(Clock()), bans or Bans(Clock()))


def spans(found: Route) -> list[tuple[str, int, int]]:
    return [(span.peer_id, span.start, span.end) for span in found]


class Costs:
    """The formula of docs/routing.md, said again, one span at a time."""

    def __init__(self, peers: Sequence[PeerRecord], query: RouteQuery, round_trips: dict[str, float]) -> None:
        self.peers = {record.peer_id: record for record in peers}
        self.query = query
        self.round_trips = round_trips

    def trip(self, sender: str, receiver: str) -> float:
        if sender == receiver:
            return 0.0
        ways = [self.home(sender) + self.home(receiver)]
        for one, other in ((sender, receiver), (receiver, sender)):
            if one != LOCAL and other in self.peers[one].round_trips:
                ways.append(self.peers[one].round_trips[other] / 2)
        return min(ways)

    def home(self, name: str) -> float:
        return self.round_trips[name] / 2 if name != LOCAL else 0.0

    def enter(self, name: str) -> float:
        if name == LOCAL:
            return 0.0
        return HOP_SECONDS + (NO_ROOM_SECONDS if self.peers[name].free_tokens < self.query.max_length else 0.0)

    def block(self, name: str) -> float:
        if name == LOCAL:
            return 0.0
        record = self.peers[name]
        return (2.0 - record.free_tokens / record.total_tokens) / record.throughput.inference

    def of(self, names: Sequence[str]) -> float:
        """The whole way, given the server of each block."""
        total, here = 0.0, LOCAL
        for name in names:
            total += self.block(name) + (self.trip(here, name) + self.enter(name) if name != here else 0.0)
            here = name
        return total + self.trip(here, LOCAL)

    def of_route(self, found: Route) -> float:
        return self.of([span.peer_id for span in found for _ in span.blocks])

    def holders(self, block: int) -> list[str]:
        names = [LOCAL] if block in self.query.local else []
        return names + [name for name, record in self.peers.items() if block in record.blocks]

    def best_of_all(self, blocks: int) -> float:
        return min(self.of(names) for names in itertools.product(*(self.holders(block) for block in range(blocks))))

    def dijkstra(self, blocks: int) -> float:
        """Over the states (blocks done, server of the last one)."""
        queue = [(0.0, 0, LOCAL)]
        seen = set()
        while True:
            cost, done, here = heapq.heappop(queue)
            if done > blocks:
                return cost
            if (done, here) in seen:
                continue
            seen.add((done, here))
            if done == blocks:
                heapq.heappush(queue, (cost + self.trip(here, LOCAL), done + 1, LOCAL))
                continue
            for name in self.holders(done):
                step = self.block(name) + (self.trip(here, name) + self.enter(name) if name != here else 0.0)
                heapq.heappush(queue, (cost + step, done + 1, name))


def measurements(round_trips: dict[str, float]) -> Measurements:
    measured = Measurements(Clock())
    for name, seconds in round_trips.items():
        measured.saw_round_trip(name, seconds)
    return measured


def distances(peers: Sequence[PeerRecord], seed: int) -> dict[str, float]:
    chance = random.Random(seed)
    return {record.peer_id: chance.uniform(0.001, 0.15) for record in peers}


@st.composite
def small_swarms(draw: st.DrawFn) -> tuple[list[PeerRecord], int, RouteQuery, dict[str, float]]:
    """Up to 4 servers and 5 blocks, all of which somebody holds."""
    blocks = draw(st.integers(1, 5))
    names = [f"p{i}" for i in range(draw(st.integers(1, 4)))]
    seconds = st.sampled_from([0.0005, 0.001, 0.01, 0.05])
    peers = []
    for name in names:
        start = draw(st.integers(0, blocks - 1))
        end = draw(st.integers(start + 1, blocks))
        trips = draw(st.dictionaries(st.sampled_from([*names, "gone"]), seconds, max_size=3))
        free = draw(st.sampled_from([0, 50, 400, 1000]))
        peers.append(peer(name, start, end, draw(seconds), free_tokens=free, round_trips=trips))
    start = draw(st.integers(0, blocks))
    local = range(start, draw(st.integers(start, blocks)))
    query = RouteQuery(max_length=draw(st.sampled_from([10, 100])), local=local)
    held = {block for record in peers for block in record.blocks} | set(query.local)
    for block in sorted(set(range(blocks)) - held):
        peers.append(peer(f"only{block}", block, block + 1))
    return peers, blocks, query, {record.peer_id: draw(seconds) for record in peers}


class TestLeastTime:
    @settings(max_examples=150, deadline=None)
    @given(small_swarms())
    def test_no_other_way_is_faster(self, swarm: tuple[list[PeerRecord], int, RouteQuery, dict[str, float]]) -> None:
        peers, blocks, query, round_trips = swarm
        found = route(peers, blocks, query, measurements(round_trips))
        costs = Costs(peers, query, round_trips)
        assert [block for span in found for block in span.blocks] == list(range(blocks))
        assert costs.of_route(found) == pytest.approx(costs.best_of_all(blocks), rel=1e-12)

    @pytest.mark.parametrize("seed", range(3))
    def test_as_fast_as_dijkstra_finds_in_large_swarms(self, seed: int) -> None:
        peers = random_swarm(300, 40, seed)
        round_trips = distances(peers, seed)
        query = RouteQuery(max_length=2048, local=range(4))
        found = route(peers, 40, query, measurements(round_trips))
        costs = Costs(peers, query, round_trips)
        assert costs.of_route(found) == pytest.approx(costs.dijkstra(40), rel=1e-12)

    def test_a_thousand_peers_in_any_order_give_one_route(self) -> None:
        peers = random_swarm(1000, 80, seed=5)
        measured = measurements(distances(peers, seed=5))
        found = route(peers, 80, ANY, measured)
        random.Random(5).shuffle(peers)
        assert route(peers, 80, ANY, measured) == found

    def test_of_equal_servers_the_first_by_name_is_used(self) -> None:
        peers = [peer(name, 0, 8) for name in ("c", "a", "b")]
        assert spans(route(peers, 8)) == [("a", 0, 8)]

    def test_a_part_of_a_server_may_be_used(self) -> None:
        peers = [peer("slow", 0, 8, 0.5), peer("fast", 2, 6)]
        assert spans(route(peers, 8)) == [("slow", 0, 2), ("fast", 2, 6), ("slow", 6, 8)]

    def test_the_asker_computes_its_own_blocks(self) -> None:
        query = replace(ANY, local=range(3), peer_id="self")
        peers = [peer("self", 0, 3, 0.009), peer("all", 0, 8, 0.01)]
        assert spans(route(peers, 8, query)) == [(LOCAL, 0, 3), ("all", 3, 8)]

    def test_the_asker_lets_others_compute_if_it_is_slow_by_its_own_record(self) -> None:
        query = replace(ANY, local=range(3), peer_id="self")
        peers = [peer("self", 0, 3, 0.2), peer("all", 0, 8)]
        assert spans(route(peers, 8, query)) == [("all", 0, 8)]

    def test_no_server_reaches_itself_over_the_network(self) -> None:
        with pytest.raises(NoRouteError):
            route([peer("self", 0, 8)], 8, replace(ANY, peer_id="self"))

    def test_round_trips_that_the_asker_announces_are_used(self) -> None:
        peers = [peer("self", 0, 1, round_trips={"b": 0.01}), peer("b", 0, 8)]
        peers.append(peer("a", 0, 8, round_trips={"self": 0.02}))
        assert spans(route(peers, 8, replace(ANY, peer_id="self"))) == [("b", 0, 8)]

    def test_a_peer_of_unknown_distance_is_as_far_as_the_median(self) -> None:
        peers = [peer(name, 0, 8) for name in ("far", "near", "unknown")]
        measured = measurements({"far": 0.3, "near": 0.1})
        assert spans(route(peers[::2], 8, ANY, measured)) == [("far", 0, 8)], "all that is known"
        assert spans(route([*peers[::2], replace(peers[1], start=1)], 8, ANY, measured)) == [("unknown", 0, 8)]

    def test_a_part_can_be_replaced_between_its_neighbours(self) -> None:
        """From home `a` is nearer, but `b` stands beside the neighbours."""
        neighbours = {"b": 0.001}
        peers = [peer("x", 0, 2, round_trips=neighbours), peer("y", 4, 6, round_trips=neighbours)]
        peers += [peer("a", 2, 4), peer("b", 2, 4)]
        measured = measurements({"a": 0.05, "b": 0.1, "x": 0.1, "y": 0.1})
        for query, expected in ((ANY, "a"), (replace(ANY, before="x", after="y"), "b")):
            found = find_route(peers, range(2, 4), query, measured, Bans(Clock()))
            assert found == (Span(expected, f"{expected}:8001", 2, 4),)

    def test_a_busy_server_is_slower(self) -> None:
        peers = [peer("a", 0, 8, 0.004, free_tokens=200), peer("b", 0, 8, 0.005)]
        assert spans(route(peers, 8)) == [("b", 0, 8)]

    def test_a_server_without_room_is_used_only_without_another(self) -> None:
        full, slow = peer("full", 0, 8, free_tokens=99), peer("slow", 0, 8, 0.5)
        assert spans(route([full, slow], 8)) == [("slow", 0, 8)]
        assert spans(route([full, replace(slow, start=4)], 8)) == [("full", 0, 8)]


class TestWhoMayBeUsed:
    @pytest.mark.parametrize(
        ("changes", "query", "reason"),
        [
            ({"state": PeerState.JOINING}, ANY, "1 announced as JOINING"),
            ({"state": PeerState.OFFLINE}, ANY, "1 announced as OFFLINE"),
            ({"adapters": ("other",)}, replace(ANY, adapter="mine"), "1 without the adapter 'mine'"),
            ({"total_tokens": 99}, ANY, "1 with a KV cache of less than 100 tokens"),
            ({}, replace(ANY, blocked=frozenset({"a"})), "1 not allowed by the request"),
            ({}, replace(ANY, allowed=frozenset({"b"})), "1 not allowed by the request"),
            ({"throughput": Throughput(0.0, 0.0, 0.0)}, ANY, "1 without a throughput"),
        ],
    )
    def test_who_may_not_says_the_error(self, changes: dict, query: RouteQuery, reason: str) -> None:
        peers = [replace(peer("a", 0, 4), **changes), peer("b", 0, 3, adapters=("mine",))]
        with pytest.raises(NoRouteError) as raised:
            route(peers, 4, query)
        assert raised.value.missing == [3]
        assert f"blocks 3:4 ({reason})" in str(raised.value)

    def test_missing_blocks_are_named_as_ranges(self) -> None:
        with pytest.raises(NoRouteError) as raised:
            route([peer("a", 2, 4), peer("b", 6, 7)], 8)
        assert raised.value.missing == [0, 1, 4, 5, 7]
        assert "blocks 0:2, 4:6, 7:8 (nobody announces them)" in str(raised.value)

    def test_a_server_without_a_throughput_disturbs_nobody(self) -> None:
        peers = [peer("a", 0, 4, throughput=Throughput(0.0, 0.0, 0.0), total_tokens=0), peer("b", 0, 4)]
        assert spans(route(peers, 4)) == [("b", 0, 4)]
        assert forward_routes(peers, range(4), ANY, Bans(Clock()), 1) == [route(peers, 4)]

    def test_an_adapter_is_found(self) -> None:
        peers = [peer("a", 0, 4), peer("b", 0, 4, 0.1, adapters=("mine",))]
        assert spans(route(peers, 4, replace(ANY, adapter="mine"))) == [("b", 0, 4)]


class TestParallelForward:
    """Bound: the blocks of any choice S take |S| times the rate from those who hold some of them."""

    @pytest.mark.parametrize("seed", range(6))
    def test_many_routes_together_come_near_the_highest_rate(self, seed: int) -> None:
        peers = [
            replace(record, throughput=Throughput(1.0, record.throughput.forward, 1e9))
            for record in random_swarm(10, 8, seed)
        ]
        speeds = {record.peer_id: record.throughput.forward for record in peers}
        subsets = [some for size in range(1, 9) for some in itertools.combinations(range(8), size)]
        bound = min(
            sum(speeds[record.peer_id] for record in peers if set(some) & set(record.blocks)) / len(some)
            for some in subsets
        )
        query = RouteQuery(max_length=1)
        routes = forward_routes(peers, range(8), query, Bans(Clock()), 64)
        work = dict.fromkeys(speeds, 0.0)
        for span in itertools.chain(*routes):
            work[span.peer_id] += len(span.blocks) / speeds[span.peer_id]
        assert all([block for span in found for block in span.blocks] == list(range(8)) for found in routes)
        assert 0.9 * bound < 64 / max(work.values()) <= 1.0000001 * bound
        assert forward_routes(peers[::-1], range(8), query, Bans(Clock()), 64) == routes

    def test_servers_with_a_slow_network_get_less(self) -> None:
        peers = [
            peer("a", 0, 4, throughput=Throughput(1.0, 4000.0, 300.0)),
            peer("b", 0, 4, throughput=Throughput(1.0, 4000.0, 900.0)),
        ]
        chosen = Counter(found[0].peer_id for found in forward_routes(peers, range(4), ANY, Bans(Clock()), 40))
        assert chosen["a"] == pytest.approx(10, abs=2), "of 40"

    def test_the_asker_shares_in_as_its_record_tells(self) -> None:
        peers = [peer(name, 0, 4, throughput=Throughput(1.0, 1000.0, 1e9)) for name in ("self", "b")]
        query = replace(ANY, local=range(4), peer_id="self")
        work = Counter[str]()
        for span in itertools.chain(*forward_routes(peers, range(4), query, Bans(Clock()), 40)):
            work[span.peer_id] += len(span.blocks)
        assert work[LOCAL] == pytest.approx(80, abs=8)


class TestBans:
    def test_bans_double_up_to_a_limit_and_success_forgets(self) -> None:
        clock = Clock()
        bans = Bans(clock)
        lengths = []
        for _ in range(8):
            bans.ban("a")
            end = bans.running()["a"]
            lengths.append(end - clock.now)
            clock.now = end
            assert not bans.banned("a")
        assert lengths == [min(FIRST_BAN_SECONDS * 2**i, LONGEST_BAN_SECONDS) for i in range(8)]
        bans.success("a")
        bans.ban("a")
        assert bans.running()["a"] - clock.now == FIRST_BAN_SECONDS

    def test_one_accident_seen_by_many_is_one(self) -> None:
        clock = Clock()
        bans = Bans(clock)
        for _ in range(8):
            clock.now += 0.1
            bans.ban("a")
        assert bans.running()["a"] - clock.now == FIRST_BAN_SECONDS

    def test_banned_peers_are_avoided_until_the_ban_ends(self) -> None:
        clock = Clock()
        bans = Bans(clock)
        peers = [peer("fast", 0, 8), peer("slow", 0, 8, 0.1)]
        bans.ban("fast")
        assert spans(route(peers, 8, bans=bans)) == [("slow", 0, 8)]
        clock.now += FIRST_BAN_SECONDS
        assert spans(route(peers, 8, bans=bans)) == [("fast", 0, 8)]

    def test_last_holders_take_turns_and_only_where_nobody_else_can(self) -> None:
        clock = Clock()
        bans = Bans(clock)
        peers = [peer("a", 0, 8), peer("b", 0, 8), peer("c", 0, 3, 0.1)]
        for banned, expected in (("b", "a"), ("a", "b"), ("b", "a")):
            bans.ban("a")
            clock.now += 1.0
            bans.ban(banned)
            clock.now += 1.0
            if expected == "b":
                bans.ban("a")
            assert spans(route(peers, 8, bans=bans)) == [("c", 0, 3), (expected, 3, 8)]


class TestMeasurements:
    def test_what_was_seen_counts_more_than_what_is_announced_and_fades(self) -> None:
        clock = Clock()
        measured = Measurements(clock)
        assert measured.block_seconds("a", announced=0.001) == 0.001
        measured.saw_step("a", blocks=4, seconds=0.4)
        assert measured.block_seconds("a", announced=0.001) == 0.1
        measured.saw_step("a", blocks=4, seconds=0.8)
        assert measured.block_seconds("a", announced=0.001) == pytest.approx(0.12)
        clock.now += HALF_LIFE_SECONDS
        assert measured.block_seconds("a", announced=0.0) == pytest.approx(0.06)

    def test_the_shortest_of_the_last_round_trips_counts(self) -> None:
        measured = Measurements(Clock())
        assert measured.round_trip("a") is None
        for seconds in (0.5, 0.02, 0.3):
            measured.saw_round_trip("a", seconds)
        assert measured.round_trip("a") == 0.02
        for _ in range(16):
            measured.saw_round_trip("a", 0.1)
        assert measured.round_trip("a") == 0.1

    def test_a_slow_server_is_left_and_tried_again_later(self) -> None:
        clock = Clock()
        measured = Measurements(clock)
        peers = [peer("a", 0, 8, 0.001), peer("b", 0, 8, 0.002)]
        measured.saw_step("a", 8, 0.8)
        assert spans(route(peers, 8, measured=measured)) == [("b", 0, 8)]
        clock.now += 8 * HALF_LIFE_SECONDS
        assert spans(route(peers, 8, measured=measured)) == [("a", 0, 8)]

    @pytest.mark.parametrize(("saved", "expected"), [(0.9, [("a", 0, 8)]), (1.1, [("a", 0, 4), ("b", 4, 8)])])
    def test_a_hop_to_a_faster_server_must_be_worth_it(self, saved: float, expected: list) -> None:
        seconds = saved * (UNKNOWN_ROUND_TRIP + HOP_SECONDS) / 4
        peers = [peer("a", 0, 8, 0.001 + seconds), peer("b", 4, 8, 0.001)]
        assert spans(route(peers, 8)) == expected
