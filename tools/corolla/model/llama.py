"""The Llama family, on the block classes of transformers."""

from torch import nn
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from corolla.errors import CheckpointError
from corolla.model.family import Family


def _final_norm(config: PretrainedConfig) -> nn.Module:
    norm: nn.Module = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
    return norm


def _check(config: PretrainedConfig) -> None:
    """Refuses longrope: its frequencies depend on the longest row of a batch, so rows would not be independent."""
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope_type == "longrope":
        raise CheckpointError(
            f"config.json: rope type {rope_type!r} is not supported; supported: default, linear, dynamic, yarn, llama3"
        )


LLAMA = Family(
    model_type="llama",
    block=LlamaDecoderLayer,
    rotary_embedding=LlamaRotaryEmbedding,
    final_norm=_final_norm,
    embedding_prefix="model.embed_tokens.",
    block_prefix="model.layers.{}.",
    norm_prefix="model.norm.",
    head_prefix="lm_head.",
    check=_check,
)
