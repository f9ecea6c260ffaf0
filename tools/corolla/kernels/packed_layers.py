"""Linear layers and experts that run on packed weights, for the CPU kernels; see packing.py and compact_packing.py."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from corolla.kernels.compact_packing import compact_shape, is_compact
from corolla.kernels.packing import packed_shape


class PackedWeights(nn.Module):
    """A module some of whose parameters are packed weights of linear layers, loaded after it was made."""

    dtype: torch.dtype
    """Of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self._wide: dict[str, tuple[int, ...]] = {}

    def _add_packed(self, name: str, like: torch.Tensor, dtype: torch.dtype) -> None:
        """For a weight [out_features, in_features] of `dtype`; with a dimension of experts in front, for each."""
        *leading, outputs, inputs = like.shape
        self.dtype = dtype
        wide = self._wide[name] = (*leading, *packed_shape(outputs, inputs, dtype))
        if is_compact(dtype):
            self._set_empty(name, (*leading, *compact_shape(outputs, inputs)), torch.uint8, like.device)
        else:
            self._set_empty(name, wide, dtype, like.device)

    @property
    def wide(self) -> list[str]:
        """The names of its weights that are not compact though others of their dtype are."""
        if not is_compact(self.dtype):
            return []
        return [name for name, shape in self._wide.items() if self.get_parameter(name).shape == shape]

    def widen(self, name: str) -> None:
        """Lets a weight be packed only, with all bits of its dtype."""
        self._set_empty(name, self._wide[name], self.dtype, self.get_parameter(name).device)

    def _set_empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        setattr(self, name, nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False))

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        for name, shape in self._wide.items():
            stored = state_dict.get(prefix + name)
            if stored is not None and stored.shape == shape:
                self.widen(name)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class PackedLinear(PackedWeights):
    """A linear layer on a packed weight: x [..., in_features] to [..., out_features]."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        """Takes the place of `linear`; its weight must be loaded."""
        super().__init__()
        self.out_features = linear.out_features
        self._add_packed("weight", linear.weight, dtype)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        packed: torch.Tensor = torch.ops.corolla.packed_linear(x, self.weight, self.bias, self.out_features)
        return packed


class PackedExperts(PackedWeights):
    """The experts of a mixture on packed weights: each row goes through those that the router chose for it."""

    def __init__(self, experts: nn.Module, dtype: torch.dtype) -> None:
        """Takes the place of `experts`, of transformers; its weights must be loaded."""
        super().__init__()
        self.act_fn: nn.Module = experts.get_submodule("act_fn")
        gate_up, down = experts.get_parameter("gate_up_proj"), experts.get_parameter("down_proj")
        self.gate_up_features, self.down_features = gate_up.shape[1], down.shape[1]
        self._add_packed("gate_up_proj", gate_up, dtype)
        self._add_packed("down_proj", down, dtype)

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


def wide_weights(module: nn.Module) -> list[str]:
    """The names of a module's weights that are not compact though others of their dtype are."""
    packed = {prefix: child for prefix, child in module.named_modules() if isinstance(child, PackedWeights)}
    return [f"{prefix}.{name}" for prefix, child in packed.items() for name in child.wide]


def widen(module: nn.Module, names: list[str]) -> nn.Module:
    """Lets the named weights be packed only."""
    for name in names:
        owner, _, own = name.rpartition(".")
        child = module.get_submodule(owner)
        assert isinstance(child, PackedWeights)
        child.widen(own)
    return module


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
