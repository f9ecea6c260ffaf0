"""`corolla init`: write a model repository for a checkpoint."""

from pathlib import Path
from typing import Any

import click

from corolla.cli.repository_options import repository_options, write_chosen
from corolla.quantization import NONE
from corolla.repository.choices import Choices, plan_repository
from corolla.repository.writer import repository_changes


@click.command(
    epilog="""\b
    Examples:
      corolla init ./my-llama --out ./repository
      corolla init ./my-llama --out ./repository --ranges 0:10,10:22 --dtype bfloat16
      corolla init org/name --revision v1.0 --out ./repository
      corolla init ./my-llama --out ./repository --blocks 8:16 --registry sqlite:///tmp/peers.db"""
)
@click.argument("checkpoint")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the repository.")
@click.option("--diff", is_flag=True, help="Print what would change, and write nothing.")
@repository_options
def command(checkpoint: str, out: Path, diff: bool, **options: Any) -> None:
    """Write a model repository that serves CHECKPOINT, a local folder in Hugging Face format or org/name on the hub.

    The commit that the hub has under that name now is what all processes of the server use, on any machine. Files that
    are already as they should be are left alone, and so is everything else in the folder; models written before that
    are no longer wanted are removed.
    """
    choices = Choices(**options)
    plan, opened = plan_repository(checkpoint, out, choices)
    if diff:
        click.echo(repository_changes(plan, out, force=choices.force).diff() or f"{out}: nothing would change")
        return
    write_chosen(plan, opened, out, choices)
    weights = plan.dtype.name if plan.quant == NONE else f"{plan.quant} and {plan.dtype.name}"
    click.echo(f"{out}: {len(plan.ranges)} ranges in {weights}; start it with: corolla serve {out}")
