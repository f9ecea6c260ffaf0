"""Linear layers whose weights lie in memory in the order in which the CPU kernel reads them.

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


def pack(weight: torch.Tensor) -> torch.Tensor:
    """The weight [out_features, in_features] of a linear layer, packed."""
    outputs, inputs = weight.shape
    group = GROUPS[weight.dtype]
    padded = nn.functional.pad(weight, (0, -inputs % group, 0, -outputs % TILE))
    return padded.view(-1, TILE, padded.shape[1] // group, group).transpose(1, 2).contiguous()


def unpack(packed: torch.Tensor, out_features: int, in_features: int) -> torch.Tensor:
    """The inverse of `pack`."""
    tiles, groups, _, group = packed.shape
    return packed.transpose(1, 2).reshape(tiles * TILE, groups * group)[:out_features, :in_features].contiguous()


class PackedLinear(nn.Module):
    """A linear layer on a packed weight: x [..., in_features] to [..., out_features]."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        """Takes the place of `linear`; its weight must be loaded."""
        super().__init__()
        self.out_features = linear.out_features
        shape = packed_shape(linear.out_features, linear.in_features, dtype)
        self.weight = nn.Parameter(torch.empty(shape, device=linear.weight.device), requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        packed: torch.Tensor = torch.ops.corolla.packed_linear(x, self.weight, self.bias, self.out_features)
        return packed


def linear_names(module: nn.Module) -> list[str]:
    """The names of a module's linear layers."""
    return [name for name, child in module.named_modules() if isinstance(child, nn.Linear)]


def use_packed(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Replaces the linear layers inside a module, whose weights of `dtype` are loaded afterwards."""
    for name in linear_names(module):
        parent, _, child = name.rpartition(".")
        setattr(module.get_submodule(parent), child, PackedLinear(module.get_submodule(name), dtype))  # type: ignore[arg-type]
    return module
