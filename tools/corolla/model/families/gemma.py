"""Gemma: scaled embeddings, norms around 1; on the block class of transformers."""

from transformers.models.gemma.modeling_gemma import GemmaDecoderLayer, GemmaRMSNorm, GemmaRotaryEmbedding

from corolla.model.family import Family

FAMILY = Family(
    block=GemmaDecoderLayer,
    rotary_embedding=GemmaRotaryEmbedding,
    final_norm=lambda config: GemmaRMSNorm(config.hidden_size, eps=config.rms_norm_eps),
    embedding_scale=lambda config: config.hidden_size**0.5,
)
