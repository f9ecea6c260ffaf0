"""The sizes of a model, under whatever names its config gives them."""

from dataclasses import dataclass

from transformers import PretrainedConfig

ALIBI_CONTEXT = 2048
"""The context of models with linear biases whose config names none, as they were trained."""


@dataclass(frozen=True)
class ModelShape:
    """`heads` ask and `kv_heads` answer, each of `head_dim`; `context_length` is in positions."""

    blocks: int
    heads: int
    kv_heads: int
    head_dim: int
    context_length: int

    @classmethod
    def of(cls, config: PretrainedConfig) -> "ModelShape":
        """The shape of the model that a config describes."""
        heads = config.num_attention_heads
        return cls(
            blocks=config.num_hidden_layers,
            heads=heads,
            kv_heads=_kv_heads(config, heads),
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            context_length=(
                getattr(config, "max_position_embeddings", None) or getattr(config, "seq_length", None) or ALIBI_CONTEXT
            ),
        )


def _kv_heads(config: PretrainedConfig, heads: int) -> int:
    """As Falcon's attention reads its config, and all others theirs."""
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return 1
    grouped = getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None)
    return grouped or heads
