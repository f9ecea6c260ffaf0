"""Which blocks servers take: on simulated swarms that start anyhow, with servers that come, go and are killed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corolla.balance.choice import choose_again, choose_blocks
from corolla.balance.moves import BALANCE_THRESHOLD, balance, may_leave, moves_now, planned_moves
from corolla.balance.placement import Placement
from corolla.balance.policy import MovePolicy
from corolla.errors import InvalidValueError
from corolla.peers.record import PeerRecord, PeerState, Throughput
from registries import idle_server

SIZES = (2, 4, 8, 16)
TTL_SECONDS = 30


def server(name: str, start: int, end: int, rate: float = 100.0, **fields: object) -> PeerRecord:
    """A movable server that carries `rate` tokens per second through all its blocks."""
    throughput = Throughput(rate * (end - start), 1e4, 1e9)
    return idle_server(name, range(start, end), **{"throughput": throughput, "movable": True} | fields)


def chosen(peers: Sequence[PeerRecord], blocks: int, size: int) -> tuple[int, int]:
    found = choose_blocks(peers, blocks, size, Throughput(100.0 * size, 1e4, 1e9))
    return found.start, found.stop


def holders(peers: Sequence[PeerRecord], blocks: int) -> list[int]:
    """How many servers that are online hold each block."""
    online = [peer for peer in peers if peer.state is PeerState.ONLINE]
    return [sum(block in peer.blocks for peer in online) for block in range(blocks)]


def best_balance(peers: Sequence[PeerRecord], blocks: int) -> float:
    return balance(Placement.of(peers, blocks))


class TestChoice:
    def test_the_first_server_takes_the_first_blocks_and_the_next_ones_line_up(self) -> None:
        peers: list[PeerRecord] = []
        for expected in ((0, 3), (3, 6), (5, 8)):
            assert chosen(peers, 8, 3) == expected
            peers.append(server(f"p{len(peers)}", *expected))

    def test_a_gap_is_filled_first(self) -> None:
        peers = [server("a", 0, 4), server("b", 5, 8, 1.0), server("c", 5, 8, 1.0)]
        assert chosen(peers, 8, 1) == (4, 5)
        assert chosen(peers, 8, 3)[1] > 4

    def test_then_the_slowest_blocks(self) -> None:
        peers = [server("a", 0, 4, 300.0), server("b", 4, 8, 100.0), server("c", 0, 8, 50.0)]
        assert chosen(peers, 8, 4) == (4, 8)

    def test_servers_that_start_count_and_those_that_leave_do_not(self) -> None:
        peers = [server("a", 0, 4, state=PeerState.JOINING), server("b", 4, 8, state=PeerState.OFFLINE)]
        assert chosen(peers, 8, 4) == (4, 8)

    def test_servers_that_chose_at_the_same_moment_choose_again_one_after_the_other(self) -> None:
        peers = [server(f"p{i}", 0, 2, state=PeerState.JOINING) for i in range(4)]
        for _ in range(4):
            again = [choose_again(peers, 8, own) for own in peers]
            peers = [replace(own, start=found.start, end=found.stop) for own, found in zip(peers, again, strict=True)]
        assert [own.blocks for own in peers] == [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]

    def test_a_choice_beside_a_server_that_starts_again_is_kept(self) -> None:
        starting = server("a", 0, 4, 1.0, state=PeerState.JOINING)
        own = server("b", 0, 4, state=PeerState.JOINING)
        assert choose_again([starting, own, server("c", 4, 8)], 8, own) == range(0, 4)

    @pytest.mark.parametrize("size", [0, 9])
    def test_no_other_number_of_blocks(self, size: int) -> None:
        with pytest.raises(InvalidValueError, match=r"num_blocks: .* 1 to 8"):
            choose_blocks([], 8, size, Throughput(1.0, 1.0, 1.0))

    def test_servers_that_join_one_by_one_are_balanced(self) -> None:
        chance = random.Random(0)
        peers: list[PeerRecord] = []
        for i in range(100):
            size, rate = chance.choice([2, 4, 8, 16]), chance.uniform(10.0, 100.0)
            found = choose_blocks(peers, 32, size, Throughput(rate * size, 1e4, 1e9))
            peers.append(server(f"p{i:03}", found.start, found.stop, rate))
        assert best_balance(peers, 32) > BALANCE_THRESHOLD


class TestMoves:
    def test_nobody_moves_in_a_balanced_swarm(self) -> None:
        peers = [server("a", 0, 4), server("b", 4, 8), server("c", 0, 4, 30.0)]
        assert best_balance(peers, 8) > BALANCE_THRESHOLD
        assert moves_now(peers, 8) == {}

    def test_one_of_two_equal_servers_fills_the_gap(self) -> None:
        peers = [server("b", 0, 4), server("a", 0, 4)]
        assert best_balance(peers, 8) == 0.0
        assert moves_now(peers, 8) == {"a": range(4, 8)}

    def test_the_last_holder_of_a_block_stays_however_bad_the_balance_is(self) -> None:
        peers = [server("a", 0, 5, 1000.0), server("b", 4, 8, 1.0), server("c", 0, 4, 1000.0, movable=False)]
        assert moves_now(peers, 8) == {"a": range(3, 8)}
        peers[2] = replace(peers[2], end=3)
        assert best_balance(peers, 8) < 0.01
        assert moves_now(peers, 8) == {}

    def test_servers_with_blocks_of_their_own_choice_stay(self) -> None:
        peers = [server("a", 0, 4, movable=False), server("b", 0, 4, movable=False)]
        assert moves_now(peers, 8) == {}

    def test_while_others_are_in_motion_few_move(self) -> None:
        peers = [server(f"p{i:02}", 0, 4) for i in range(20)]
        assert len(moves_now(peers, 8)) == 2
        joining = [server("j1", 0, 4, state=PeerState.JOINING)]
        assert len(moves_now(peers + joining, 8)) == 1
        assert moves_now(peers + joining + [server("j2", 0, 4, state=PeerState.OFFLINE)], 8) == {}

    def test_a_server_may_leave_if_others_hold_its_blocks_or_the_model_is_not_whole_anyway(self) -> None:
        others = [server("b", 0, 4, state=PeerState.OFFLINE), server("c", 2, 8)]
        assert not may_leave(others, range(4), 8)
        assert may_leave([*others, server("d", 0, 2)], range(4), 8)
        assert may_leave(others[:1], range(4), 8)

    @settings(max_examples=60, deadline=None)
    @given(st.integers(2, 16), st.data())
    def test_moves_gain_and_never_disconnect(self, blocks: int, data: st.DataObject) -> None:
        """Whoever moves first: while all of them are away, and when they have arrived."""
        peers = []
        for i in range(data.draw(st.integers(1, 20))):
            start = data.draw(st.integers(0, blocks - 1))
            end = data.draw(st.integers(start + 1, blocks))
            state = data.draw(st.sampled_from([PeerState.ONLINE] * 3 + [PeerState.JOINING]))
            movable = data.draw(st.sampled_from([True, True, False]))
            peers.append(server(f"p{i:02}", start, end, data.draw(st.floats(1, 100)), state=state, movable=movable))
        at_once = data.draw(st.integers(1, 5))
        placement = Placement.of(peers, blocks)
        moves = planned_moves(placement, at_once)
        after = placement
        for move in moves:
            after = after.moved(move.server, move.start)
        assert not moves or (best_balance(peers, blocks) < BALANCE_THRESHOLD and after.weakest > placement.weakest)
        assert len({move.server for move in moves}) == len(moves)
        assert all(placement.movable[move.server] and placement.online[move.server] for move in moves)
        if all(holders(peers, blocks)):
            names = {placement.peer_ids[move.server] for move in moves[:at_once]}
            assert all(holders([peer for peer in peers if peer.peer_id not in names], blocks))
            assert all(after.held.any(axis=0))


@dataclass
class SimulatedServer:
    """In `wait` seconds it does what `phase` says. It sees others `lag` seconds late."""

    record: PeerRecord
    policy: MovePolicy
    lag: int
    phase: str
    wait: float
    target: range = range(0)


class SimulatedSwarm:
    """Servers, the registry through which they see each other, and time in steps of a second.

    Servers do what `corolla serve` does: choose, load, look, hesitate, give notice, ask again, drain and move. A block
    that has lost its last holder by anything but an accident is a failure.
    """

    def __init__(self, blocks: int, seed: int) -> None:
        self.blocks = blocks
        self.chance = random.Random(seed)
        self.servers: dict[str, SimulatedServer] = {}
        self.dead: list[tuple[int, PeerRecord]] = []
        self.views: list[list[PeerRecord]] = [[]] * 3
        self.plans: list[tuple[list[PeerRecord], dict[str, range]]] = []
        self.moves = 0
        self.names = 0
        self.now = 0

    def start(self, blocks: range) -> None:
        """A server that is already online somewhere."""
        joined = self._new(blocks, self.chance.uniform(10.0, 100.0), PeerState.ONLINE)
        self._then(joined, "look", joined.policy.pause())

    def join(self) -> None:
        """A server that chooses its blocks and loads them."""
        size, rate = self.chance.choice(SIZES), self.chance.uniform(10.0, 100.0)
        blocks = choose_blocks(self.views[-1], self.blocks, size, Throughput(rate * size, 1e4, 1e9))
        self._load(self._new(blocks, rate, PeerState.JOINING))

    def kill(self) -> None:
        """Some server, whose record stays for a while as it was."""
        name = self.chance.choice(list(self.servers))
        self.dead.append((self.now + TTL_SECONDS, self.servers.pop(name).record))

    def leave(self) -> None:
        """Some server, which says so."""
        name = self.chance.choice(list(self.servers))
        self.servers.pop(name)

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1
            self.dead = [(end, record) for end, record in self.dead if self.now < end]
            self.views = [*self.views[1:], self.views[-1] if self.records == self.views[-1] else self.records]
            whole = self.is_whole()
            for one in self.servers.values():
                one.wait -= 1
                if one.wait <= 0:
                    self._act(one)
            assert self.is_whole() or not whole, f"disconnected after {self.now} s"

    @property
    def records(self) -> list[PeerRecord]:
        """What the registry holds."""
        return [one.record for one in self.servers.values()] + [record for _, record in self.dead]

    @property
    def balance(self) -> float:
        return balance(Placement.of(self.records, self.blocks))

    def is_whole(self) -> bool:
        return all(holders(self.records, self.blocks))

    def _new(self, blocks: range, rate: float, state: PeerState) -> SimulatedServer:
        name = f"p{self.names:03}"
        self.names += 1
        record = server(name, blocks.start, blocks.stop, rate, state=state)
        policy = MovePolicy(name, random.Random(self.chance.random()))
        self.servers[name] = SimulatedServer(record, policy, self.chance.randint(0, 2), "", 0.0)
        return self.servers[name]

    def _act(self, one: SimulatedServer) -> None:
        view = self.views[-1 - one.lag]
        name = one.record.peer_id
        if one.phase == "load":
            one.record = replace(one.record, state=PeerState.ONLINE)
            self._then(one, "look", one.policy.pause())
        elif one.phase == "look":
            target = one.policy.look(self._plan(view))
            if target is None:
                self._then(one, "look", one.policy.pause())
            else:
                one.target = target
                one.record = replace(one.record, state=PeerState.OFFLINE)
                self._then(one, "notice", one.policy.notice)
        elif one.phase == "notice":
            seen = [peer for peer in view if peer.peer_id != name]
            if may_leave(seen, one.record.blocks, self.blocks):
                self._then(one, "drain", self.chance.uniform(0, 10))
            else:
                self._then(one, "load", 0)
        elif one.phase == "drain":
            self.moves += 1
            target = one.target
            one.record = replace(one.record, start=target.start, end=target.stop, state=PeerState.JOINING)
            self._load(one)

    def _load(self, one: SimulatedServer) -> None:
        self._then(one, "load", self.chance.uniform(20, 60))

    def _then(self, one: SimulatedServer, phase: str, wait: float) -> None:
        one.phase, one.wait = phase, wait

    def _plan(self, view: list[PeerRecord]) -> dict[str, range]:
        """What everybody who sees this would work out."""
        for seen, plan in self.plans:
            if seen is view:
                return plan
        self.plans = [*self.plans[-8:], (view, moves_now(view, self.blocks))]
        return self.plans[-1][1]


class TestSimulation:
    def settle(self, swarm: SimulatedSwarm, minutes: int, moves: int) -> None:
        """Balanced after so many minutes and at most so many moves, and quiet from then on."""
        before = swarm.moves
        swarm.run(60 * minutes)
        assert swarm.is_whole()
        assert swarm.balance >= BALANCE_THRESHOLD
        assert swarm.moves - before <= moves
        settled = swarm.moves
        swarm.run(60 * 10)
        assert swarm.moves == settled

    def test_from_random_starts(self) -> None:
        swarm = SimulatedSwarm(32, seed=0)
        for _ in range(100):
            size = swarm.chance.choice(SIZES)
            start = swarm.chance.randint(0, 32 - size)
            swarm.start(range(start, start + size))
        assert swarm.balance < 0.5
        self.settle(swarm, minutes=8, moves=50)

    def test_from_a_start_together_on_the_same_blocks(self) -> None:
        swarm = SimulatedSwarm(32, seed=7)
        for _ in range(100):
            swarm.join()
        assert swarm.balance == 0.0
        self.settle(swarm, minutes=15, moves=120)

    def test_while_servers_come_and_go(self) -> None:
        swarm = SimulatedSwarm(32, seed=8)
        for _ in range(25):
            for _ in range(4):
                swarm.join()
            swarm.run(3)
        self.settle(swarm, minutes=3, moves=5)
        before = swarm.moves
        for _ in range(15):
            for change in (swarm.kill, swarm.join, swarm.leave, swarm.join):
                change()
                swarm.run(15)
            assert swarm.is_whole()
            assert swarm.balance > 0.6
        assert swarm.moves - before <= 10
        self.settle(swarm, minutes=5, moves=10)
