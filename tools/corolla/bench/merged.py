"""Merged against unmerged: steps of all lengths, streams of single tokens, and what Triton itself costs."""

from dataclasses import asdict, dataclass
from typing import Any

from tqdm import tqdm
from transformers import AutoTokenizer

from corolla.bench.lengths import Effort, StepTimes, crossing, measure_lengths
from corolla.bench.local_models import local_models
from corolla.bench.overhead import Overhead, bare_step, bare_token, median_overhead
from corolla.bench.prompts import make_prompts
from corolla.bench.serving import BenchServer, local_folder
from corolla.bench.streaming import (
    PETALS_MERGED,
    PETALS_UNMERGED,
    PROMPT_POSITIONS,
    StreamedSteps,
    run_steps,
    streamed_steps,
)
from corolla.bench.streams import run_streams
from corolla.bench.tables import markdown

CLOSE = 0.05
"""Unmerged steps that take this part longer are nearly as fast."""


@dataclass(frozen=True)
class MergedReport:
    """`ranges` is how many processes an unmerged step goes through."""

    ranges: int
    lengths: list[StepTimes]
    streamed: StreamedSteps
    overhead: Overhead

    def to_json(self) -> dict[str, Any]:
        """For --json."""
        costs = {"step_cost_percent": self.overhead.step_cost, "token_cost_percent": self.overhead.token_cost}
        report = asdict(self)
        report["overhead"] |= costs
        return report | {
            "crossing": crossing(self.lengths),
            "nearly_crossing": crossing(self.lengths, CLOSE),
            "petals": {"merged": PETALS_MERGED, "unmerged": PETALS_UNMERGED},
        }


def measure_merged(server: BenchServer, most: int, effort: Effort, steps: int, rounds: int) -> MergedReport:
    """All three parts; the rounds of the last two follow one to warm up."""
    lengths = measure_lengths(server, most, effort)
    tokenizer = AutoTokenizer.from_pretrained(local_folder(server.plan))
    prompts = make_prompts(tokenizer, 1, PROMPT_POSITIONS)
    prompt_ids = tokenizer(prompts[0]).input_ids
    speeds, overheads = [], []
    with local_models(server.plan) as models:
        for turn in tqdm(range(rounds + 1), desc="rounds", unit="round"):
            merged, unmerged = run_steps(server.grpc, server.plan, steps)
            stream = run_streams(server.grpc, prompts, steps + 1)
            overhead = Overhead(
                bare_step=bare_step(models, steps),
                raw_step=1e3 / merged,
                bare_token=bare_token(models, prompt_ids, steps),
                streamed_token=1e3 / (stream.decode or stream.whole),  # a few tokens may come all at once
            )
            if turn:
                speeds.append((merged, unmerged))
                overheads.append(overhead)
    return MergedReport(len(server.plan.ranges), lengths, streamed_steps(speeds, steps), median_overhead(overheads))


def table(report: MergedReport) -> str:
    """The report as Markdown."""
    streamed, overhead = report.streamed, report.overhead
    lengths = markdown(
        ["positions of a step", "merged, ms", f"through {report.ranges} ranges, ms", "unmerged / merged"],
        (
            [str(t.positions), f"{t.merged:.2f}", f"{t.unmerged:.2f}", f"{t.unmerged / t.merged:.2f}"]
            for t in report.lengths
        ),
    )
    streams = markdown(
        ["single-token steps", "merged, tok/s", "unmerged, tok/s", "ratio"],
        [
            [f"Corolla, {streamed.steps} steps", *_speeds(streamed.merged, streamed.unmerged, streamed.ratio)],
            ["Petals", *_speeds(PETALS_MERGED, PETALS_UNMERGED, PETALS_MERGED / PETALS_UNMERGED)],
        ],
    )
    costs = markdown(
        ["cost of Triton, per token", "in a bare loop, ms", "through the server, ms", "cost"],
        [
            [
                "`chain` over gRPC",
                f"{overhead.bare_step:.2f}",
                f"{overhead.raw_step:.2f}",
                f"{overhead.step_cost:+.1f} %",
            ],
            [
                "a stream of `generate`, with embedding and head",
                f"{overhead.bare_token:.2f}",
                f"{overhead.streamed_token:.2f}",
                f"{overhead.token_cost:+.1f} %",
            ],
        ],
    )
    return f"{lengths}\n\n{crossing_text(report.lengths)}\n\n{streams}\n\n{costs}"


def crossing_text(lengths: list[StepTimes]) -> str:
    """Where unmerged steps become as fast as merged ones, in words."""
    most = max(step.positions for step in lengths)
    crossed, nearly = crossing(lengths), crossing(lengths, CLOSE)
    text = f"Merged steps are faster up to {most} positions, the longest measured."
    if crossed is not None:
        text = f"From {crossed} positions on, unmerged steps are no slower than merged ones."
    if nearly is not None and nearly != crossed:
        text += f" From {nearly} positions on, unmerged steps take at most {CLOSE:.0%} longer."
    return text


def _speeds(merged: float, unmerged: float, ratio: float) -> list[str]:
    return [f"{merged:.1f}", f"{unmerged:.1f}", f"{ratio:.2f}"]
