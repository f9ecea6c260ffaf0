"""`corolla plan`: what fits on this machine, and how fast it will be."""

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from corolla.checkpoint.resolution import Hardware, explained_dtype, explained_quant
from corolla.checkpoint.source import find_source, open_checkpoint
from corolla.dtypes import DTYPES
from corolla.errors import InvalidValueError
from corolla.model.batch_sizes import COMPILED, DECODERS, EAGER
from corolla.planning.adapters import adapter_bytes
from corolla.planning.choices import explained_choices
from corolla.planning.machine import assumed_memories, device_memories, shared_memory_free
from corolla.planning.measurement import Conditions, known, measured, process_memory
from corolla.planning.plan import OVERRIDES, Setup, make_plan
from corolla.planning.quantity import parse_bytes
from corolla.planning.table import plan_text
from corolla.planning.throughput import Network, speed_of
from corolla.quantization import QUANTS
from corolla.repository.plan import DEFAULT_MAX_BATCH_SIZE, DEVICES, RepositoryPlan
from corolla.repository.writer import write_repository
from corolla.serving.parameters import parse_blocks

_COUNTS = ("working_processes", "idle_processes")


def _overrides(command: Callable[..., None]) -> Callable[..., None]:
    for name, text in reversed(OVERRIDES.items()):
        kind = click.IntRange(0) if name in _COUNTS else None
        command = click.option(f"--{name.replace('_', '-')}", name, type=kind, help=text)(command)
    return command


@click.command(
    epilog="""\b
    Examples:
      corolla plan ./my-llama
      corolla plan org/name --quant int8 --memory 12GiB --attn-cache-tokens 8192
      corolla plan ./my-llama --measure --peer 10.0.0.7:8001 --json"""
)
@click.argument("checkpoint")
@click.option("--revision", help="Branch, tag or commit on the hub. [default: main]")
@click.option("--token", help="For the hub. [default: HF_TOKEN, or that of `hf auth login`]")
@click.option("--dtype", type=click.Choice(["auto", *DTYPES]), default="auto", show_default=True)
@click.option("--quant", type=click.Choice(QUANTS), help="[default: as for corolla init]")
@click.option("--device", type=click.Choice(DEVICES), default="cpu", show_default=True)
@click.option("--devices", type=click.IntRange(0), default=0, help="The first GPUs. [default: all; 1 per shard]")
@click.option("--decoder", type=click.Choice(DECODERS), help="[default: compiled; eager with --tensor-parallel]")
@click.option("--max-batch-size", type=click.IntRange(1), default=DEFAULT_MAX_BATCH_SIZE, show_default=True)
@click.option("--threads", type=click.IntRange(0), default=0, help="Per process. [default: one per core]")
@click.option("--tensor-parallel", type=click.IntRange(1), default=1, show_default=True)
@click.option("--blocks", help="Those that may be hosted, such as 8:16, the first ones first. [default: all]")
@click.option("--range-size", type=click.IntRange(1), help="Blocks per range. [default: half of the blocks]")
@click.option("--ends/--no-ends", default=True, show_default=True, help="Whether embedding and head are hosted.")
@click.option("--span", is_flag=True, help="Whether other servers can run the blocks, as with a registry.")
@click.option("--adapters", multiple=True, metavar="NAME=ADAPTER", help="As for corolla init.")
@click.option("--attn-cache-tokens", type=click.IntRange(1), help="[default: as for corolla init]")
@click.option("--num-blocks", type=click.IntRange(1), help="So many or an error. [default: as many as fit]")
@_overrides
@click.option("--measure", is_flag=True, help="Run blocks to measure what is not known yet; takes minutes.")
@click.option("--remeasure", is_flag=True, help="Measure anew.")
@click.option("--network-mbps", type=float, help="Megabits a second of the network. [default: 1000]")
@click.option("--peer", metavar="HOST:PORT", help="gRPC endpoint of a running server, to measure the network to it.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan in JSON.")
def command(
    checkpoint: str,
    revision: str | None,
    token: str | None,
    dtype: str,
    quant: str | None,
    device: str,
    devices: int,
    decoder: str | None,
    max_batch_size: int,
    threads: int,
    tensor_parallel: int,
    blocks: str | None,
    range_size: int | None,
    ends: bool,
    span: bool,
    adapters: tuple[str, ...],
    measure: bool,
    remeasure: bool,
    network_mbps: float | None,
    peer: str | None,
    as_json: bool,
    **overrides: Any,
) -> None:
    """Say how many blocks of CHECKPOINT fit on this machine, and how fast they will be.

    CHECKPOINT is a local folder or org/name on the hub, of which only the config is fetched unless --measure is given.
    Every number can be given by the flag of its name; bytes as 1048576, 500MB or 12GiB.
    """
    source = find_source(checkpoint, revision, token)
    config = open_checkpoint(source).config
    if tensor_parallel > 1 and (measure or remeasure):
        raise InvalidValueError("--measure", tensor_parallel, "only without --tensor-parallel")
    hardware = Hardware.of(device)
    chosen_dtype = explained_dtype(dtype, config, hardware)
    chosen_quant = explained_quant(quant, config, hardware, tensor_parallel)
    decoder = decoder or (COMPILED if tensor_parallel == 1 else EAGER)
    repository_plan = RepositoryPlan(
        checkpoint=source.resolve() if isinstance(source, Path) else source,
        config=config,
        dtype=chosen_dtype.value,
        ranges=[range(config.num_hidden_layers)],
        device=device,
        max_batch_size=max_batch_size,
        threads=threads,
        decoder=decoder,
        quant=chosen_quant.value,
        tensor_parallel=tensor_parallel,
        ends=ends,
    )
    outcome = known(Conditions.of_plan(repository_plan))
    if measure or remeasure:
        with tempfile.TemporaryDirectory(prefix="corolla-plan-") as folder:
            write_repository(repository_plan, Path(folder))
            outcome = measured(Path(folder), again=remeasure)
    setup = Setup(
        config=config,
        dtype=chosen_dtype.value,
        blocks=_blocks(blocks, config.num_hidden_layers),
        quant=chosen_quant.value,
        device=device,
        packed=decoder == COMPILED and device == "cpu",
        shards=tensor_parallel,
        range_size=range_size or 0,
        ends=ends,
        span=span,
        adapter_bytes=adapter_bytes(adapters, config, token),
        process=process_memory(outcome) if outcome else None,
    )
    given = _given(overrides)
    shards = tensor_parallel if tensor_parallel > 1 and device == "cuda" else 0
    if device == "cuda" and "memory" in given:
        memories = assumed_memories(device, devices or shards or 1, given["memory"])
    else:
        memories = device_memories(device, devices or shards)
    plan = make_plan(setup, memories, shared_memory_free(), given)
    choices = explained_choices(chosen_dtype, chosen_quant, decoder, device, threads, tensor_parallel)
    speed = None
    if outcome is not None:
        network = Network(network_mbps, peer)
        tokens = network.tokens(config.hidden_size, setup.dtype.torch.itemsize, again=remeasure)
        speed = speed_of(outcome, tokens, len(plan.blocks))
    if as_json:
        content = plan.to_json() | {"choices": [asdict(choice) for choice in choices]}
        click.echo(json.dumps(content | {"throughput": speed.to_json() if speed else None}, indent=2))
    else:
        click.echo(plan_text(plan, choices, speed))


def _blocks(text: str | None, count: int) -> range:
    blocks = parse_blocks(text) if text else range(count)
    if blocks.stop > count:
        raise InvalidValueError("--blocks", text, f"a range inside 0:{count}")
    return blocks


def _given(overrides: dict[str, Any]) -> dict[str, int]:
    return {
        name: value if isinstance(value, int) else parse_bytes(f"--{name.replace('_', '-')}", value)
        for name, value in overrides.items()
        if value is not None
    }
