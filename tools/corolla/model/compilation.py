"""Compiles a block for one batch size, or the head: `python -m corolla.model.compilation SPEC FILE` (ProgramSpec)."""

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim, export
from transformers import PretrainedConfig

from corolla.checkpoint.folder import CheckpointFolder
from corolla.dtypes import dtype_named
from corolla.kernels.packed_layers import PackedLinear, linear_names, widen
from corolla.kv.layout import KVLayout
from corolla.model import attention
from corolla.model.attention import PagedBlock, PagedRows
from corolla.model.family import family_of
from corolla.model.linears import use_linears
from corolla.model.lora import TabledRows, adapted, make_adaptable
from corolla.model.programs import ProgramSpec

OPTIONS = {
    "aot_inductor.compile_wrapper_opt_level": "O0",  # a third of the time of O1, and calls do not get slower
    "cpp.vec_isa_ok": True,  # trying out what the processor says of itself takes longer than compiling
    "cpp.threads": 1,  # what is between our kernels is short, and OpenMP's threads would compete with theirs
}


ANY_ROWS = 23
"""Rows of the example for a program that takes any number. Like those of pages, it occurs nowhere else: it varies."""


class BlockStep(nn.Module):
    """What is compiled: one step of rows that are one position each through one block."""

    def __init__(self, block: nn.Module, adapted_layers: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._adapted_layers = adapted_layers
        self._block = [block]  # in a list, so that its weights are no part of this module
        self._names = [name for name, _ in block.named_parameters()]

    def forward(
        self,
        hidden_states: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        pages: torch.Tensor,
        positions: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        weights: Sequence[torch.Tensor],
        adapters: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states [N, 1, H] to the same; see PagedRows and PagedBlock for the cache.

        `cosines`, `sines` [N, 1, head_dim]; `weights` in the order of the block's `named_parameters`; `adapters`
        is the table of TabledRows.
        """
        cache = PagedBlock(keys, values)
        with adapted(None if adapters is None else TabledRows(self._adapted_layers, adapters)):
            output: torch.Tensor = torch.func.functional_call(
                self._block[0],
                dict(zip(self._names, weights, strict=True)),
                (hidden_states,),
                {
                    "position_ids": positions[:, None],
                    "position_embeddings": (cosines, sines),
                    "past_key_values": cache,
                    "rows": PagedRows(pages, positions),
                    "block": cache,
                },
            )
        return output


class HeadStep(nn.Module):
    """What is compiled of the head: its final norm, the projection and the greatest logit."""

    def __init__(self, norm: nn.Module, vocabulary: int) -> None:
        super().__init__()
        self._norm = [norm]  # in a list, so that its weights are no part of this module
        self._names = [name for name, _ in norm.named_parameters()]
        self._vocabulary = vocabulary

    def forward(
        self, hidden_states: torch.Tensor, projection: torch.Tensor, weights: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [N, 1, H] to logits [N, V] float32 and the number of the greatest [N] int64.

        `projection` is packed; `weights` are the norm's, in the order of its `named_parameters`.
        """
        normed = torch.func.functional_call(
            self._norm[0], dict(zip(self._names, weights, strict=True)), (hidden_states,)
        )
        logits = torch.ops.corolla.packed_linear(normed, projection, None, self._vocabulary)[:, 0].float()
        return logits, logits.argmax(-1)


@torch.no_grad()
def compile_program(spec: ProgramSpec, target: Path) -> None:
    """Writes the program that `spec` describes; no weight is read."""
    config = CheckpointFolder(Path(spec.checkpoint)).config
    config._attn_implementation = attention.NAME
    step, example, shapes = _head(config, spec) if spec.block is None else _block(config, spec, spec.block)
    program = export(step, example, dynamic_shapes=shapes, strict=False)
    torch._inductor.aoti_compile_and_package(program, package_path=str(target), inductor_configs=OPTIONS)


Traced = tuple[nn.Module, tuple[Any, ...], tuple[Any, ...]]
"""A module, an example of its inputs, and which of their dimensions vary."""


def _head(config: PretrainedConfig, spec: ProgramSpec) -> Traced:
    dtype, final_norm = dtype_named(spec.dtype).torch, family_of(config).final_norm
    norm = _without_memory(dtype, lambda: final_norm(config).eval())
    hidden_states = torch.zeros(ANY_ROWS, 1, config.hidden_size, dtype=dtype)
    projection = torch.zeros_like(_projection(config, dtype, wide="projection" in spec.wide), device="cpu")
    weights = [torch.zeros_like(weight, device="cpu") for weight in norm.parameters()]
    example = (hidden_states, projection, weights)
    return HeadStep(norm, config.vocab_size), example, ({0: Dim.DYNAMIC}, None, [None] * len(weights))


def _projection(config: PretrainedConfig, dtype: torch.dtype, *, wide: bool) -> torch.Tensor:
    with torch.device("meta"):
        layer = PackedLinear(nn.Linear(config.hidden_size, config.vocab_size, bias=False), dtype)
    if wide:
        layer.widen("weight")
    return layer.get_parameter("weight")


def _block(config: PretrainedConfig, spec: ProgramSpec, index: int) -> Traced:
    dtype = dtype_named(spec.dtype).torch
    block, layers = _block_module(config, spec, index)
    rows = spec.rows or ANY_ROWS
    rotary = family_of(config).rotary_embedding(config)
    cosines, sines = rotary(torch.empty(0, dtype=dtype), torch.zeros(rows, 1, dtype=torch.int64))
    layout = KVLayout.of(config, spec.dtype, spec.page_size, spec.page_size)
    cache = (11, spec.page_size, layout.kv_heads, layout.head_dim)
    weights = [torch.zeros_like(weight, device="cpu") for weight in block.parameters()]
    example: tuple[Any, ...] = (
        torch.zeros(rows, 1, config.hidden_size, dtype=dtype),
        cosines,
        sines,
        torch.zeros(rows, 7, dtype=torch.int32),
        torch.zeros(rows, dtype=torch.int64),
        torch.zeros(cache, dtype=dtype),
        torch.zeros(cache, dtype=dtype),
        weights,
    )
    free = {0: Dim.DYNAMIC}
    of_rows = None if spec.rows else free
    pages = {1: Dim.DYNAMIC} if spec.rows else {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
    shapes: tuple[Any, ...] = (of_rows, of_rows, of_rows, pages, of_rows, free, free, [None] * len(weights))
    if spec.adapters:
        example += (torch.zeros(len(layers), rows, 3, dtype=torch.int64),)
        shapes += (of_rows and {1: Dim.DYNAMIC},)
    return BlockStep(block, layers), example, shapes


def _block_module(config: PretrainedConfig, spec: ProgramSpec, index: int) -> tuple[nn.Module, tuple[str, ...]]:
    """A block, its parameters in the dtypes in which they are stored; its layers that are adapted."""
    dtype = dtype_named(spec.dtype).torch
    plain = _without_memory(dtype, lambda: family_of(config).block(config, index))
    layers = tuple(linear_names(plain)) if spec.adapters else ()
    block = _without_memory(dtype, lambda: widen(use_linears(plain, dtype, spec.quant, packed=True), spec.wide))
    return make_adaptable(block, index, layers).eval(), layers


def _without_memory(dtype: torch.dtype, build: Callable[[], nn.Module]) -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            return build()
    finally:
        torch.set_default_dtype(before)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=FutureWarning)
    with tempfile.TemporaryDirectory(prefix="corolla-") as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        compile_program(ProgramSpec(**json.loads(sys.argv[1])), Path(sys.argv[2]))
