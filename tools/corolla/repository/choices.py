"""What a user may choose of a model repository, and the plan that follows from it."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PretrainedConfig

from corolla.checkpoint.folder import CheckpointFolder
from corolla.checkpoint.identity import ModelIdentity
from corolla.checkpoint.lora import AdapterFolder
from corolla.checkpoint.resolution import resolve_dtype, resolve_quant
from corolla.checkpoint.source import Source, find_source, open_checkpoint
from corolla.errors import InvalidValueError
from corolla.model.batch_sizes import COMPILED, EAGER, parse_batch_sizes
from corolla.remote.patience import FAILOVER_TIMEOUT, STEP_TIMEOUT
from corolla.repository.plan import (
    DEFAULT_BATCH_CHANNEL_CAPACITY,
    DEFAULT_MAX_BATCH_SIZE,
    RepositoryPlan,
    split_evenly,
)
from corolla.serving.parameters import parse_blocks


@dataclass(frozen=True)
class Choices:
    """The options of `corolla init`, by their names and with their defaults; `corolla init --help` describes them."""

    revision: str | None = None
    token: str | None = field(default=None, repr=False)
    no_weights: bool = False
    blocks: str | None = None
    ends: bool = False
    span: bool = False
    registry: str = ""
    model_name: str = ""
    wire: str | None = None
    step_timeout: float = STEP_TIMEOUT
    failover_timeout: float = FAILOVER_TIMEOUT
    range_size: int | None = None
    ranges: str | None = None
    dtype: str = "auto"
    quant: str | None = None
    device: str = "cpu"
    max_batch_size: int = DEFAULT_MAX_BATCH_SIZE
    decoder: str | None = None
    decoder_batch_sizes: str | None = None
    batch_channel_capacity: int = DEFAULT_BATCH_CHANNEL_CAPACITY
    threads: int = 0
    attn_cache_tokens: int = 0
    tensor_parallel: int = 1
    adapters: tuple[str, ...] = ()
    relative: bool = False
    overcommit: bool = False
    force: bool = False


def plan_repository(checkpoint: str, out: Path, choices: Choices) -> tuple[RepositoryPlan, CheckpointFolder]:
    """The plan of a repository in the folder `out`, and its checkpoint, whose weights may not have been fetched yet.

    `checkpoint` is a local folder or org/name on the hub. CheckpointError, InvalidValueError where it cannot be served
    as it was chosen.
    """
    source = find_source(checkpoint, choices.revision, choices.token)
    opened = open_checkpoint(source)
    config = opened.config
    with_others = choices.registry or choices.model_name or choices.blocks is not None
    identity = ModelIdentity.of(source, choices.model_name) if with_others else ModelIdentity("", "")
    hosted = _hosted(choices.blocks, config.num_hidden_layers)
    sizes, shards = choices.decoder_batch_sizes, choices.tensor_parallel
    plan = RepositoryPlan(
        checkpoint=_written(source, out, choices.relative),
        config=config,
        dtype=resolve_dtype(choices.dtype, config, choices.device),
        ranges=_ranges(choices.range_size, choices.ranges, hosted),
        blocks=hosted,
        ends=choices.ends or hosted == range(config.num_hidden_layers),
        span=choices.span,
        registry=choices.registry,
        model_id=identity.name,
        revision=identity.revision,
        wire=choices.wire or "",
        step_timeout=choices.step_timeout,
        failover_timeout=choices.failover_timeout,
        device=choices.device,
        max_batch_size=choices.max_batch_size,
        decoder=choices.decoder or (COMPILED if shards == 1 else EAGER),
        decoder_batch_sizes=parse_batch_sizes(sizes, choices.max_batch_size) if sizes else (),
        batch_channel_capacity=choices.batch_channel_capacity,
        threads=choices.threads,
        attn_cache_tokens=choices.attn_cache_tokens,
        quant=resolve_quant(choices.quant, config, choices.device, shards),
        tensor_parallel=shards,
        adapters={
            name: _written(found, out, choices.relative) if isinstance(found, Path) else found
            for name, found in _adapters(choices.adapters, config, choices.token)
        },
    )
    return plan, opened


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
