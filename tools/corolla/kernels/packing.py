"""Linear layers and experts whose weights lie in memory in the order in which the CPU kernel reads them.

A packed weight is [tiles, ceil(inputs / group), 32, group]: 32 output features a tile, `group` neighbouring inputs of
a feature side by side (2 for bfloat16, as the AVX512_BF16 dot product takes them; 1 for float32). A thread reads its
tiles from end to end, so every processor's prefetcher follows. Missing features and inputs are zeros.
"""

from collections.abc import Callable

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


class PackedLinear(nn.Module):
    """A linear layer on a packed weight: x [..., in_features] to [..., out_features]."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        """Takes the place of `linear`; its weight must be loaded."""
        super().__init__()
        self.out_features = linear.out_features
        shape = packed_shape(linear.out_features, linear.in_features, dtype)
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=linear.weight.device), requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        packed: torch.Tensor = torch.ops.corolla.packed_linear(x, self.weight, self.bias, self.out_features)
        return packed


class PackedExperts(nn.Module):
    """The experts of a mixture on packed weights: each row goes through those that the router chose for it."""

    def __init__(self, experts: nn.Module, dtype: torch.dtype) -> None:
        """Takes the place of `experts`, of transformers; its weights must be loaded."""
        super().__init__()
        self.act_fn: nn.Module = experts.get_submodule("act_fn")
        gate_up, down = experts.get_parameter("gate_up_proj"), experts.get_parameter("down_proj")
        self.gate_up_features, self.down_features = gate_up.shape[1], down.shape[1]
        self.gate_up_proj = _empty_experts(gate_up, dtype)
        self.down_proj = _empty_experts(down, dtype)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states [N, H] to the same; experts [N, K] int64 and their weights [N, K] in the sum."""
        rows, chosen = top_k_index.shape
        experts = top_k_index.flatten()
        linear = torch.ops.corolla.expert_linear
        inputs = hidden_states.repeat_interleave(chosen, 0)
        gate, up = linear(inputs, self.gate_up_proj, experts, self.gate_up_features).chunk(2, dim=-1)
        outputs: torch.Tensor = linear(self.act_fn(gate) * up, self.down_proj, experts, self.down_features)
        weighted = outputs * top_k_weights.reshape(-1, 1)
        return weighted.view(rows, chosen, -1).sum(1).to(hidden_states.dtype)


def _empty_experts(plain: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    experts, outputs, inputs = plain.shape
    shape = (experts, *packed_shape(outputs, inputs, dtype))
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=plain.device), requires_grad=False)


def linear_layers(module: nn.Module) -> dict[str, nn.Linear]:
    """A module's linear layers, before they are replaced, by their names."""
    return {name: child for name, child in module.named_modules() if isinstance(child, nn.Linear)}


def linear_names(module: nn.Module) -> list[str]:
    """The names of a module's linear layers."""
    return list(linear_layers(module))


def expert_names(module: nn.Module) -> list[str]:
    """The names of the weights of a module's experts."""
    return [name for name, weight in module.named_parameters() if weight.ndim == 3]


def replace_linears(module: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    """Replaces the linear layers inside a module by what `make` makes of each; weights are loaded afterwards."""
    for name, linear in linear_layers(module).items():
        _replace(module, name, make(linear))
    return module


def use_packed_experts(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Replaces the experts inside a module, whose weights of `dtype` are loaded afterwards."""
    for owner in {name.rpartition(".")[0] for name in expert_names(module)}:
        _replace(module, owner, PackedExperts(module.get_submodule(owner), dtype))
    return module


def _replace(module: nn.Module, name: str, child: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(module.get_submodule(parent), own, child)
