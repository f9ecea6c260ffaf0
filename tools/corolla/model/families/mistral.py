"""Mistral: Llama with a sliding window; on the block class of transformers."""

from transformers.models.mistral.modeling_mistral import MistralDecoderLayer, MistralRMSNorm, MistralRotaryEmbedding

from corolla.model.family import Family

FAMILY = Family(
    block=MistralDecoderLayer,
    rotary_embedding=MistralRotaryEmbedding,
    final_norm=lambda config: MistralRMSNorm(config.hidden_size, eps=config.rms_norm_eps),
)
