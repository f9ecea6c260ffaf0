"""Bloom: linear biases instead of rotations, a norm after the embedding; its attention runs on ours."""

from typing import Any, cast

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.models.bloom.modeling_bloom import BloomAttention, BloomBlock

from corolla.model.alibi import alibi_slopes
from corolla.model.attention import attend
from corolla.model.family import Family
from corolla.model.rotary import Unrotated
from corolla.model.sharding import COLWISE, HEADS, ROWWISE, HeadShard


class Attention(BloomAttention):
    """In the place of a BloomAttention; `layer_past` holds the keywords of the step."""

    def __init__(self, config: PretrainedConfig, index: int) -> None:
        super().__init__(config, index)
        self.all_heads = config.num_attention_heads
        self.heads = range(self.all_heads)

    def narrow(self, heads: HeadShard) -> None:
        """Leaves these heads."""
        self.heads, self.num_heads = heads.heads, len(heads.heads)

    def forward(
        self, hidden_states: torch.Tensor, residual: torch.Tensor, *, layer_past: dict[str, Any], **_: Any
    ) -> tuple[torch.Tensor, None]:
        """Hidden states and residual [B, T, H] to their sum after attention."""
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        cache = layer_past["past_key_values"]
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        slopes = alibi_slopes(self.all_heads, query.device)[self.heads.start : self.heads.stop]
        slopes = slopes / self.inv_norm_factor  # the bias itself is not scaled
        attended = attend(self, query, key, value, scaling=self.inv_norm_factor, slopes=slopes, **layer_past)[0]
        return residual + self.dense(attended.flatten(2)), None


class Block(BloomBlock):
    """In the form of other families' blocks."""

    def __init__(self, config: PretrainedConfig, index: int) -> None:
        super().__init__(config, index)
        self.self_attention = Attention(config, index)
        self.mlp.slow_but_exact = False  # the same sum in another order

    def forward(self, hidden_states: torch.Tensor, **step: Any) -> torch.Tensor:
        """See Family."""
        output: torch.Tensor = super().forward(hidden_states, alibi=None, attention_mask=None, layer_past=step)[0]
        return output


def _layer_norm(config: PretrainedConfig) -> nn.Module:
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)


def _narrow(block: nn.Module, heads: HeadShard) -> None:
    cast(Attention, block.self_attention).narrow(heads)


FAMILY = Family(
    block=Block,
    rotary_embedding=Unrotated,
    final_norm=_layer_norm,
    base_prefix="transformer.",
    embedding_prefix="word_embeddings.",
    block_prefix="h.{}.",
    norm_prefix="ln_f.",
    embedding_norm=_layer_norm,
    embedding_norm_prefix="word_embeddings_layernorm.",
    sharding={
        "self_attention.query_key_value": HEADS,
        "self_attention.dense": ROWWISE,
        "mlp.dense_h_to_4h": COLWISE,
        "mlp.dense_4h_to_h": ROWWISE,
    },
    narrow=_narrow,
)
