"""Llama, on the block class of transformers."""

from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from corolla.model.family import Family

FAMILY = Family(
    block=LlamaDecoderLayer,
    rotary_embedding=LlamaRotaryEmbedding,
    final_norm=lambda config: LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps),
)
