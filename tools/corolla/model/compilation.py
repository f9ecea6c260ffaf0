"""Compiles one block for one batch size: `python -m corolla.model.compilation SPEC FILE`; see ProgramSpec."""

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim, export
from transformers import PretrainedConfig

from corolla.checkpoint.folder import CheckpointFolder
from corolla.dtypes import dtype_named
from corolla.kernels.packing import linear_names
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
        keys: torch.Tensor,
        values: torch.Tensor,
        pages: torch.Tensor,
        positions: torch.Tensor,
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


@torch.no_grad()
def compile_block(spec: ProgramSpec, target: Path) -> None:
    """Writes the program that `spec` describes; no weight is read."""
    config = CheckpointFolder(Path(spec.checkpoint)).config
    config._attn_implementation = attention.NAME
    dtype = dtype_named(spec.dtype).torch
    block, layers = _block(config, spec)
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
        torch.zeros(cache, dtype=dtype),
        torch.zeros(cache, dtype=dtype),
        torch.zeros(rows, 7, dtype=torch.int32),
        torch.zeros(rows, dtype=torch.int64),
        weights,
    )
    free = {0: Dim.DYNAMIC}
    of_rows = None if spec.rows else free
    pages = {1: Dim.DYNAMIC} if spec.rows else {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
    shapes: tuple[Any, ...] = (of_rows, of_rows, of_rows, free, free, pages, of_rows, [None] * len(weights))
    if spec.adapters:
        example += (torch.zeros(len(layers), rows, 3, dtype=torch.int64),)
        shapes += (of_rows and {1: Dim.DYNAMIC},)
    program = export(BlockStep(block, layers), example, dynamic_shapes=shapes, strict=False)
    torch._inductor.aoti_compile_and_package(program, package_path=str(target), inductor_configs=OPTIONS)


def _block(config: PretrainedConfig, spec: ProgramSpec) -> tuple[nn.Module, tuple[str, ...]]:
    """A block without memory, its parameters in the dtypes in which they are stored; its layers that are adapted."""
    before, dtype = torch.get_default_dtype(), dtype_named(spec.dtype).torch
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            plain = family_of(config).block(config, spec.block)
            layers = tuple(linear_names(plain)) if spec.adapters else ()
            block = use_linears(plain, dtype, spec.quant, packed=True)
            return make_adaptable(block, spec.block, layers).eval(), layers
    finally:
        torch.set_default_dtype(before)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=FutureWarning)
    with tempfile.TemporaryDirectory(prefix="corolla-") as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        compile_block(ProgramSpec(**json.loads(sys.argv[1])), Path(sys.argv[2]))
