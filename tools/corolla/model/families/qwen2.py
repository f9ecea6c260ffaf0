"""Qwen2: biases of queries, keys and values, sliding windows in some blocks; on the block class of transformers."""

from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm, Qwen2RotaryEmbedding

from corolla.model.family import Family

FAMILY = Family(
    block=Qwen2DecoderLayer,
    rotary_embedding=Qwen2RotaryEmbedding,
    final_norm=lambda config: Qwen2RMSNorm(config.hidden_size, eps=config.rms_norm_eps),
)
