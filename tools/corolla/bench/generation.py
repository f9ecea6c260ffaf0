"""Generation through a server beside transformers: decoding, prompts, first token, memory."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from corolla.bench.memory import read_speed, step_weights
from corolla.bench.prompts import make_prompts
from corolla.bench.reference import TransformersPeer
from corolla.bench.serving import BenchServer
from corolla.bench.streams import run_streams
from corolla.bench.timing import RunResult, median_result
from corolla.model.shape import ModelShape

PROMPT_TOKENS = 16
LONG_PROMPT_TOKENS = 512


@dataclass(frozen=True)
class Comparison:
    """Both sides with `sessions` generations at once; `ratio` is the median of the rounds' ratios of decoding."""

    sessions: int
    ours: RunResult
    theirs: RunResult
    ratio: float


@dataclass(frozen=True)
class Prefill:
    """Tokens per second of one long prompt: ours through the server up to the first token."""

    tokens: int
    ours: float
    theirs: float


@dataclass(frozen=True)
class GenerationReport:
    """Everything of one run; memory in bytes: ours of all processes of the server, theirs of this one.

    `read_speed` is how fast the machine reads memory, in bytes per second; every step reads `step_weights` bytes.
    """

    comparisons: list[Comparison]
    prefill: Prefill
    our_memory: int
    their_memory: int
    read_speed: float
    step_weights: int

    def memory_share(self, comparison: Comparison) -> float:
        """How much of the time of our decode steps the machine needs to read the weights."""
        return self.step_weights / self.read_speed * comparison.ours.decode / comparison.sessions

    def to_json(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)


def compare_generation(
    server: BenchServer, checkpoint: Path, sessions: Sequence[int], max_tokens: int, rounds: int, threads: int
) -> GenerationReport:
    """Runs both sides in turn, `rounds` times after one to warm up, and takes medians."""
    peer = TransformersPeer(checkpoint, server.plan.dtype.torch, threads)
    prompts = make_prompts(peer.tokenizer, max(sessions), PROMPT_TOKENS)
    long_tokens = min(LONG_PROMPT_TOKENS, ModelShape.of(server.plan.config).context_length // 2)
    long_prompts = make_prompts(peer.tokenizer, rounds + 1, long_tokens, seed=1)
    results: dict[int, list[tuple[RunResult, RunResult]]] = {count: [] for count in sessions}
    prefills = []
    for turn in tqdm(range(rounds + 1), desc="rounds", unit="round"):
        for count in sessions:
            ours = run_streams(server.grpc, prompts[:count], max_tokens)
            theirs = peer.run(prompts[:count], max_tokens)
            if turn:
                results[count].append((ours, theirs))
        first = run_streams(server.grpc, long_prompts[turn : turn + 1], 1).first_token
        prefills.append((long_tokens / first, peer.prefill(long_prompts[turn])))
    return GenerationReport(
        comparisons=[_compared(count, pairs) for count, pairs in results.items()],
        prefill=Prefill(
            long_tokens, statistics.median(o for o, _ in prefills[1:]), statistics.median(t for _, t in prefills[1:])
        ),
        our_memory=server.memory(),
        their_memory=peer.memory(),
        read_speed=read_speed(),
        step_weights=step_weights(server.plan),
    )


def _compared(sessions: int, pairs: Sequence[tuple[RunResult, RunResult]]) -> Comparison:
    return Comparison(
        sessions,
        median_result([ours for ours, _ in pairs]),
        median_result([theirs for _, theirs in pairs]),
        statistics.median(ours.decode / theirs.decode for ours, theirs in pairs),
    )


def table(report: GenerationReport) -> str:
    """The report as Markdown."""
    lines = [
        "| sessions | Corolla tok/s | transformers tok/s | ratio | with prompts, tok/s | first token, ms "
        "| of the memory's speed |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for c in report.comparisons:
        lines.append(
            f"| {c.sessions} | {c.ours.decode:.1f} | {c.theirs.decode:.1f} | {c.ratio:.2f} | "
            f"{c.ours.whole:.1f} / {c.theirs.whole:.1f} | "
            f"{c.ours.first_token * 1e3:.0f} / {c.theirs.first_token * 1e3:.0f} | "
            f"{100 * report.memory_share(c):.0f} % |"
        )
    prefill = report.prefill
    lines += [
        "",
        f"One prompt of {prefill.tokens} tokens: {prefill.ours:.0f} tok/s, transformers {prefill.theirs:.0f}. "
        f"Memory: {report.our_memory / 2**20:.0f} MiB (all processes of the server), "
        f"transformers {report.their_memory / 2**20:.0f} MiB.",
        f"This machine reads memory at {report.read_speed / 1e9:.1f} GB/s (torch.sum over 1 GiB, best of 5); a step "
        f"reads {report.step_weights / 2**20:.0f} MiB of weights.",
    ]
    return "\n".join(lines)
