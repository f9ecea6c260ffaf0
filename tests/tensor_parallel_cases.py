"""One checkpoint per form of attention and of the layers after it, whose 8 heads 2 and 4 shards can split."""

from dataclasses import replace
from typing import Any

from checkpoints import BLOOM, CASES, FALCON_ALIBI, FALCON_GROUPED, FAMILIES, MIXTRAL, QWEN2_MIXED, Case

BIASES = CASES[-1]
NAMED = {case.name: case for case in FAMILIES}


def split(case: Case, kv_heads: int | None = None, **config: Any) -> Case:
    """The case with two blocks and 8 heads, which `kv_heads` answer."""
    grouped = {} if kv_heads is None else {"num_key_value_heads": kv_heads}
    return replace(
        case,
        ranges=(range(0, 2),),
        config=case.config | {"intermediate_size": 144, "num_attention_heads": 8} | grouped | config,
    )


CASES_OF_SHARDS = (
    split(BIASES, 2),
    split(NAMED["mistral-window-yarn"], 4),
    split(MIXTRAL, 2),
    split(QWEN2_MIXED, 2),
    split(NAMED["qwen3"], 4),
    split(NAMED["gemma"], 1, initializer_range=0.04),
    split(BLOOM),
    split(FALCON_ALIBI),
    split(FALCON_GROUPED, num_kv_heads=2),
    split(NAMED["falcon-grouped-one-norm"], num_kv_heads=4),
    split(NAMED["falcon-multi-query"]),
)
