"""Decoder batch sizes: one size for every number of rows, against several."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tqdm import tqdm
from transformers import AutoTokenizer

from corolla.bench.prompts import make_prompts
from corolla.bench.serving import BenchServer, local_folder
from corolla.bench.streams import run_streams
from corolla.bench.tables import markdown
from corolla.bench.timing import RunResult, median_result
from corolla.model.batch_sizes import joined, size_for

PROMPT_TOKENS = 16


@dataclass(frozen=True)
class SizesResult:
    """`requests` streams at once on decoders of `sizes`: a step has `rows` rows, of which `padding` belong to nobody.

    Rows follow from the sizes, for steps in which every stream takes part.
    """

    sizes: tuple[int, ...]
    requests: int
    run: RunResult
    rows: int
    padding: int


def measure_sizes(server: BenchServer, requests: Sequence[int], max_tokens: int, rounds: int) -> list[SizesResult]:
    """One server, whose plan names the sizes; medians of `rounds` runs after one to warm up."""
    sizes = server.plan.batch_sizes
    prompts = make_prompts(AutoTokenizer.from_pretrained(local_folder(server.plan)), max(requests), PROMPT_TOKENS)
    runs: dict[int, list[RunResult]] = {count: [] for count in requests}
    for turn in tqdm(range(rounds + 1), desc=f"rounds, sizes {joined(sizes)}", unit="round"):
        for count in requests:
            run = run_streams(server.grpc, prompts[:count], max_tokens)
            if turn:
                runs[count].append(run)
    return [_result(sizes, count, median_result(done)) for count, done in runs.items()]


def _result(sizes: tuple[int, ...], requests: int, run: RunResult) -> SizesResult:
    rows, padding = rows_of_step(requests, sizes)
    return SizesResult(sizes, requests, run, rows, padding)


def rows_of_step(requests: int, sizes: Sequence[int]) -> tuple[int, int]:
    """Rows that one step of all requests runs, padding included, and the padding alone."""
    full, rest = divmod(requests, max(sizes))
    rows = full * max(sizes) + (size_for(rest, sizes) if rest else 0)
    return rows, rows - requests


def to_json(results: Sequence[SizesResult]) -> dict[str, Any]:
    """For --json."""
    return {"results": [asdict(result) for result in results]}


def table(results: Sequence[SizesResult]) -> str:
    """The results as Markdown, those for equally many requests together."""
    return markdown(
        ["requests", "decoder batch sizes", "decode, tok/s", "first token, ms", "rows of a step", "padding"],
        (
            [
                str(r.requests), joined(r.sizes), f"{r.run.decode:.1f}", f"{r.run.first_token * 1e3:.0f}",
                str(r.rows), str(r.padding),
            ]
            for r in sorted(results, key=lambda r: r.requests)
        ),
    )  # fmt: skip
