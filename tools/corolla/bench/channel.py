"""The batch channel's capacity, under a burst of generations of which some are cancelled.

Measured in this process, with the engine of the `generate` model: only there can be seen what was computed for whom.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import torch
from tqdm import tqdm
from transformers import AutoTokenizer

from corolla.bench.bursts import (
    BurstClient,
    Watch,
    WatchedChain,
    WatchedTable,
    leave_after,
    wait_until_freed,
)
from corolla.bench.local_models import LocalModels, local_models
from corolla.bench.prompts import make_prompts
from corolla.bench.serving import local_folder
from corolla.bench.tables import markdown
from corolla.generate.engine import EngineLimits, GenerateEngine
from corolla.generate.request import GenerationRequest
from corolla.repository.plan import RepositoryPlan


@dataclass(frozen=True)
class Burst:
    """`generations` at once, of prompts and new tokens of these lengths.

    Every `cancel_every`-th client leaves `cancel_after` seconds after it sent its request.
    """

    generations: int
    prompt_tokens: int
    max_tokens: int
    cancel_every: int
    cancel_after: float

    @property
    def positions(self) -> int:
        """Positions that all sessions reserve at most, with pages of up to 32."""
        return self.generations * (self.prompt_tokens + self.max_tokens + 32)


@dataclass(frozen=True)
class BurstResult:
    """One burst.

    `throughput` is new tokens per second of the clients that stayed; `freed` milliseconds from each cancellation to
    its free pages; `wasted_prompts` prompt positions and `wasted_tokens` rows of one token that were computed for
    clients that had left.
    """

    throughput: float
    freed: list[float]
    wasted_prompts: int
    wasted_tokens: int


@dataclass(frozen=True)
class ChannelResult:
    """The bursts of one capacity: medians, and means of what was wasted. `memory` of this process in bytes (PSS)."""

    capacity: int
    throughput: float
    cancelled: int
    freed: float | None
    wasted_prompts: float
    wasted_tokens: float
    memory: int


@dataclass(frozen=True)
class ChannelReport:
    """One burst, several capacities."""

    burst: Burst
    results: list[ChannelResult]

    def to_json(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)


@dataclass(frozen=True)
class _OneChain:
    """See corolla.generate.engine.Blocks."""

    current: WatchedChain


def measure_channel(plan: RepositoryPlan, capacities: Sequence[int], burst: Burst, rounds: int) -> ChannelReport:
    """The capacities take turns, `rounds` times after one burst each to warm up."""
    prompts = make_prompts(AutoTokenizer.from_pretrained(local_folder(plan)), burst.generations, burst.prompt_tokens)
    requests = [
        GenerationRequest(prompt, max_tokens=burst.max_tokens, temperature=0.0, ignore_eos=True, stream=True)
        for prompt in prompts
    ]
    results: dict[int, list[BurstResult]] = {capacity: [] for capacity in capacities}
    memory: dict[int, int] = {}
    with local_models(plan, WatchedTable) as models:
        for turn in tqdm(range(rounds + 1), desc="rounds", unit="round"):
            for capacity in capacities:
                result = _run(models, EngineLimits(plan.short_tokens, capacity), requests, burst)
                memory[capacity] = psutil.Process().memory_full_info().pss
                if turn:
                    results[capacity].append(result)
    return ChannelReport(burst, [_summary(capacity, runs, memory[capacity]) for capacity, runs in results.items()])


def _run(models: LocalModels, limits: EngineLimits, requests: Sequence[GenerationRequest], burst: Burst) -> BurstResult:
    assert isinstance(models.table, WatchedTable)
    watch = models.table.watch
    chain = models.chain
    watched = WatchedChain(
        chain.blocks, chain.arena, chain.steps, chain.reorderer, chain.adapters, chain.decoders, watch=watch
    )
    engine = GenerateEngine(
        checkpoint=models.checkpoint,
        embedding=models.embedding,
        head=models.head,
        blocks=_OneChain(watched),
        table=models.table,
        log=models.log,
        run_ranges=_no_ranges,
        limits=limits,
    )
    try:
        return _burst(engine, watch, requests, burst)
    finally:
        engine.stop()


def _burst(engine: GenerateEngine, watch: Watch, requests: Sequence[GenerationRequest], burst: Burst) -> BurstResult:
    clients = [BurstClient() for _ in requests]
    watch.begin(clients)
    timers = []
    start = time.perf_counter()
    for number, (request, client) in enumerate(zip(requests, clients, strict=True), 1):
        engine.start(request, client)
        if number % burst.cancel_every == 0:
            timers.append(leave_after(client, burst.cancel_after))
    for timer in timers:
        timer.join()
    wait_until_freed(clients)
    stayed = [client for client in clients if not client.has_left]
    return BurstResult(
        throughput=sum(client.tokens for client in stayed) / (max(client.ended for client in stayed) - start),
        freed=[(client.freed - client.left) * 1e3 for client in clients if client.has_left],
        wasted_prompts=watch.wasted_prompts,
        wasted_tokens=watch.wasted_tokens,
    )


def _summary(capacity: int, runs: Sequence[BurstResult], memory: int) -> ChannelResult:
    freed = [milliseconds for run in runs for milliseconds in run.freed]
    return ChannelResult(
        capacity=capacity,
        throughput=statistics.median(run.throughput for run in runs),
        cancelled=len(freed),
        freed=statistics.median(freed) if freed else None,
        wasted_prompts=statistics.mean(run.wasted_prompts for run in runs),
        wasted_tokens=statistics.mean(run.wasted_tokens for run in runs),
        memory=memory,
    )


def _no_ranges(hidden_states: torch.Tensor, session_id: str, start: int) -> torch.Tensor:
    raise AssertionError("prompts of a burst are short")


def table(report: ChannelReport) -> str:
    """The report as Markdown."""
    burst = report.burst
    figures = markdown(
        ["capacity", "others, tok/s", "cancelled", "pages free after, ms", "wasted: prompts", "tokens", "MiB"],
        (
            [
                str(r.capacity), f"{r.throughput:.1f}", str(r.cancelled), "-" if r.freed is None else f"{r.freed:.1f}",
                f"{r.wasted_prompts:.1f}", f"{r.wasted_tokens:.1f}", f"{r.memory / 2**20:.0f}",
            ]
            for r in report.results
        ),
    )  # fmt: skip
    return (
        f"{figures}\n\nBursts of {burst.generations} generations, {burst.prompt_tokens} prompt tokens and "
        f"{burst.max_tokens} new ones; every client whose number divides by {burst.cancel_every} leaves after "
        f"{burst.cancel_after * 1e3:.0f} ms. In one process with the engine of `generate`, without Triton: a client's "
        "leaving is noticed when its next text is sent. Wasted: positions per burst, computed for clients that had "
        "left. Memory of that process."
    )
