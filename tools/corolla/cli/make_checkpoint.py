"""`corolla make-checkpoint`: write a checkpoint with seeded random weights."""

from pathlib import Path

import click

from corolla.checkpoint.synthetic import SHAPES, make_checkpoint
from corolla.dtypes import DTYPES, dtype_named


@click.command(
    epilog="""\b
    Example:
      corolla make-checkpoint --shape S --seed 0 --out /tmp/llama-s"""
)
@click.option("--shape", type=click.Choice(sorted(SHAPES)), required=True, help="S: 110 M parameters, M: 1.1 B.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--dtype", type=click.Choice(sorted(DTYPES)), default="bfloat16", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to write, in Hugging Face format.")
def command(shape: str, seed: int, dtype: str, out: Path) -> None:
    """Write a Llama checkpoint with seeded random weights, for benchmarks: its text means nothing."""
    make_checkpoint(SHAPES[shape], dtype_named(dtype), seed, out)
    click.echo(f"{out}: shape {shape}, {dtype}; serve it with: corolla init {out} --out REPOSITORY")
