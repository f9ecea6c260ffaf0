"""Quantized weights in the order in which the CPU kernels read them; see packing.py.

INT8 is one byte per weight, [tiles, ceil(inputs / group), 32, group], with scales [tiles, 32] float32. NF4 is half a
byte: of each 32 weights in that order, byte i holds the number of weight i in its lower half and that of weight 16 + i
in its upper one, [tiles, inputs / group, 16 * group], with scales [tiles, inputs / span, 32] float32. A scale is good
for 64 weights in the order of the checkpoint, which need not begin with a row: `span` inputs never have two of them.
"""

from math import gcd

import torch
from torch import nn

from corolla.errors import CheckpointError
from corolla.kernels.packing import GROUPS, TILE, pack, packed_shape

NF4_BLOCK = 64
"""Weights per scale."""


def int8_shapes(out_features: int, in_features: int, dtype: torch.dtype) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of a packed INT8 weight and its scales."""
    shape = packed_shape(out_features, in_features, dtype)
    return shape, (shape[0], TILE)


def nf4_shapes(out_features: int, in_features: int, dtype: torch.dtype) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of a packed NF4 weight and its scales."""
    tiles, groups, _, group = packed_shape(out_features, in_features, dtype)
    return (tiles, groups, TILE // 2 * group), (tiles, in_features // gcd(in_features, NF4_BLOCK), TILE)


def pack_int8(numbers: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Numbers [out_features, in_features] int8 and one scale [out_features] each, packed for inputs of `dtype`."""
    padded = nn.functional.pad(scales, (0, -len(scales) % TILE))
    return {"weight": pack(numbers, dtype), "scales": padded.view(-1, TILE)}


def pack_nf4(numbers: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Numbers 0 to 15 [out_features, in_features] uint8 and scales [blocks] float32, packed for inputs of `dtype`.

    CheckpointError for an odd number of inputs, where a pair of bfloat16 would have two scales.
    """
    outputs, inputs = numbers.shape
    if inputs % GROUPS[dtype]:
        raise CheckpointError(
            f"a linear layer with {inputs} inputs cannot run in nf4 on CPUs; write the repository with "
            "--decoder eager or --quant int8 of an unquantized checkpoint"
        )
    span = gcd(inputs, NF4_BLOCK)
    runs = pack(numbers, dtype).view(-1, 2, TILE // 2)
    first = torch.arange(outputs)[:, None] * inputs + torch.arange(0, inputs, span)
    padded = nn.functional.pad(scales[first // NF4_BLOCK], (0, 0, 0, -outputs % TILE))
    shape, _ = nf4_shapes(outputs, inputs, dtype)
    return {
        "weight": (runs[:, 0] | runs[:, 1] << 4).view(shape),
        "scales": padded.view(-1, TILE, inputs // span).transpose(1, 2).contiguous(),
    }


class _PackedQuantizedLinear(nn.Module):
    """x [..., in_features] to [..., out_features] on a packed weight and its scales; sums are float32."""

    def __init__(
        self, linear: nn.Linear, numbers: torch.dtype, shapes: tuple[tuple[int, ...], tuple[int, ...]], operator: str
    ) -> None:
        super().__init__()
        self.out_features = linear.out_features
        self.weight = _empty(shapes[0], numbers, linear)
        self.scales = _empty(shapes[1], torch.float32, linear)
        self.bias = linear.bias
        self._operator = operator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        run = getattr(torch.ops.corolla, self._operator)
        outputs: torch.Tensor = run(x, self.weight, self.scales, self.bias, self.out_features)
        return outputs


class PackedInt8Linear(_PackedQuantizedLinear):
    """A linear layer on a packed INT8 weight."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        """Takes the place of `linear`, for inputs of `dtype`; its weight must be loaded."""
        shapes = int8_shapes(linear.out_features, linear.in_features, dtype)
        super().__init__(linear, torch.int8, shapes, "packed_linear_int8")


class PackedNF4Linear(_PackedQuantizedLinear):
    """A linear layer on a packed NF4 weight."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        """Takes the place of `linear`, for inputs of `dtype`; its weight must be loaded."""
        shapes = nf4_shapes(linear.out_features, linear.in_features, dtype)
        super().__init__(linear, torch.uint8, shapes, "packed_linear_nf4")


def _empty(shape: tuple[int, ...], dtype: torch.dtype, like: nn.Linear) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=like.weight.device), requires_grad=False)
