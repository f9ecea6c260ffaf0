"""`corolla init`: write a model repository for a checkpoint."""

import os
from pathlib import Path

import click
from transformers import PretrainedConfig

from corolla.checkpoint.lora import AdapterFolder
from corolla.checkpoint.parts import block_prefixes
from corolla.checkpoint.resolution import resolve_dtype, resolve_quant
from corolla.checkpoint.source import Source, find_source, open_checkpoint
from corolla.dtypes import DTYPES
from corolla.errors import InvalidValueError
from corolla.model.batch_sizes import COMPILED, DECODERS, EAGER, parse_batch_sizes
from corolla.quantization import NONE, QUANTS
from corolla.repository.plan import (
    DEFAULT_BATCH_CHANNEL_CAPACITY,
    DEFAULT_MAX_BATCH_SIZE,
    DEVICES,
    RepositoryPlan,
    split_evenly,
)
from corolla.repository.writer import write_repository
from corolla.serving.parameters import parse_blocks


@click.command(
    epilog="""\b
    Examples:
      corolla init ./my-llama --out ./repository
      corolla init ./my-llama --out ./repository --ranges 0:10,10:22 --dtype bfloat16
      corolla init org/name --revision v1.0 --out ./repository
      corolla init ./my-llama --out ./repository --blocks 8:16 --registry sqlite:///peers.db"""
)
@click.argument("checkpoint")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the repository.")
@click.option("--revision", help="Branch, tag or commit on the hub. [default: main]")
@click.option("--token", help="For the hub; written nowhere. [default: HF_TOKEN, or that of `hf auth login`]")
@click.option("--no-weights", is_flag=True, help="Leave the weights on the hub until a server needs them.")
@click.option("--blocks", help="The blocks that this server hosts, such as 8:16, or none. [default: all]")
@click.option(
    "--ends", is_flag=True,
    help="Embedding, head and `generate` on a server that does not host all blocks; with all blocks they are there.",
)
@click.option("--span", is_flag=True, help="Let others run this server's blocks; with --registry they always can.")
@click.option("--registry", default="", help="URL of the registry in which servers of one model find each other.")
@click.option("--model-name", default="", help="The model's name in the registry, the same on all its servers.")
@click.option("--range-size", type=int, help="Blocks per range. [default: half of the blocks]")
@click.option("--ranges", help="The ranges themselves, such as 0:4,4:8.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", *DTYPES]),
    default="auto",
    show_default=True,
    help="auto: the checkpoint's own, but bfloat16 for float32.",
)
@click.option(
    "--quant",
    type=click.Choice(QUANTS),
    help="How the blocks' linear layers are quantized. [default: as in the checkpoint; if it is not, none on CPUs "
    "and with --tensor-parallel, nf4 on CUDA]",
)
@click.option("--device", type=click.Choice(DEVICES), default="cpu", show_default=True)
@click.option(
    "--max-batch-size",
    type=int,
    default=DEFAULT_MAX_BATCH_SIZE,
    show_default=True,
    help="Rows per batch of every model.",
)
@click.option(
    "--decoder",
    type=click.Choice(DECODERS),
    help="eager is the slow reference; it needs no C++ compiler. [default: compiled; eager with --tensor-parallel]",
)
@click.option(
    "--decoder-batch-sizes",
    help="Batch sizes to compile the decoder for, such as 8,4,1. [default: 16,8,4,1 up to --max-batch-size]",
)
@click.option(
    "--batch-channel-capacity",
    type=int,
    default=DEFAULT_BATCH_CHANNEL_CAPACITY,
    show_default=True,
    help="Batches that `generate` prepares ahead of the running one; 0: handed over hand to hand.",
)
@click.option(
    "--threads",
    type=int,
    default=0,
    show_default=True,
    help="CPU threads per process; 0: one per core of the serving machine.",
)
@click.option(
    "--attn-cache-tokens",
    type=int,
    default=0,
    help="Token positions of the KV cache. [default: 16384 with grouped or multi-query attention, else 4096]",
)
@click.option(
    "--tensor-parallel",
    type=int,
    default=1,
    show_default=True,
    help="Processes, and GPUs, that share out the heads and layers of each block range.",
)
@click.option(
    "--adapters", multiple=True, metavar="NAME=ADAPTER",
    help="LoRA adapter to load at the start, a local folder or org/name on the hub; may be given repeatedly.",
)
@click.option("--relative", is_flag=True, help="Write local paths relative to the repository.")
def command(
    checkpoint: str,
    out: Path,
    revision: str | None,
    token: str | None,
    no_weights: bool,
    blocks: str | None,
    ends: bool,
    span: bool,
    registry: str,
    model_name: str,
    range_size: int | None,
    ranges: str | None,
    dtype: str,
    quant: str | None,
    device: str,
    max_batch_size: int,
    decoder: str | None,
    decoder_batch_sizes: str | None,
    batch_channel_capacity: int,
    threads: int,
    attn_cache_tokens: int,
    tensor_parallel: int,
    adapters: tuple[str, ...],
    relative: bool,
) -> None:
    """Write a model repository that serves CHECKPOINT, a local folder in Hugging Face format or org/name on the hub.

    The commit that the hub has under that name now is what all processes of the server use, on any machine. Files that
    are already as they should be are left alone, and so is everything else in the folder.
    """
    source = find_source(checkpoint, revision, token)
    opened = open_checkpoint(source)
    config = opened.config
    hosted = _hosted(blocks, config.num_hidden_layers)
    plan = RepositoryPlan(
        checkpoint=_written(source, out, relative),
        config=config,
        dtype=resolve_dtype(dtype, config, device),
        ranges=_ranges(range_size, ranges, hosted),
        blocks=hosted,
        ends=ends or hosted == range(config.num_hidden_layers),
        span=span,
        registry=registry,
        model_id=model_name,
        device=device,
        max_batch_size=max_batch_size,
        decoder=decoder or (COMPILED if tensor_parallel == 1 else EAGER),
        decoder_batch_sizes=parse_batch_sizes(decoder_batch_sizes, max_batch_size) if decoder_batch_sizes else (),
        batch_channel_capacity=batch_channel_capacity,
        threads=threads,
        attn_cache_tokens=attn_cache_tokens,
        quant=resolve_quant(quant, config, device, tensor_parallel),
        tensor_parallel=tensor_parallel,
        adapters={
            name: _written(found, out, relative) if isinstance(found, Path) else found
            for name, found in _adapters(adapters, config, token)
        },
    )
    if not no_weights:
        opened.fetch(without=block_prefixes(config, set(range(config.num_hidden_layers)).difference(hosted)))
    changed = write_repository(plan, out)
    for file in changed:
        click.echo(f"wrote {file}")
    weights = plan.dtype.name if plan.quant == NONE else f"{plan.quant} and {plan.dtype.name}"
    click.echo(f"{out}: {len(plan.ranges)} ranges in {weights}; start it with: corolla serve {out}")


def _written(source: Source, out: Path, relative: bool) -> Source:
    """What the repository is to say."""
    if not isinstance(source, Path):
        if relative:
            raise InvalidValueError("--relative", source, "only with a local folder")
        return source
    return Path(os.path.relpath(source.resolve(), out.resolve())) if relative else source.resolve()


def _adapters(texts: tuple[str, ...], config: PretrainedConfig, token: str | None) -> list[tuple[str, Source]]:
    """Names and sources, each of which can be used."""
    found: list[tuple[str, Source]] = []
    for text in texts:
        name, equals, source = text.partition("=")
        if not equals or name in dict(found):
            raise InvalidValueError("--adapters", text, "name=folder or name=org/name, each name once")
        found.append((name, find_source(source, token=token)))
        AdapterFolder(found[-1][1], config).prepared()
    return found


def _hosted(blocks: str | None, count: int) -> range:
    if blocks is None:
        return range(count)
    return range(0) if blocks == "none" else parse_blocks(blocks)


def _ranges(range_size: int | None, ranges: str | None, blocks: range) -> list[range]:
    if ranges is not None and range_size is not None:
        raise InvalidValueError("--range-size", range_size, "either --range-size or --ranges, not both")
    if ranges is not None:
        return [parse_blocks(part) for part in ranges.split(",")]
    return split_evenly(blocks, range_size if range_size is not None else -(-len(blocks) // 2))
