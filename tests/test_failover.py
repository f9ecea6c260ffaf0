"""Generations over routes through other servers, all in this process, while those are killed, stopped and cut off."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from checkpoints import GROUPED, ids_of, random_prompt, text_of
from conftest import Served
from corolla.generate.engine import GenerateEngine
from corolla.generate.local_blocks import SharedBlocks
from corolla.generate.request import GenerationRequest
from corolla.remote.swarm import Swarm, SwarmSettings
from corolla.serving.blocks import BlocksService
from fake_peers import FakeNetwork, FakePeer
from local_server import CollectingOutput, LocalServer, make_plan
from waiting import wait_until

ALL = range(GROUPED.blocks)
FIRST, LAST = GROUPED.ranges
PROMPT = random_prompt(9, seed=9)
TOKENS = 40
STEP_TIMEOUT = 0.3
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

    def swarm(self, *, hosted: bool = False, **settings: float) -> Swarm:
        chosen = {"failover_timeout": 10.0, "step_timeout": STEP_TIMEOUT, "push_grace": 0.1} | settings
        blocks = FIRST if hosted else range(0)
        local = SharedBlocks(self.own_blocks, FIRST) if hosted else None
        return Swarm(self.network, self.network.connect, SwarmSettings(ALL, "float32", blocks, **chosen), local)

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
    return fakes.served.reference.generate(prompt_ids, max_new_tokens=tokens, eos_token_id=None, **options)


def used(peers: dict[str, FakePeer]) -> list[FakePeer]:
    """The servers that hold sessions now, in the order of their blocks."""
    return [peer for name, peer in sorted(peers.items()) if peer.open_sessions]


def running(output: CollectingOutput, pieces: int = 3) -> None:
    """Waits until some tokens have come."""
    wait_until(lambda: len(output.pieces) >= pieces or output.has_ended)
    assert not output.has_ended


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
