"""The shape of the KV cache that all processes of a server share."""

import json
from dataclasses import asdict, dataclass

import torch
from transformers import PretrainedConfig

from corolla.dtypes import dtype_named
from corolla.model.shape import ModelShape
from corolla.model.sharding import HeadShard, Shard

DEFAULT_PAGE_SIZE = 16


@dataclass(frozen=True)
class KVLayout:
    """Pages of `page_size` token positions; per block one key and one value of [kv_heads, head_dim] each.

    With several `shards`, that is what each of them holds.
    """

    pages: int
    page_size: int
    blocks: int
    kv_heads: int
    head_dim: int
    dtype: str
    shards: int = 1

    @classmethod
    def of(
        cls, config: PretrainedConfig, dtype: str, attn_cache_tokens: int, page_size: int, shards: int = 1
    ) -> "KVLayout":
        """The layout for a model: `attn_cache_tokens` rounded up to whole pages."""
        shape = ModelShape.of(config)
        return cls(
            pages=-(-attn_cache_tokens // page_size),
            page_size=page_size,
            blocks=shape.blocks,
            kv_heads=len(HeadShard.of(config, Shard(0, shards)).kv_heads),
            head_dim=shape.head_dim,
            dtype=dtype,
            shards=shards,
        )

    @property
    def slots(self) -> int:
        """Token positions in the arena."""
        return self.pages * self.page_size

    @property
    def elements_per_block(self) -> int:
        """Keys and values of one block."""
        return 2 * self.slots * self.kv_heads * self.head_dim

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block's keys and values."""
        return self.elements_per_block * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of keys and values."""
        return dtype_named(self.dtype).torch

    def to_json(self) -> str:
        """For the run directory, where every process compares it with its own."""
        return json.dumps(asdict(self), sort_keys=True)


def default_attn_cache_tokens(config: PretrainedConfig) -> int:
    """16384 with grouped or multi-query attention, else 4096: the budgets of Petals' servers."""
    shape = ModelShape.of(config)
    return 16384 if shape.kv_heads < shape.heads else 4096
