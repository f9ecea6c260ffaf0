"""Falcon in all its forms: multi-query, grouped or full attention, rotations or linear biases; on our attention."""

from copy import copy
from typing import Any, cast

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.models.falcon.modeling_falcon import (
    FalconAttention,
    FalconDecoderLayer,
    FalconRotaryEmbedding,
    apply_rotary_pos_emb,
)

from corolla.model.alibi import alibi_slopes
from corolla.model.attention import attend
from corolla.model.family import Family
from corolla.model.shape import ModelShape
from corolla.model.sharding import COLWISE, HEADS, ROWWISE, HeadShard


class Attention(FalconAttention):
    """In the place of a FalconAttention; caches a grouped head once. `layer_past` holds the keywords of the step."""

    def __init__(self, config: PretrainedConfig, index: int) -> None:
        super().__init__(config, index)
        self.all_heads = config.num_attention_heads
        self.heads = range(self.all_heads)
        self.kv_heads = ModelShape.of(config).kv_heads
        self.num_key_value_groups = self.all_heads // self.kv_heads
        self.alibi = config.alibi

    def narrow(self, heads: HeadShard) -> None:
        """Leaves these heads."""
        self.heads, self.num_heads = heads.heads, len(heads.heads)
        self.kv_heads, self.num_key_value_groups = len(heads.kv_heads), heads.group

    def forward(
        self, hidden_states: torch.Tensor, *, layer_past: dict[str, Any], **_: Any
    ) -> tuple[torch.Tensor, None]:
        """Hidden states [B, T, H] to the same."""
        fused = self.query_key_value(hidden_states)  # per key head: its queries, its key, its value
        heads = fused.view(*fused.shape[:2], self.kv_heads, self.num_key_value_groups + 2, self.head_dim)
        query = heads[:, :, :, :-2].flatten(2, 3).transpose(1, 2)
        key, value = heads[:, :, :, -2].transpose(1, 2), heads[:, :, :, -1].transpose(1, 2)
        slopes = None
        if self.alibi:
            slopes = alibi_slopes(self.all_heads, query.device)[self.heads.start : self.heads.stop]
            slopes = slopes.bfloat16()  # rounded in training, whatever the dtype
        else:
            query, key = apply_rotary_pos_emb(query, key, *layer_past["position_embeddings"])
        cache = layer_past["past_key_values"]
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attended = attend(self, query, key, value, scaling=self.inv_norm_factor, slopes=slopes, **layer_past)[0]
        return self.dense(attended.flatten(2)), None


class Block(FalconDecoderLayer):
    """In the form of other families' blocks."""

    def __init__(self, config: PretrainedConfig, index: int) -> None:
        config = copy(config)
        config._attn_implementation = "eager"
        super().__init__(config, index)
        self.self_attention = Attention(config, index)

    def forward(self, hidden_states: torch.Tensor, **step: Any) -> torch.Tensor:
        """See Family."""
        output: torch.Tensor = super().forward(hidden_states, alibi=None, attention_mask=None, layer_past=step)[0]
        return output


def _final_norm(config: PretrainedConfig) -> nn.Module:
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)


def _narrow(block: nn.Module, heads: HeadShard) -> None:
    cast(Attention, block.self_attention).narrow(heads)


FAMILY = Family(
    block=Block,
    rotary_embedding=FalconRotaryEmbedding,
    final_norm=_final_norm,
    base_prefix="transformer.",
    embedding_prefix="word_embeddings.",
    block_prefix="h.{}.",
    norm_prefix="ln_f.",
    sharding={
        "self_attention.query_key_value": HEADS,
        "self_attention.dense": ROWWISE,
        "mlp.dense_h_to_4h": COLWISE,
        "mlp.dense_4h_to_h": ROWWISE,
    },
    narrow=_narrow,
)
