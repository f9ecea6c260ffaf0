"""Weights of linear layers in the order in which the CPU kernel reads them.

A packed weight is [tiles, ceil(inputs / group), 32, group]: 32 output features a tile, `group` neighbouring inputs of
a feature side by side (2 for bfloat16, as the AVX512_BF16 dot product takes them; 1 for float32). A thread reads its
tiles from end to end, so every processor's prefetcher follows. Missing features and inputs are zeros.
"""

import torch
from torch import nn

TILE = 32
GROUPS = {torch.bfloat16: 2, torch.float32: 1}
"""The dtypes that can be packed."""


def packed_shape(out_features: int, in_features: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """The shape of a packed weight."""
    group = GROUPS[dtype]
    return -(-out_features // TILE), -(-in_features // group), TILE, group


def pack(weight: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The weight [out_features, in_features] of a linear layer, packed; with a dimension of experts in front, each.

    It is packed for inputs of `dtype`, else of its own.
    """
    if weight.ndim == 3:
        return torch.stack([pack(expert) for expert in weight])
    outputs, inputs = weight.shape
    group = GROUPS[dtype or weight.dtype]
    padded = nn.functional.pad(weight, (0, -inputs % group, 0, -outputs % TILE))
    return padded.view(-1, TILE, padded.shape[1] // group, group).transpose(1, 2).contiguous()


def unpack(packed: torch.Tensor, out_features: int, in_features: int) -> torch.Tensor:
    """The inverse of `pack`."""
    tiles, groups, _, group = packed.shape
    return packed.transpose(1, 2).reshape(tiles * TILE, groups * group)[:out_features, :in_features].contiguous()
