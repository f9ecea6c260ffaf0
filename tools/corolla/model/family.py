"""What differs between model families: module classes and where a checkpoint keeps their tensors."""

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers import PretrainedConfig

from corolla.errors import CheckpointError
from corolla.model import families

if TYPE_CHECKING:
    from corolla.model.sharding import HeadShard

Tensors = dict[str, torch.Tensor]


def _unchanged(tensors: Tensors) -> Tensors:
    return tensors


def _narrow_groups(block: nn.Module, heads: "HeadShard") -> None:
    cast(Any, block).self_attn.num_key_value_groups = heads.group


@dataclass(frozen=True)
class Family:
    """One architecture. Prefixes are those of the tensors in a Hugging Face checkpoint; `{}` is the block.

    `base_prefix` is in front of all but the head, or of none. A block takes hidden states [B, T, H] and the keywords
    of BlockRange and gives the same shape; `block_tensors` makes its tensors of those in the checkpoint.

    `sharding` is the block's plan for tensor parallelism where its config has none, see corolla.model.sharding;
    `narrow` tells a block that it has some heads only.
    """

    block: Callable[[PretrainedConfig, int], nn.Module]
    rotary_embedding: Callable[[PretrainedConfig], nn.Module]
    final_norm: Callable[[PretrainedConfig], nn.Module]
    base_prefix: str = "model."
    embedding_prefix: str = "embed_tokens."
    block_prefix: str = "layers.{}."
    norm_prefix: str = "norm."
    head_prefix: str = "lm_head."
    block_tensors: Callable[[Tensors], Tensors] = _unchanged
    embedding_scale: Callable[[PretrainedConfig], float] | None = None
    embedding_norm: Callable[[PretrainedConfig], nn.Module] | None = None
    embedding_norm_prefix: str = ""
    sharding: dict[str, str] | None = None
    narrow: Callable[[nn.Module, "HeadShard"], None] = _narrow_groups


def family_of(config: PretrainedConfig) -> Family:
    """The family of a checkpoint's config; CheckpointError naming the supported ones for any other."""
    supported = supported_families()
    if config.model_type not in supported:
        raise CheckpointError(
            f"config.json: model_type {config.model_type!r} is not supported; supported: {', '.join(supported)}"
        )
    _check_rotation(config)
    family: Family = import_module(f"{families.__name__}.{config.model_type}").FAMILY
    return family


def supported_families() -> list[str]:
    """The model types that can be served. Their modules are imported when they are needed."""
    return sorted(module.name for module in pkgutil.iter_modules(families.__path__))


def _check_rotation(config: PretrainedConfig) -> None:
    """Refuses longrope: its frequencies depend on the longest row of a batch, so rows would not be independent."""
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope_type == "longrope":
        raise CheckpointError(
            f"config.json: rope type {rope_type!r} is not supported; supported: default, linear, dynamic, yarn, llama3"
        )
