"""Low-rank adapters: y = W x + B (A x), by row, in the linear layers of blocks.

Which rows use which adapters is told by a context around the forward of a block. Without one, layers compute as ever.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn

import corolla.kernels.ops  # noqa: F401  (defines torch.ops.corolla)

Layer = tuple[int, str]
"""A linear layer: its block, its name inside the block."""


@dataclass(frozen=True, eq=False)
class Adapter:
    """By layer, A [rank, inputs] and B [rank, outputs], float32, on the device of the blocks."""

    weights: Mapping[Layer, tuple[torch.Tensor, torch.Tensor]]
    tables: dict[tuple[Layer, ...], torch.Tensor] = field(default_factory=dict)

    def table(self, layers: tuple[Layer, ...]) -> torch.Tensor:
        """For lora_add: [layers, 3] int64, addresses of A and B and the rank, zeros where a layer is not adapted."""
        if layers not in self.tables:
            entries = [self.weights.get(layer) for layer in layers]
            rows = [[0, 0, 0] if pair is None else [pair[0].data_ptr(), pair[1].data_ptr(), len(pair[0])]
                    for pair in entries]  # fmt: skip
            self.tables[layers] = torch.tensor(rows, dtype=torch.int64).view(-1, 3)
        return self.tables[layers]


RowAdapters = Sequence[Adapter | None]
"""The adapter of each row, or of none; empty where no row has one."""


class Additions(Protocol):
    """What adapters add in one forward."""

    def add(self, layer: Layer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The adapted output of a layer that makes `y` [..., outputs] of `x` [..., inputs]."""


_current: ContextVar[Additions | None] = ContextVar("additions", default=None)


@contextmanager
def adapted(additions: Additions | None) -> Iterator[None]:
    """Adapts the layers of blocks that run inside."""
    token = _current.set(additions)
    try:
        yield
    finally:
        _current.reset(token)


def make_adaptable(block: nn.Module, index: int, names: Sequence[str]) -> nn.Module:
    """Lets the named linear layers of a block, of whatever class by now, take part; see `adapted`."""
    for name in names:
        block.get_submodule(name).register_forward_hook(_Hook((index, name)))
    return block


class _Hook:
    def __init__(self, layer: Layer) -> None:
        self._layer = layer

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor | None:
        additions = _current.get()
        return None if additions is None else additions.add(self._layer, inputs[0], output)


class GroupedRows:
    """Rows of any length, those of one adapter at once; the first dimension of all inputs is rows."""

    def __init__(self, adapters: RowAdapters) -> None:
        self._rows = len(adapters)
        self._groups = [
            (adapter, torch.tensor([row for row, own in enumerate(adapters) if own is adapter]))
            for adapter in dict.fromkeys(adapters)
            if adapter is not None
        ]

    def add(self, layer: Layer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """See Additions."""
        output = None
        for adapter, rows in self._groups:
            pair = adapter.weights.get(layer)
            if pair is None:
                continue
            if output is None:
                x = x.reshape(self._rows, -1, x.shape[-1])
                output = y.clone(memory_format=torch.contiguous_format).view(self._rows, -1, y.shape[-1])
            first, second = pair
            added = x[rows].float() @ first.T @ second
            output[rows] = (output[rows].float() + added).to(y.dtype)
        return y if output is None else output.view(y.shape)


@dataclass(frozen=True)
class TabledRows:
    """Rows of one position in a program that is being compiled: a block's `layers` and their `table`.

    `table` [layers, N, 3]; see Adapter.table.
    """

    layers: tuple[str, ...]
    table: torch.Tensor

    def add(self, layer: Layer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """See Additions."""
        output: torch.Tensor = torch.ops.corolla.lora_add(y, x, self.table, self.layers.index(layer[1]))
        return output


class AdapterTables:
    """Makes the tables of compiled programs, one per block."""

    def __init__(self, layers: Sequence[tuple[Layer, ...]]) -> None:
        """`layers` of each block."""
        self._counts = [len(own) for own in layers]
        self._layers = tuple(layer for own in layers for layer in own)

    def of_rows(self, adapters: RowAdapters) -> tuple[torch.Tensor, ...]:
        """For each block [layers, N, 3]; the adapters must live as long as these are used."""
        distinct = list(dict.fromkeys(adapters))
        number = {adapter: index for index, adapter in enumerate(distinct)}
        tables = torch.stack([self._none if a is None else a.table(self._layers) for a in distinct], dim=1)
        return tables[:, [number[adapter] for adapter in adapters]].split(self._counts)

    @cached_property
    def _none(self) -> torch.Tensor:
        return torch.zeros(len(self._layers), 3, dtype=torch.int64)
