"""`corolla bench`: measure on this machine."""

import json
from pathlib import Path
from typing import Any

import click

from corolla.bench.openmp import load_torch

_CHECKPOINT = click.argument("checkpoint", type=click.Path(path_type=Path, exists=True, file_okay=False))
_DTYPE = click.option("--dtype", default="auto", show_default=True, help="auto, float32 or bfloat16.")
_ROUNDS = click.option("--rounds", type=click.IntRange(1, 100), default=3, show_default=True)
_JSON = click.option("--json", "json_file", type=click.Path(path_type=Path), help="File for all figures.")


@click.group(
    epilog="""\b
    Example:
      corolla bench generate .cache/demo-checkpoint --sessions 1,4"""
)
def command() -> None:
    """Measure a checkpoint on this machine, through a server that is started for it."""
    load_torch()


@command.command(epilog="Example: corolla bench generate .cache/demo-checkpoint --sessions 1,4 --json figures.json")
@_CHECKPOINT
@_DTYPE
@click.option("--sessions", default="1,4,8,16", show_default=True, help="Numbers of generations at once.")
@click.option("--max-tokens", type=click.IntRange(2, 4096), default=64, show_default=True, help="New tokens each.")
@click.option("--threads", type=click.IntRange(1, 1024), default=2, show_default=True, help="Of either side.")
@_ROUNDS
@_JSON
def generate(
    checkpoint: Path, dtype: str, sessions: str, max_tokens: int, threads: int, rounds: int, json_file: Path | None
) -> None:
    """Compare streamed generation through a server with `generate` of transformers, side by side."""
    from corolla.bench.generation import compare_generation, table
    from corolla.bench.serving import bench_server

    counts = [int(part) for part in sessions.split(",")]
    with bench_server(checkpoint, dtype, threads=threads) as server:
        report = compare_generation(server, checkpoint, counts, max_tokens, rounds, threads)
    click.echo(table(report))
    _write(json_file, report.to_json())


def _write(file: Path | None, figures: Any) -> None:
    if file is not None:
        file.write_text(json.dumps(figures, indent=2) + "\n")
