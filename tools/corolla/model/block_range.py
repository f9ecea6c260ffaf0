"""A block range: consecutive decoder blocks over mapped weights."""

from collections.abc import Callable
from copy import copy
from typing import Protocol

import torch
from torch import nn

from corolla.checkpoint.parts import block_part
from corolla.checkpoint.prepared import PreparedParts
from corolla.errors import InvalidValueError
from corolla.kernels.build import load_kernels
from corolla.kernels.packed_layers import linear_names
from corolla.model import attention
from corolla.model.family import family_of
from corolla.model.linears import use_linears
from corolla.model.loading import load_module
from corolla.model.lora import GroupedRows, Layer, RowAdapters, adapted, make_adaptable
from corolla.model.rotary import RotaryTable
from corolla.model.shape import ModelShape


class StepCache(Protocol):
    """What a step needs of a KV cache; see corolla.kv.paged_cache.PagedCache."""

    position_ids: torch.Tensor
    attention_mask: torch.Tensor | None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


def _alone(block: nn.Module) -> nn.Module:
    return block


class BlockRange:
    """Blocks [start, stop): hidden states [B, T, H] in, the same shape and dtype out."""

    def __init__(
        self, parts: PreparedParts, blocks: range, parallel: Callable[[nn.Module], nn.Module] = _alone
    ) -> None:
        """`parallel` makes of a block without weights the one of the shard in `parts`; all shards then run together."""
        config = parts.checkpoint.config
        family = family_of(config)
        if not 0 <= blocks.start < blocks.stop <= config.num_hidden_layers:
            raise InvalidValueError(
                "blocks", f"{blocks.start}:{blocks.stop}", f"a range inside 0:{config.num_hidden_layers}"
            )
        config._attn_implementation = attention.NAME
        self.blocks = blocks
        self.context_length = ModelShape.of(config).context_length
        self.device = parts.device
        like = torch.empty(0, device=parts.device, dtype=parts.dtype)
        self.rotary = RotaryTable(family.rotary_embedding(config).to(parts.device), self.context_length, like)
        if parts.packed:
            load_kernels()

        self.adapted_layers: list[tuple[Layer, ...]] = []
        """Of each block."""

        def build(index: int) -> nn.Module:
            block = family.block(config, index)
            names = linear_names(block)
            self.adapted_layers.append(tuple((index, name) for name in names))
            block = use_linears(block, parts.dtype, parts.quant, packed=parts.packed)
            return parallel(make_adaptable(block, index, names))

        self.layers = [
            load_module(lambda i=index: build(i), parts.load(block_part(index)), block_part(index))  # type: ignore[misc]
            for index in blocks
        ]

    def part(self, blocks: range) -> "BlockRange":
        """Some of its blocks, on the same weights."""
        part = copy(self)
        part.blocks = blocks
        own = slice(blocks.start - self.blocks.start, blocks.stop - self.blocks.start)
        part.layers, part.adapted_layers = self.layers[own], self.adapted_layers[own]
        return part

    @torch.inference_mode()
    def forward(self, hidden_states: torch.Tensor, adapters: RowAdapters = ()) -> torch.Tensor:
        """Whole sequences from position 0, no cache. InvalidValueError beyond the model's context."""
        self.check_length(hidden_states.shape[1])
        positions = torch.arange(hidden_states.shape[1], device=self.device)[None]
        with adapted(GroupedRows(adapters) if adapters else None):
            return self._run(hidden_states, positions, None, None)

    @torch.inference_mode()
    def step(self, hidden_states: torch.Tensor, cache: StepCache, adapters: RowAdapters = ()) -> torch.Tensor:
        """New positions of sessions, given by `cache`, which takes their keys and values."""
        with adapted(GroupedRows(adapters) if adapters else None):
            return self._run(hidden_states, cache.position_ids, cache.attention_mask, cache)

    def check_length(self, length: int) -> None:
        """InvalidValueError for an empty sequence or one beyond the model's context."""
        if not 1 <= length <= self.context_length:
            raise InvalidValueError(
                "hidden_states", f"a sequence of {length} positions", f"1 to {self.context_length} positions"
            )

    def _run(
        self,
        hidden_states: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        cache: StepCache | None,
    ) -> torch.Tensor:
        position_embeddings = self.rotary(position_ids)
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=cache,
                position_embeddings=position_embeddings,
            )
        return hidden_states
