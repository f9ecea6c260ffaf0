"""The options that say what a repository is to contain, for every command that plans one."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from corolla.checkpoint.folder import CheckpointFolder
from corolla.checkpoint.parts import block_prefixes
from corolla.dtypes import DTYPES
from corolla.model.batch_sizes import DECODERS
from corolla.planning.plan import PlanError
from corolla.planning.repository import planned
from corolla.planning.table import summary
from corolla.quantization import QUANTS
from corolla.remote.patience import FAILOVER_TIMEOUT, STEP_TIMEOUT
from corolla.repository.choices import Choices
from corolla.repository.plan import DEFAULT_BATCH_CHANNEL_CAPACITY, DEFAULT_MAX_BATCH_SIZE, DEVICES, RepositoryPlan
from corolla.repository.writer import write_repository
from corolla.wire.states import ENCODINGS

_Command = TypeVar("_Command", bound=Callable[..., None])

_OPTIONS = (
    click.option("--revision", help="Branch, tag or commit on the hub. [default: main]"),
    click.option("--token", help="For the hub; written nowhere. [default: HF_TOKEN, or that of `hf auth login`]"),
    click.option("--no-weights", is_flag=True, help="Leave the weights on the hub until a server needs them."),
    click.option("--blocks", help="The blocks that this server hosts, such as 8:16, or none. [default: all]"),
    click.option(
        "--ends",
        is_flag=True,
        help="Embedding, head and `generate` on a server without all blocks; one with all of them has them anyway.",
    ),
    click.option("--span", is_flag=True, help="Let others run this server's blocks; with --registry they always can."),
    click.option("--registry", default="", help="URL of the registry in which servers of one model find each other."),
    click.option("--model-name", default="", help="Name in the registry. [default: org/name, or that of the folder]"),
    click.option(
        "--wire",
        type=click.Choice(ENCODINGS),
        help="How hidden states travel to other servers; int8 takes half the bytes of bfloat16 and is less exact. "
        "[default: in the dtype]",
    ),
    click.option(
        "--step-timeout",
        type=float,
        default=STEP_TIMEOUT,
        show_default=True,
        help="Seconds after which another server that does not answer is given up; longer for long prompts.",
    ),
    click.option(
        "--failover-timeout",
        type=float,
        default=FAILOVER_TIMEOUT,
        show_default=True,
        help="Seconds in which another server must be found for a running generation.",
    ),
    click.option("--range-size", type=int, help="Blocks per range. [default: half of the blocks]"),
    click.option("--ranges", help="The ranges themselves, such as 0:4,4:8."),
    click.option(
        "--dtype",
        type=click.Choice(["auto", *DTYPES]),
        default="auto",
        show_default=True,
        help="auto: the checkpoint's own, but bfloat16 for float32.",
    ),
    click.option(
        "--quant",
        type=click.Choice(QUANTS),
        help="How the blocks' linear layers are quantized. [default: as in the checkpoint; if it is not, none on CPUs "
        "and with --tensor-parallel, nf4 on CUDA]",
    ),
    click.option("--device", type=click.Choice(DEVICES), default="cpu", show_default=True),
    click.option(
        "--max-batch-size",
        type=int,
        default=DEFAULT_MAX_BATCH_SIZE,
        show_default=True,
        help="Rows per batch of every model.",
    ),
    click.option(
        "--decoder",
        type=click.Choice(DECODERS),
        help="eager is the slow reference; it needs no C++ compiler. [default: compiled; eager with --tensor-parallel]",
    ),
    click.option(
        "--decoder-batch-sizes",
        help="Batch sizes to compile the decoder for, such as 8,4,1. [default: 16,8,4,1 up to --max-batch-size]",
    ),
    click.option(
        "--batch-channel-capacity",
        type=int,
        default=DEFAULT_BATCH_CHANNEL_CAPACITY,
        show_default=True,
        help="Batches that `generate` prepares ahead of the running one; 0: handed over hand to hand.",
    ),
    click.option(
        "--threads",
        type=int,
        default=0,
        show_default=True,
        help="CPU threads per process; 0: one per core of the serving machine.",
    ),
    click.option(
        "--attn-cache-tokens",
        type=int,
        default=0,
        help="Token positions of the KV cache. [default: 16384 with grouped or multi-query attention, else 4096]",
    ),
    click.option(
        "--tensor-parallel",
        type=int,
        default=1,
        show_default=True,
        help="Processes, and GPUs, that share out the heads and layers of each block range.",
    ),
    click.option(
        "--adapters", multiple=True, metavar="NAME=ADAPTER",
        help="LoRA adapter to load at the start, a local folder or org/name on the hub; may be given repeatedly.",
    ),
    click.option("--relative", is_flag=True, help="Write local paths relative to the repository."),
    click.option("--overcommit", is_flag=True, help="Write it even if this machine has too little memory for it."),
    click.option(
        "--force",
        is_flag=True,
        help="Overwrite files that were edited by hand, and remove models that are no longer wanted with all that was "
        "added to their folders.",
    ),
)


def repository_options(command: _Command) -> _Command:
    """Adds the options to a command; it gets them by the names of the fields of Choices."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def write_chosen(plan: RepositoryPlan, checkpoint: CheckpointFolder, out: Path, choices: Choices) -> None:
    """Fetches the weights and writes the repository as it was chosen; says what it changed."""
    _check_memory(plan, out, choices)
    if not choices.no_weights:
        others = set(range(plan.config.num_hidden_layers)).difference(plan.hosted)
        checkpoint.fetch(without=block_prefixes(plan.config, others))
    changes = write_repository(plan, out, force=choices.force)
    for change in changes.configs:
        click.echo(f"{'wrote' if change.after is not None else 'removed'} {out / change.file}")
    for file in changes.kept:
        click.echo(f"kept {out / file}, which was edited by hand; --force overwrites it")


def _check_memory(plan: RepositoryPlan, out: Path, choices: Choices) -> None:
    """Says what the server takes; PlanError when this machine has less, unless that is wanted."""
    try:
        found = planned(plan, out)
    except PlanError as error:
        if not choices.overcommit:
            raise PlanError(f"{error}; or --overcommit, for another machine") from error
        click.echo(f"warning: {error}", err=True)
    else:
        click.echo(summary(found) if found else f"{plan.device}: not on this machine, so its memory is not checked")
