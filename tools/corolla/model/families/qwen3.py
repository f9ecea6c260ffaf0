"""Qwen3: norms of queries and keys, sliding windows in some blocks; on the block class of transformers."""

from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding

from corolla.model.family import Family

FAMILY = Family(
    block=Qwen3DecoderLayer,
    rotary_embedding=Qwen3RotaryEmbedding,
    final_norm=lambda config: Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps),
)
