"""Generations over routes through other servers, all in this process, while those are killed, stopped and cut off."""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from checkpoints import END_OF_TEXT_ID, GROUPED, ids_of, random_prompt, text_of
from conftest import Served
from corolla.errors import CorollaError, OverloadedError
from corolla.generate import engine as engine_module
from corolla.generate.engine import GenerateEngine
from corolla.generate.local_blocks import SharedBlocks
from corolla.generate.request import GenerationRequest
from corolla.kv.session import OpenRequest
from corolla.peers.record import PeerState
from corolla.remote.errors import PeerRefusalError
from corolla.remote.swarm import Need, Swarm, SwarmSettings
from corolla.routing.usable import NoRouteError
from corolla.serving.blocks import BlocksService
from corolla.wire.messages import SpanStep
from fake_peers import FakeNetwork, FakePeer
from local_server import CollectingOutput, LocalServer, make_plan, run
from waiting import wait_until

ALL = range(GROUPED.blocks)
FIRST, LAST = GROUPED.ranges
PROMPT = random_prompt(9, seed=9)
TOKENS = 40
IMPATIENT = {"step_timeout": 0.4}
"""Seconds after which a server that does not answer is given up: a step takes a few milliseconds."""


@dataclass(frozen=True)
class Only:
    """One block range as the blocks of a process."""

    current: BlocksService


@dataclass
class FakeSwarm:
    """A process with the ends of a model, and fake servers with its blocks: `a` and `b` twice each."""

    served: Served
    servers: list[LocalServer]
    network: FakeNetwork = field(default_factory=FakeNetwork)
    engines: list[GenerateEngine] = field(default_factory=list)

    def peer(self, name: str, blocks: range, server: LocalServer) -> FakePeer:
        """One more server."""
        service = server.ranges[GROUPED.ranges.index(blocks)]
        return self.network.add(FakePeer(self.network, name, blocks, service, server.table))

    def swarm(self, encoding: str = "float32", *, hosted: bool = False, **settings: float) -> Swarm:
        chosen = {"failover_timeout": 10.0, "step_timeout": 5.0, "push_grace": 0.1} | settings
        blocks = FIRST if hosted else range(0)
        local = SharedBlocks(self.own_blocks, FIRST, self._run_first, 16) if hosted else None
        return Swarm(self.network, self.network, SwarmSettings(ALL, encoding, blocks, **chosen), local)

    def _run_first(self, hidden_states: torch.Tensor, session_id: str, start: int) -> torch.Tensor:
        return run(self.own_blocks.current, hidden_states, [session_id], [start])

    @property
    def own_blocks(self) -> Only:
        return Only(self.served.server.ranges[0])

    def engine(self, swarm: Swarm, *, hosted: bool = False) -> GenerateEngine:
        engine = self.served.server.engine(swarm, self.own_blocks if hosted else None)
        self.engines.append(engine)
        return engine

    def assert_empty(self) -> None:
        """Nobody holds a session any more."""
        tables = [server.table for server in (self.served.server, *self.servers)]
        wait_until(lambda: all(table.status().open_sessions == 0 for table in tables))


@pytest.fixture(scope="module")
def servers(grouped: Served, tmp_path_factory: pytest.TempPathFactory, suite_cache: Path) -> list[LocalServer]:
    """Two more, each of which lends its ranges to fake servers."""
    plan = make_plan(grouped.checkpoint, GROUPED.ranges, attn_cache_tokens=2048, max_short_tokens=16)
    return [LocalServer(plan, tmp_path_factory.mktemp("other"), suite_cache) for _ in range(2)]


@pytest.fixture
def fakes(grouped: Served, servers: list[LocalServer]) -> Iterator[FakeSwarm]:
    """The test leaves no session behind, except on servers that are down."""
    fakes = FakeSwarm(grouped, servers)
    yield fakes
    for engine in fakes.engines:
        engine.stop()
    for peer in fakes.network.peers_by_name.values():
        peer.kill()
    fakes.assert_empty()


def replicas(fakes: FakeSwarm) -> dict[str, FakePeer]:
    """Servers a1 and a2 with the first half of the model, b1 and b2 with the second."""
    return {
        f"{letter}{index}": fakes.peer(f"{letter}{index}", blocks, server)
        for index, server in enumerate(fakes.servers, 1)
        for letter, blocks in (("a", FIRST), ("b", LAST))
    }


def start(engine: GenerateEngine, prompt_ids: list[int] = PROMPT, **options: object) -> CollectingOutput:
    """A greedy generation, unless `options` say otherwise."""
    settings = {"max_tokens": TOKENS, "temperature": 0.0, "echo": False, "ignore_eos": True} | options
    output = CollectingOutput()
    engine.start(GenerationRequest(text_of(prompt_ids), **settings), output)  # type: ignore[arg-type]
    return output


def expected(fakes: FakeSwarm, prompt_ids: list[int] = PROMPT, tokens: int = TOKENS, **options: object) -> list[int]:
    """Without end tokens, which are no text."""
    found = fakes.served.reference.generate(prompt_ids, max_new_tokens=tokens, eos_token_id=None, **options)
    return [token for token in found if token != END_OF_TEXT_ID]


def used(peers: dict[str, FakePeer]) -> list[FakePeer]:
    """The servers that hold sessions now, in the order of their blocks."""
    return [peer for name, peer in sorted(peers.items()) if peer.open_sessions]


def running(output: CollectingOutput, pieces: int = 3) -> None:
    """Waits until some tokens have come."""
    wait_until(lambda: len(output.pieces) >= pieces or output.has_ended)
    assert not output.has_ended


def left_alone(fakes: FakeSwarm, swarm: Swarm) -> CollectingOutput:
    """A generation whose only server with the last blocks, `b`, was killed; it is announced still."""
    fakes.peer("a", FIRST, fakes.servers[0])
    last = fakes.peer("b", LAST, fakes.servers[0])
    output = start(fakes.engine(swarm))
    running(output)
    last.kill()
    return output


def more(output: CollectingOutput) -> None:
    """Waits for two more tokens."""
    seen = len(output.pieces)
    wait_until(lambda: len(output.pieces) >= seen + 2 or output.has_ended)


def test_tokens_over_two_servers_are_those_of_transformers(fakes: FakeSwarm) -> None:
    peers, swarm = replicas(fakes), fakes.swarm()
    engine = fakes.engine(swarm)
    prompts = [random_prompt(length, seed=length) for length in (1, 7, 16, 17, 60)]
    outputs = [start(engine, prompt) for prompt in prompts]
    for prompt, output in zip(prompts, outputs, strict=True):
        assert ids_of(output.text()) == expected(fakes, prompt)
    fakes.assert_empty()
    counters = swarm.context.counters
    assert counters.fallbacks == 0
    assert counters.one_way_trips == counters.spans + counters.steps == 3 * counters.steps
    assert sum(peer.counts["received"] for peer in peers.values()) == counters.steps


@pytest.mark.parametrize("encoding", ["bfloat16", "int8"])
def test_fewer_bytes_on_the_wire(fakes: FakeSwarm, encoding: str) -> None:
    """The texts are not those of transformers any more, but the same each time."""
    replicas(fakes)
    engine = fakes.engine(fakes.swarm(encoding))
    first, second = (start(engine).text() for _ in range(2))
    assert first == second
    assert len(first.split()) >= TOKENS - 3


def test_a_route_may_begin_in_the_process_itself(fakes: FakeSwarm) -> None:
    peers, swarm = replicas(fakes), fakes.swarm(hosted=True)
    engine = fakes.engine(swarm, hosted=True)
    prompts = [random_prompt(length, seed=length) for length in (5, 30)]
    outputs = [start(engine, prompt) for prompt in prompts]
    for prompt, output in zip(prompts, outputs, strict=True):
        assert ids_of(output.text()) == expected(fakes, prompt)
    assert not peers["a1"].counts
    assert not peers["a2"].counts


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "random_seed": 3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("accident", ["kill", "hang", "slow down", "refuse"])
@pytest.mark.parametrize("which", [0, 1], ids=["first", "last"])
def test_a_failing_server_changes_no_token(fakes: FakeSwarm, which: int, accident: str, sampling: dict) -> None:
    quiet = accident in ("hang", "slow down")
    peers, swarm = replicas(fakes), fakes.swarm(**(IMPATIENT if quiet else {}))
    engine = fakes.engine(swarm)
    prompts = [random_prompt(length, seed=length) for length in (9, 9, 25)]
    outputs = [start(engine, prompt, **sampling) for prompt in prompts]
    for output in outputs:
        running(output)
    failing = used(peers)[which]
    others = [peer for peer in used(peers) if peer is not failing]
    {
        "kill": failing.kill,
        "hang": failing.hang,
        "slow down": lambda: setattr(failing, "before_step", lambda _: time.sleep(1.2)),
        "refuse": lambda: setattr(failing, "before_step", refuse),
    }[accident]()
    options = {"seed": 3, "temperature": 0.8} if sampling else {}
    for prompt, output in zip(prompts, outputs, strict=True):
        assert ids_of(output.text()) == expected(fakes, prompt, **options)
    assert swarm.bans.banned(failing.name)
    assert quiet or not any(swarm.bans.banned(peer.name) for peer in others)
    failing.wake()


def refuse(_: SpanStep) -> None:
    raise PeerRefusalError("it", "INTERNAL: out of order")


def test_generations_of_a_failed_server_step_together_again(fakes: FakeSwarm) -> None:
    peers, swarm = replicas(fakes), fakes.swarm()
    engine = fakes.engine(swarm)
    outputs = [start(engine, random_prompt(9, seed=seed), max_tokens=80) for seed in range(4)]
    for output in outputs:
        running(output)
    used(peers)[0].kill()
    wait_until(lambda: used(peers) != [] and all(peer.open_sessions == 4 for peer in used(peers)))
    rows: list[int] = []
    used(peers)[0].before_step = lambda step: rows.append(len(step.session_ids))
    for seed, output in enumerate(outputs):
        assert ids_of(output.text()) == expected(fakes, random_prompt(9, seed=seed), 80)
    assert max(rows) == 4


def test_a_server_killed_while_it_pushes(fakes: FakeSwarm) -> None:
    """Its push arrives, its answer does not: what it was sent is known, what it sent on is not."""
    peers, swarm = replicas(fakes), fakes.swarm()
    output = start(fakes.engine(swarm))
    running(output)
    first = used(peers)[0]
    first.after_push = first.kill
    assert ids_of(output.text()) == expected(fakes)


def test_servers_that_do_not_reach_each_other_are_served_through_the_asker(fakes: FakeSwarm) -> None:
    peers, swarm = replicas(fakes), fakes.swarm()
    for name in ("b1", "b2"):
        peers[name].cut_off_from = {"a1", "a2"}
    assert ids_of(start(fakes.engine(swarm)).text()) == expected(fakes)
    counters = swarm.context.counters
    assert counters.fallbacks == counters.steps == TOKENS
    assert not any(map(swarm.bans.banned, peers))


def test_lost_pushes_are_made_up_for_and_not_waited_for_again(fakes: FakeSwarm) -> None:
    peers, swarm = replicas(fakes), fakes.swarm()
    for name in ("b1", "b2"):
        peers[name].loses_pushes = True
    begun = time.monotonic()
    assert ids_of(start(fakes.engine(swarm)).text()) == expected(fakes)
    assert swarm.context.counters.fallbacks == TOKENS
    assert sum(peer.counts["pushed"] for peer in peers.values()) == 1, "the way between them is left alone"
    assert time.monotonic() - begun < TOKENS * 0.1, "only the first step waits for the push"


def test_a_late_push_is_computed_once(fakes: FakeSwarm) -> None:
    """The asker loses patience and sends the step as well; the way between the servers is still used."""
    peers, swarm = replicas(fakes), fakes.swarm(step_timeout=5.0, push_grace=0.01)
    output = start(fakes.engine(swarm), max_tokens=12)
    for name in ("b1", "b2"):
        peers[name].before_step = lambda _: time.sleep(0.03)
    assert ids_of(output.text()) == expected(fakes, tokens=12)
    last = [peer for peer in peers.values() if peer.counts["awaits"]]
    assert sum(peer.counts["steps"] for peer in last) == 12
    assert sum(peer.counts["duplicates"] for peer in last) >= 5
    assert sum(peer.counts["received"] for peer in last) == 12


def test_long_prompt_goes_on_elsewhere_in_the_middle(fakes: FakeSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "PREFILL_CHUNK", 24)
    peers, swarm = replicas(fakes), fakes.swarm()
    prompt = random_prompt(100, seed=100)

    def kill_late(step: SpanStep) -> None:
        if step.starts[0] >= 48:
            peers["b1"].kill()

    peers["b1"].before_step = kill_late
    peers["b2"].before_step = lambda _: None
    swarm.bans.ban("b2")  # so that the first one is taken
    assert ids_of(start(fakes.engine(swarm), prompt).text()) == expected(fakes, prompt)
    assert swarm.bans.banned("b1")


def test_a_server_that_lost_its_sessions_gets_new_ones(fakes: FakeSwarm) -> None:
    """It was started again under the same address, and is as good as any."""
    swarm = fakes.swarm()
    only = [fakes.peer(name, blocks, fakes.servers[0]) for name, blocks in (("a", FIRST), ("b", LAST))]
    output = start(fakes.engine(swarm))
    running(output)
    only[1].kill()
    only[1].restart()
    assert ids_of(output.text()) == expected(fakes)
    wait_until(lambda: [peer.open_sessions for peer in only] == [0, 0])


def test_a_session_closed_by_somebody_else_is_opened_again_alone(fakes: FakeSwarm) -> None:
    peers, swarm = replicas(fakes), fakes.swarm()
    engine = fakes.engine(swarm)
    outputs = [start(engine, random_prompt(9, seed=seed)) for seed in (1, 2)]
    for output in outputs:
        running(output)
    used(peers)[0].lose_a_session()
    for seed, output in zip((1, 2), outputs, strict=True):
        assert ids_of(output.text()) == expected(fakes, random_prompt(9, seed=seed))
    assert not any(map(swarm.bans.banned, peers))


def test_nobody_holds_a_block_the_error_says_which(fakes: FakeSwarm) -> None:
    swarm = fakes.swarm(failover_timeout=0.3)
    fakes.peer("a", FIRST, fakes.servers[0])
    last = fakes.peer("b", LAST, fakes.servers[0])
    engine = fakes.engine(swarm)
    output = start(engine)
    running(output)
    last.kill()
    fakes.network.vanish("b")
    with pytest.raises(NoRouteError, match=r"blocks 2:4 .*start a server for them"):
        output.text()
    with pytest.raises(NoRouteError, match=r"blocks 2:4 .*start a server for them"):
        start(engine, timeout=0.1).text()


def test_a_dead_server_that_is_still_announced_is_named(fakes: FakeSwarm) -> None:
    swarm = fakes.swarm(failover_timeout=0.3)
    output = left_alone(fakes, swarm)
    with pytest.raises(OverloadedError, match=r"blocks 2:4 \(b: b: connection refused\)"):
        output.text()


def test_generation_goes_on_when_a_holder_appears(fakes: FakeSwarm) -> None:
    swarm = fakes.swarm()
    output = left_alone(fakes, swarm)
    fakes.network.vanish("b")
    wait_until(lambda: fakes.served.server.table.status().open_sessions == 1)
    fakes.peer("c", LAST, fakes.servers[1])
    assert ids_of(output.text()) == expected(fakes)


def test_cancelled_while_it_looks_for_a_server_frees_everything(fakes: FakeSwarm) -> None:
    swarm = fakes.swarm(failover_timeout=60.0)
    output = left_alone(fakes, swarm)
    fakes.network.vanish("b")
    output.cancelled = True
    fakes.assert_empty()


def test_cancelled_while_a_server_hangs_frees_everything_else_at_once(fakes: FakeSwarm) -> None:
    peers, swarm = replicas(fakes), fakes.swarm(step_timeout=60.0)
    output = start(fakes.engine(swarm))
    running(output)
    hanging = used(peers)[1]
    hanging.hang()
    output.cancelled = True
    fakes.assert_empty()
    hanging.wake()


def test_announced_end_moves_sessions_at_once(fakes: FakeSwarm) -> None:
    peers, swarm = replicas(fakes), fakes.swarm()
    output = start(fakes.engine(swarm), max_tokens=80)
    running(output)
    leaving = used(peers)[0]
    fakes.network.announce(leaving.record(state=PeerState.OFFLINE))
    wait_until(lambda: leaving.open_sessions == 0)
    assert not output.has_ended
    wait_until(lambda: fakes.network.kept == peers.keys() - {leaving.name})
    assert ids_of(output.text()) == expected(fakes, tokens=80)
    assert not any(map(swarm.bans.banned, peers))


def test_the_last_holder_is_stayed_with_to_its_end(fakes: FakeSwarm) -> None:
    swarm = fakes.swarm()
    only = [fakes.peer(name, blocks, fakes.servers[0]) for name, blocks in (("a", FIRST), ("b", LAST))]
    output = start(fakes.engine(swarm), max_tokens=80)
    running(output)
    fakes.network.announce(only[1].record(state=PeerState.OFFLINE))
    assert ids_of(output.text()) == expected(fakes, tokens=80)


def test_full_servers_are_passed_over_and_then_waited_for(fakes: FakeSwarm) -> None:
    peers, swarm = replicas(fakes), fakes.swarm()
    engine = fakes.engine(swarm)
    full, other = fakes.servers
    held = full.open(GROUPED.model_config().max_position_embeddings), other.open(16)
    taken = [full.open(512) for _ in range(3)]
    assert ids_of(start(engine).text()) == expected(fakes)
    assert not peers["a1"].counts
    wait_until(lambda: used(peers) == [])
    more = [other.open(400) for _ in range(5)]
    output = start(engine)
    with pytest.raises(AssertionError):
        output.text(timeout=0.5)
    full.table.close(taken[0])
    assert ids_of(output.text()) == expected(fakes)
    for server, sessions in ((full, [held[0], *taken[1:]]), (other, [held[1], *more])):
        for session in sessions:
            server.table.close(session)


def test_two_routes_at_once(fakes: FakeSwarm) -> None:
    """Servers that are not announced any more are still used by those who have sessions on them."""
    peers, swarm = replicas(fakes), fakes.swarm()
    engine = fakes.engine(swarm)
    first = start(engine, max_tokens=100)
    running(first)
    for peer in used(peers):
        fakes.network.vanish(peer.name)
    second = start(engine, random_prompt(5, seed=5), max_tokens=100)
    running(second)
    assert len(used(peers)) == 4
    assert ids_of(first.text()) == expected(fakes, tokens=100)
    assert ids_of(second.text()) == expected(fakes, random_prompt(5, seed=5), 100)


def test_sessions_are_opened_as_long_as_needed_and_with_the_adapter(fakes: FakeSwarm) -> None:
    peers, swarm = replicas(fakes), fakes.swarm()
    for name in ("a2", "b2"):
        peers[name].adapters = {"poet"}
        fakes.network.announce(peers[name].record())
    sessions = swarm.attach(Need(77, "poet", "own"), timeout=1.0)
    assert [peer.opened for peer in peers.values()] == [[], [], [(77, "poet")], [(77, "poet")]]
    swarm.release(sessions.spans)
    with pytest.raises(NoRouteError, match="without the adapter 'singer'"):
        swarm.attach(Need(77, "singer", "own"), timeout=0.1)


def test_a_server_that_always_refuses_ends_the_generation(fakes: FakeSwarm) -> None:
    swarm = fakes.swarm()
    fakes.peer("a", FIRST, fakes.servers[0])
    last = fakes.peer("b", LAST, fakes.servers[0])

    def refuse_as_wrong(_: SpanStep) -> None:
        raise PeerRefusalError("b", "INVALID_ARGUMENT: I do not like it")

    last.before_step = refuse_as_wrong
    with pytest.raises(PeerRefusalError, match="I do not like it"):
        start(fakes.engine(swarm)).text()


@pytest.mark.parametrize("lost", [False, True], ids=["running", "without a server"])
def test_stopping_ends_generations_with_an_error(fakes: FakeSwarm, lost: bool) -> None:
    swarm = fakes.swarm(failover_timeout=60.0)
    fakes.peer("a", FIRST, fakes.servers[0])
    last = fakes.peer("b", LAST, fakes.servers[0])
    engine = fakes.engine(swarm)
    outputs = [start(engine, random_prompt(9, seed=seed), max_tokens=200) for seed in range(3)]
    for output in outputs:
        running(output)
    if lost:
        last.kill()
        fakes.network.vanish("b")
    engine.stop()
    for output in outputs:
        with pytest.raises((RuntimeError, CorollaError)):
            output.text(timeout=10)


@pytest.mark.parametrize("heard", [0, 5])
def test_broken_off_generation_is_resumed_over_other_servers(fakes: FakeSwarm, heard: int) -> None:
    peers, swarm = replicas(fakes), fakes.swarm()
    table, log = fakes.served.server.table, fakes.served.server._token_log
    tokens = expected(fakes)
    session = table.open(OpenRequest(len(PROMPT) + TOKENS, idle_timeout=60.0))
    log.begin(session, PROMPT)
    for position, token in enumerate(tokens[:5], len(PROMPT)):
        log.append(session, position, token)
    output = CollectingOutput()
    text = " ".join([text_of(PROMPT), *([text_of(tokens[:heard])] if heard else [])])
    request = GenerationRequest(
        text, max_tokens=TOKENS, temperature=0.0, echo=False, ignore_eos=True, session_id=session.id
    )
    fakes.engine(swarm).start(request, output)
    assert ids_of(output.text()) == tokens[heard:]
    wait_until(lambda: used(peers) == [])


def test_storm_of_accidents_changes_no_token(fakes: FakeSwarm) -> None:
    """Eight generations while one server after the other is killed or stopped, and later comes back."""
    peers, swarm = replicas(fakes), fakes.swarm(**IMPATIENT)
    engine = fakes.engine(swarm)
    chosen = random.Random(5)
    prompts = [random_prompt(length, seed=length) for length in (3, 5, 9, 14, 21, 33, 48, 60)]
    outputs = [start(engine, prompt, max_tokens=200) for prompt in prompts]
    accidents = 0
    while not all(output.has_ended for output in outputs):
        for output in outputs:
            more(output)
        name = chosen.choice(sorted(peers))
        if chosen.random() < 0.8:
            peers[name].kill()
        else:
            peers[name].hang()
        accidents += 1
        for output in outputs:
            more(output)
        peers[name].wake()
        peers[name].restart()
    for prompt, output in zip(prompts, outputs, strict=True):
        assert ids_of(output.text()) == expected(fakes, prompt, 200)
    assert accidents > 5
