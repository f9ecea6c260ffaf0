"""Compiled decoders: one step of many rows, on the smallest compiled batch size that holds them."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from typing import Protocol

import torch
from torch import nn

from corolla.checkpoint.prepared import PreparedParts
from corolla.kv.arena import KVArena
from corolla.model.attention import PagedBlock, PagedRows
from corolla.model.batch_sizes import size_for
from corolla.model.block_range import BlockRange
from corolla.model.graphs import GraphedChain
from corolla.model.later import Later
from corolla.model.lora import AdapterTables, GroupedRows, RowAdapters, adapted
from corolla.model.program_chain import ProgramChain
from corolla.model.programs import Programs

ANY = 0
"""Any number of rows; see ProgramSpec."""


class ChainStep(Protocol):
    """One step of a fixed number of rows through all blocks: hidden states [N, 1, H] to the same.

    `cosines` and `sines` are [N, 1, head_dim].
    """

    def __call__(
        self, hidden_states: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, rows: PagedRows
    ) -> torch.Tensor: ...


class AdaptedStep(Protocol):
    """Like ChainStep, with adapters of rows, for two rows or more."""

    def __call__(
        self,
        hidden_states: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        rows: PagedRows,
        adapters: RowAdapters,
    ) -> torch.Tensor: ...


class Decoders:
    """A chain compiled for each of `sizes`, descending. Used by one thread at a time.

    `rows` and `padding` count, per size, the rows that ran and those that were padded. Prompts of more rows than
    the largest size run on `prompts`, which takes any number: they are bound by arithmetic, not by overhead. So do
    steps in which a row has an adapter, on `adapted_step`; they are not counted.
    """

    def __init__(
        self,
        chain: ChainStep,
        prompts: ChainStep,
        adapted_step: AdaptedStep,
        blocks: BlockRange,
        sizes: Sequence[int],
        make_part: "Callable[[BlockRange], Decoders]",
    ) -> None:
        """`make_part` gives the decoders of a part of `blocks`."""
        self.sizes = tuple(sizes)
        self.rows: Counter[int] = Counter()
        self.padding: Counter[int] = Counter()
        self._chain = chain
        self._prompts = prompts
        self._adapted_step = adapted_step
        self._rotary = blocks.rotary
        self._make_part = make_part

    def part(self, blocks: BlockRange) -> "Decoders":
        """Those of a part of the blocks, on the same programs; rows are counted together."""
        part = self._make_part(blocks)
        part.rows, part.padding = self.rows, self.padding
        return part

    @torch.inference_mode()
    def step(self, hidden_states: torch.Tensor, rows: PagedRows) -> torch.Tensor:
        """One position per row: hidden states [N, 1, H] to the same. More rows than the largest size are split."""
        largest = self.sizes[0]
        pieces = zip(
            hidden_states.split(largest), rows.pages.split(largest), rows.positions.split(largest), strict=True
        )
        outputs = [self._step(piece, PagedRows(pages, positions)) for piece, pages, positions in pieces]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    @torch.inference_mode()
    def prompt(self, hidden_states: torch.Tensor, rows: PagedRows) -> torch.Tensor:
        """Like `step`, for rows of which several belong to one session; they are never split."""
        if len(hidden_states) <= self.sizes[0]:
            return self._step(hidden_states, rows)
        cosines, sines = self._rotary(rows.positions[:, None])
        return self._prompts(hidden_states, cosines, sines, rows)

    @torch.inference_mode()
    def step_adapted(self, hidden_states: torch.Tensor, rows: PagedRows, adapters: RowAdapters) -> torch.Tensor:
        """Like `prompt`, with an adapter for some of the rows at least."""
        count = len(hidden_states)
        missing = max(0, 2 - count)
        hidden_states, rows = _padded(hidden_states, rows, missing)
        cosines, sines = self._rotary(rows.positions[:, None])
        return self._adapted_step(hidden_states, cosines, sines, rows, [*adapters, *[None] * missing])[:count]

    def _step(self, hidden_states: torch.Tensor, rows: PagedRows) -> torch.Tensor:
        count = len(hidden_states)
        size = size_for(count, self.sizes)
        missing = size - count
        self.rows[size] += count
        self.padding[size] += missing
        hidden_states, rows = _padded(hidden_states, rows, missing)
        cosines, sines = self._rotary(rows.positions[:, None])
        return self._chain(hidden_states, cosines, sines, rows)[:count]


def _padded(hidden_states: torch.Tensor, rows: PagedRows, missing: int) -> tuple[torch.Tensor, PagedRows]:
    """With so many rows of padding behind."""
    if not missing:
        return hidden_states, rows
    pages = nn.functional.pad(rows.pages, (0, 0, 0, missing))
    positions = nn.functional.pad(rows.positions, (0, missing), value=-1)
    return nn.functional.pad(hidden_states, (0, 0, 0, 0, 0, missing)), PagedRows(pages, positions)


class CompiledChain:
    """On CPUs: programs of inductor, one per batch size and one for any other number of rows, run block by block."""

    def __init__(self, parts: PreparedParts, blocks: BlockRange, arena: KVArena, sizes: Sequence[int]) -> None:
        """Compiles what the disk cache does not hold yet, one size per processor at a time, some 10 s each."""
        programs, page_size = Programs(parts), arena.layout.page_size
        self._blocks = blocks.blocks
        self._part = range(len(blocks.layers))
        self._tables = AdapterTables(blocks.adapted_layers)
        self._eager = EagerChain(blocks, arena)
        caches = [paged_block(arena, index) for index in blocks.blocks]
        own = [
            [cache.keys, cache.values, *layer.parameters()] for cache, layer in zip(caches, blocks.layers, strict=True)
        ]

        def chain(size: int, *, adapters: bool = False) -> ProgramChain:
            layers = zip(blocks.layers, blocks.blocks, strict=True)
            files = [programs.block(layer, index, size, page_size, adapters=adapters) for layer, index in layers]
            return ProgramChain(files, own)

        kinds = [*sizes, ANY]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            self._chains = dict(zip(kinds, pool.map(chain, kinds), strict=True))
        self._adapted = Later(lambda: chain(ANY, adapters=True), "rows with adapters run without a compiled decoder")

    def part(self, blocks: BlockRange) -> "CompiledChain":
        """Some of the blocks, with the programs that are there."""
        part = copy(self)
        start = blocks.blocks.start - self._blocks.start + self._part.start
        part._blocks, part._part = blocks.blocks, range(start, start + len(blocks.blocks))
        part._tables = AdapterTables(blocks.adapted_layers)
        part._eager = self._eager.part(slice(part._part.start - self._part.start, part._part.stop - self._part.start))
        return part

    def __call__(
        self, hidden_states: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, rows: PagedRows
    ) -> torch.Tensor:
        """See ChainStep."""
        chain = self._chains.get(len(hidden_states), self._chains[ANY])
        return chain(hidden_states, (cosines, sines, rows.pages, rows.positions), part=self._part)[0]

    def step_adapted(
        self,
        hidden_states: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        rows: PagedRows,
        adapters: RowAdapters,
    ) -> torch.Tensor:
        """See AdaptedStep. On programs for any number of rows; until they are compiled, on the modules themselves."""
        chain = self._adapted.get()
        if chain is None:
            return self._eager.step_adapted(hidden_states, cosines, sines, rows, adapters)
        shared = (cosines, sines, rows.pages, rows.positions)
        return chain(hidden_states, shared, self._tables.of_rows(adapters), self._part)[0]

    def compile_adapted(self) -> None:
        """Compiles what `step_adapted` needs now, and waits for it."""
        self._adapted.wait()


class EagerChain:
    """The modules themselves, for any number of rows: on other devices, where graphs are captured from it, and for
    rows with adapters until their programs are compiled."""

    def __init__(self, blocks: BlockRange, arena: KVArena) -> None:
        self._layers = blocks.layers
        self._caches = [paged_block(arena, index) for index in blocks.blocks]

    def part(self, own: slice) -> "EagerChain":
        """Some of the blocks."""
        part = copy(self)
        part._layers, part._caches = self._layers[own], self._caches[own]
        return part

    def __call__(
        self, hidden_states: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, rows: PagedRows
    ) -> torch.Tensor:
        """See ChainStep."""
        for layer, cache in zip(self._layers, self._caches, strict=True):
            hidden_states = layer(
                hidden_states,
                position_ids=rows.positions[:, None],
                position_embeddings=(cosines, sines),
                past_key_values=cache,
                rows=rows,
                block=cache,
            )
        return hidden_states

    def step_adapted(
        self,
        hidden_states: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        rows: PagedRows,
        adapters: RowAdapters,
    ) -> torch.Tensor:
        """See AdaptedStep."""
        with adapted(GroupedRows(adapters)):
            return self(hidden_states, cosines, sines, rows)


def open_decoders(
    parts: PreparedParts, blocks: BlockRange, arena: KVArena, sizes: Sequence[int], *, adapters: bool = False
) -> Decoders | None:
    """The decoders of a process; None for no sizes, that is, with the eager decoder.

    Those for rows with `adapters` are compiled now, else when there are any.
    """
    if not sizes:
        return None
    if parts.packed:
        compiled = CompiledChain(parts, blocks, arena, sizes)
        if adapters:
            compiled.compile_adapted()
        return _compiled_decoders(compiled, blocks, sizes)
    return _graphed_decoders(blocks, arena, sizes)


def _compiled_decoders(chain: CompiledChain, blocks: BlockRange, sizes: Sequence[int]) -> Decoders:
    def part(own: BlockRange) -> Decoders:
        return _compiled_decoders(chain.part(own), own, sizes)

    return Decoders(chain, chain, chain.step_adapted, blocks, sizes, part)


def _graphed_decoders(blocks: BlockRange, arena: KVArena, sizes: Sequence[int]) -> Decoders:
    eager = EagerChain(blocks, arena)
    return Decoders(
        GraphedChain(eager), eager, eager.step_adapted, blocks, sizes, lambda own: _graphed_decoders(own, arena, sizes)
    )


def paged_block(arena: KVArena, block: int) -> PagedBlock:
    """A block's part of the arena, page by page."""
    cache, layout = arena[block], arena.layout
    shape = (layout.pages, layout.page_size, layout.kv_heads, layout.head_dim)
    return PagedBlock(cache.keys.view(shape), cache.values.view(shape))
