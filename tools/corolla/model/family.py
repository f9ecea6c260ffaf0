"""What differs between model families: module classes and where a checkpoint keeps their tensors."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from corolla.errors import CheckpointError


@dataclass(frozen=True)
class Family:
    """One architecture. Prefixes are those of the tensors in a Hugging Face checkpoint; `{}` is the block."""

    model_type: str
    block: Callable[[PretrainedConfig, int], nn.Module]
    rotary_embedding: Callable[[PretrainedConfig], nn.Module]
    final_norm: Callable[[PretrainedConfig], nn.Module]
    embedding_prefix: str
    block_prefix: str
    norm_prefix: str
    head_prefix: str
    check: Callable[[PretrainedConfig], None]


def family_of(config: PretrainedConfig) -> Family:
    """The family of a checkpoint's config; CheckpointError naming the supported ones for any other."""
    from corolla.model.llama import LLAMA

    families: dict[str, Any] = {family.model_type: family for family in (LLAMA,)}
    family: Family | None = families.get(config.model_type)
    if family is None:
        raise CheckpointError(
            f"config.json: model_type {config.model_type!r} is not supported; supported: {', '.join(families)}"
        )
    family.check(config)
    return family
