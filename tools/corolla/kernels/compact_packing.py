"""Packed weights in bfloat16 that take twelve bits each and lose nothing.

The exponents of a model's weights are nearly all among sixteen in a row, so four bits tell them apart instead of eight;
that they hold little information is what DFloat11 builds on (Zhang et al., 2025, arXiv:2504.11651). Codes of a fixed
length can be undone inside the product: a step reads a quarter less memory, which is what bounds it.

A compact weight is [tiles, bytes] uint8; see packing.py for tiles. A tile begins with the smallest of its sixteen
exponents and the number of its outliers (int32 each), then room for its outliers: weights with other exponents, each
with its place, input * 32 + output (int32), and value (float32). From the next multiple of 64 bytes on, 96 bytes follow
for each two inputs, whose 64 weights come in the order of packed ones. Of weights i and 32 + i, bits 0 to 10 and 15 of
the uint16 at 2 * i are sign, exponent and mantissa of the first, as in bfloat16 with the smallest exponent taken off;
its bits 11 to 14 are the exponent of the second, and byte 64 + i is the sign (bit 7) and mantissa of the second. The
code of an outlier is 0, the smallest weight of the sixteen exponents; its difference from that is multiplied apart, so
products are those with the very weights up to the rounding of float32.
"""

import torch

from corolla.kernels.build import load_kernels, processor_flags
from corolla.kernels.packing import TILE, pack, packed_shape

_HEAD_BYTES, _OUTLIER_BYTES, _LINE_BYTES, _GROUP_BYTES = 8, 8, 64, 96


def is_compact(dtype: torch.dtype) -> bool:
    """Whether packed weights of this dtype are compact on this machine: where undoing the codes costs no time."""
    return dtype == torch.bfloat16 and "avx512_bf16" in processor_flags()


def compact_shape(out_features: int, in_features: int) -> tuple[int, int]:
    """The shape of a compact weight."""
    head = _HEAD_BYTES + (8 + in_features // 16) * _OUTLIER_BYTES
    lines = -(-head // _LINE_BYTES)
    return -(-out_features // TILE), lines * _LINE_BYTES + -(-in_features // 2) * _GROUP_BYTES


def compact(weight: torch.Tensor) -> torch.Tensor | None:
    """The weight [out_features, in_features] bfloat16 of a linear layer, compact; with experts in front, each.

    None where some tile has more outliers than there is room for, 8 and one per 512 weights: if a weight is zero in
    many places, for example.
    """
    load_kernels()
    if weight.ndim == 3:
        experts = [compact(expert) for expert in weight]
        whole = [expert for expert in experts if expert is not None]
        return torch.stack(whole) if len(whole) == len(experts) else None
    outputs, inputs = weight.shape
    codes: torch.Tensor = torch.ops.corolla.compact_weight(pack(weight), inputs, outputs)
    return codes if codes.numel() else None


def pack_or_compact(weight: torch.Tensor) -> torch.Tensor:
    """The weight as the CPU kernels read it on this machine: compact where that is possible, else packed."""
    codes = compact(weight) if is_compact(weight.dtype) else None
    return pack(weight) if codes is None else codes


def stored_size(out_features: int, in_features: int, dtype: torch.dtype) -> int:
    """Bytes of what `pack_or_compact` makes of a weight with few outliers."""
    if is_compact(dtype):
        return torch.Size(compact_shape(out_features, in_features)).numel()
    return torch.Size(packed_shape(out_features, in_features, dtype)).numel() * dtype.itemsize
