"""A model on two servers: many sessions beside one, and what distance between the servers costs a token."""

import statistics
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from tqdm import tqdm
from transformers import AutoTokenizer

from corolla.bench.delay import delayed
from corolla.bench.prompts import make_prompts
from corolla.bench.serving import BenchServer, bench_server, local_folder
from corolla.bench.streams import run_streams
from corolla.bench.tables import markdown
from corolla.peers.record import PeerRecord, PeerState, Throughput
from corolla.peers.registry import PeerRegistry, open_registry
from corolla.repository.plan import RepositoryPlan, split_evenly

MODEL, REVISION = "bench", "bench"
PROMPT_TOKENS = 16
SERVERS = 2
METRICS_SECONDS = 2.5
"""After which the metrics tell of everything that was done."""
_SPEED = Throughput(inference=1000.0, forward=10000.0, network=10000.0)


@dataclass(frozen=True)
class SessionsResult:
    """Tokens per second of all sessions together, decoding alone; `ratio` to one session, each the median of rounds."""

    sessions: int
    decode: float
    ratio: float


@dataclass(frozen=True)
class DistanceResult:
    """One session, with servers `delay` seconds away from each other and from the asker, one way.

    `token` is the time of a token, `near` that without the delay, both in seconds; a token took so many `one_way_trips`
    after each other. `ratio` is the time of a token to that of `near` and the trips of the shortest way together.
    """

    delay: float
    token: float
    near: float
    one_way_trips: float

    @property
    def ratio(self) -> float:
        return self.token / (self.near + (SERVERS + 1) * self.delay)


@dataclass(frozen=True)
class SwarmReport:
    """Everything of one run."""

    sessions: list[SessionsResult]
    distance: DistanceResult


class BenchSwarm:
    """An entry without blocks, and servers with a part of them each, whose addresses can be changed."""

    def __init__(self, entry: BenchServer, parts: list[BenchServer], registry: PeerRegistry) -> None:
        self.entry = entry
        self.parts = parts
        self._registry = registry

    def announce(self, addresses: Sequence[str]) -> None:
        """Where the servers are reached from now on."""
        for index, (server, address) in enumerate(zip(self.parts, addresses, strict=True)):
            plan = server.plan
            record = PeerRecord(
                f"part-{index}", address, MODEL, REVISION, plan.hosted.start, plan.hosted.stop, PeerState.ONLINE,
                _SPEED, plan.dtype.name, plan.quant, False, plan.cache_tokens, plan.cache_tokens,
            )  # fmt: skip
            self._registry.put(record)

    def counts(self) -> dict[str, float]:
        """What the entry's generations did on other servers, by the names of TripCounters."""
        time.sleep(METRICS_SECONDS)
        with urllib.request.urlopen(f"http://{self.entry.metrics}/metrics") as answer:
            lines = [line for line in answer.read().decode().splitlines() if line.startswith("corolla_route_")]
        return {
            line.partition("{")[0].removeprefix("corolla_route_").removesuffix("_total"): float(line.split()[-1])
            for line in lines
        }


@contextmanager
def bench_swarm(plan: RepositoryPlan) -> Iterator[BenchSwarm]:
    """Serves the checkpoint of a plan on servers of one machine, while the context lasts."""
    count = plan.config.num_hidden_layers
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="corolla-bench-")))
        url = f"sqlite:///{folder / 'peers.db'}"
        named = replace(plan, model_id=MODEL, revision=REVISION)
        parts = [
            replace(named, ranges=[blocks], blocks=blocks, ends=False, span=True)
            for blocks in split_evenly(range(count), -(-count // SERVERS))
        ]
        entry = replace(named, ranges=[], blocks=range(0), ends=True, registry=url)
        servers = [stack.enter_context(bench_server(part)) for part in (*parts, entry)]
        registry = open_registry(url, ttl=3600.0)
        stack.callback(registry.close)
        swarm = BenchSwarm(servers[-1], servers[:-1], registry)
        swarm.announce([server.grpc for server in swarm.parts])
        yield swarm


def measure_swarm(
    swarm: BenchSwarm, sessions: Sequence[int], max_tokens: int, delay: float, rounds: int
) -> SwarmReport:
    """One session is always among those that are compared."""
    tokenizer = AutoTokenizer.from_pretrained(local_folder(swarm.entry.plan))
    counts = sorted({1, *sessions})
    prompts = make_prompts(tokenizer, counts[-1], PROMPT_TOKENS)

    def decode(count: int) -> float:
        return run_streams(swarm.entry.grpc, prompts[:count], max_tokens).decode

    decode(counts[-1])
    speeds = [{count: decode(count) for count in counts} for _ in tqdm(range(rounds), desc="sessions", unit="round")]
    results = [
        SessionsResult(
            count,
            statistics.median(speed[count] for speed in speeds),
            statistics.median(speed[count] / speed[1] for speed in speeds),
        )
        for count in counts
    ]
    near = 1 / results[0].decode
    with ExitStack() as stack:
        swarm.announce([stack.enter_context(delayed(server.grpc, delay)) for server in swarm.parts])
        time.sleep(1)  # until the entry has seen it
        decode(1)
        before = swarm.counts()
        far = statistics.median(1 / decode(1) for _ in tqdm(range(rounds), desc="distance", unit="round"))
        after = swarm.counts()
        swarm.announce([server.grpc for server in swarm.parts])
    steps, trips = (after[name] - before[name] for name in ("steps", "one_way_trips"))
    return SwarmReport(results, DistanceResult(delay, far, near, trips / steps))


def table(report: SwarmReport) -> str:
    """The report as Markdown."""
    distance = report.distance
    return "\n\n".join(
        [
            markdown(
                ["sessions", "tok/s", "ratio to one"],
                ([str(r.sessions), f"{r.decode:.1f}", f"{r.ratio:.2f}"] for r in report.sessions),
            ),
            markdown(
                ["one way, ms", "ms per token", "ms without distance", "one-way trips per token", "ratio"],
                [[
                    f"{distance.delay * 1e3:.0f}", f"{distance.token * 1e3:.1f}", f"{distance.near * 1e3:.1f}",
                    f"{distance.one_way_trips:.2f}", f"{distance.ratio:.2f}",
                ]],
            ),
        ]
    )  # fmt: skip
