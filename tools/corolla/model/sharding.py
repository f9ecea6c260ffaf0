"""Shards of a block: whole attention heads and equal parts of the layers between, for one device each."""

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from corolla.errors import InvalidValueError
from corolla.model.family import Tensors, family_of
from corolla.model.shape import ModelShape

COLWISE, ROWWISE, GATE_AND_UP, EXPERTS = "colwise", "rowwise", "packed_colwise", "moe_tp_experts"
"""Styles as in the plans of transformers: outputs are split, inputs are split, both halves of the outputs are split,
a module of experts."""
HEADS = "fused_heads"
"""Outputs are split; per key head, they are its queries, its key and its value."""


@dataclass(frozen=True)
class Shard:
    """Number `rank` of `count`."""

    rank: int = 0
    count: int = 1

    def of(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This shard's part of a tensor, a view, that is cut into equal ones."""
        size = tensor.shape[dim] // self.count
        return tensor.narrow(dim, self.rank * size, size)

    @property
    def others(self) -> list["Shard"]:
        """All shards but this one."""
        return [Shard(rank, self.count) for rank in range(self.count) if rank != self.rank]

    def suffix(self) -> str:
        """For names of what each shard has one of; empty for the only shard."""
        return "" if self.count == 1 else f"_{self.rank}of{self.count}"


WHOLE = Shard()


@dataclass(frozen=True)
class HeadShard:
    """The heads that ask and the heads that answer in one shard.

    With more shards than heads that answer, several shards hold the same one.
    """

    heads: range
    kv_heads: range

    @classmethod
    def of(cls, config: PretrainedConfig, shard: Shard) -> "HeadShard":
        """The heads of a shard, for a number of shards that passes `check_shards`."""
        shape = ModelShape.of(config)
        size, kv_size = shape.heads // shard.count, max(1, shape.kv_heads // shard.count)
        first = shard.rank * shape.kv_heads // shard.count
        return cls(range(shard.rank * size, (shard.rank + 1) * size), range(first, first + kv_size))

    @property
    def group(self) -> int:
        """Heads that ask one that answers."""
        return len(self.heads) // len(self.kv_heads)


def block_plan(config: PretrainedConfig) -> dict[str, str]:
    """The style of each module or tensor of a block that is split, by its name in the block."""
    family = family_of(config)
    if family.sharding is not None:
        return family.sharding
    plan: dict[str, str] = config.base_model_tp_plan
    return {name.removeprefix("layers.*."): style for name, style in plan.items()}


def check_shards(config: PretrainedConfig, count: int) -> None:
    """InvalidValueError for a number of shards that the blocks of a model cannot be cut into."""
    if count == 1:
        return
    sizes = _inputs_of_split_layers(config)
    hindrance = _hindrance(config, sizes, count)
    if hindrance:
        possible = [n for n in range(1, ModelShape.of(config).heads + 1) if not _hindrance(config, sizes, n)]
        raise InvalidValueError("tensor_parallel", count, f"{', '.join(map(str, possible))}, as {hindrance}")


def _hindrance(config: PretrainedConfig, sizes: dict[str, int], count: int) -> str | None:
    shape = ModelShape.of(config)
    if count < 1 or shape.heads % count:
        return f"the {shape.heads} attention heads (num_attention_heads) are split evenly"
    if shape.kv_heads % count and count % shape.kv_heads:
        return f"the {shape.kv_heads} key-value heads (num_key_value_heads) are split or repeated evenly"
    return next((f"the {size} inputs of {name} are split evenly" for name, size in sizes.items() if size % count), None)


def _inputs_of_split_layers(config: PretrainedConfig) -> dict[str, int]:
    with torch.device("meta"):
        tensors = family_of(config).block(config, 0).state_dict()
    names = [name for name, style in block_plan(config).items() if style == ROWWISE]
    return {name: (tensors[name] if name in tensors else tensors[f"{name}.weight"]).shape[-1] for name in names}


def shard_tensors(tensors: Tensors, config: PretrainedConfig, shard: Shard) -> Tensors:
    """Of a block's tensors, the parts that a shard holds: views where they lie in one piece.

    The outputs of layers whose inputs are split are to be added up over all shards; the first shard alone has their
    biases, the others zeros.
    """
    if shard.count == 1:
        return tensors
    plan, heads, head_dim = block_plan(config), HeadShard.of(config, shard), ModelShape.of(config).head_dim

    def part(name: str, tensor: torch.Tensor) -> torch.Tensor:
        owner = name.rpartition(".")[0]
        style = plan.get(name) or plan.get(owner)
        if style == COLWISE and owner.endswith(("k_proj", "v_proj")):
            return tensor.narrow(0, heads.kv_heads.start * head_dim, len(heads.kv_heads) * head_dim)
        if style == COLWISE:
            return shard.of(tensor, 0)
        if style == HEADS:
            return _fused_part(tensor, heads, ModelShape.of(config))
        if style == GATE_AND_UP:
            return torch.cat([shard.of(half, 1) for half in tensor.chunk(2, dim=1)], dim=1)
        if style == ROWWISE and name.endswith(".bias"):
            return tensor if shard.rank == 0 else torch.zeros_like(tensor)
        if style == ROWWISE:
            return shard.of(tensor, -1)
        return tensor

    return {name: part(name, tensor) for name, tensor in tensors.items()}


def _fused_part(tensor: torch.Tensor, heads: HeadShard, shape: ModelShape) -> torch.Tensor:
    group = shape.heads // shape.kv_heads
    per_key = tensor.unflatten(0, (shape.kv_heads, group + 2, shape.head_dim))
    per_key = per_key[heads.kv_heads.start : heads.kv_heads.stop]
    queries = per_key[:, :-2].narrow(1, heads.heads.start - heads.kv_heads.start * group, heads.group)
    return torch.cat([queries, per_key[:, -2:]], dim=1).flatten(0, 2)
