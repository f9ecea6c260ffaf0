"""Decoder layers compiled ahead of time by inductor, one program per batch size, stored in the disk cache.

A program takes a block's weights as inputs: one is compiled and serves all blocks that are alike, in every process.
"""

import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol
from unittest import mock

import torch
import transformers
from torch import nn
from torch.export import Dim, export
from transformers import PretrainedConfig

from corolla.checkpoint.disk_cache import DiskCache
from corolla.kernels.build import compiler, load_kernels, machine_key
from corolla.model.attention import PagedBlock, PagedRows

logger = logging.getLogger(__name__)

FORMAT = 1
OPTIONS = {
    "aot_inductor.compile_wrapper_opt_level": "O0",  # a third of the time, and calls do not get slower
    "compile_threads": 1,
}


class BlockProgram(Protocol):
    """A compiled block: see BlockStep.forward; takes and gives lists of tensors."""

    def __call__(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]: ...


class BlockStep(nn.Module):
    """What is compiled: one step of rows that are one position each through one block."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
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
    ) -> torch.Tensor:
        """Hidden states [N, 1, H] to the same; see PagedRows and PagedBlock for the cache.

        `cosines`, `sines` [N, 1, head_dim]; `weights` in the order of the block's `named_parameters`.
        """
        cache = PagedBlock(keys, values)
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


class BlockPrograms:
    """The programs of one model in this process."""

    def __init__(self, config: PretrainedConfig, disk: DiskCache) -> None:
        load_kernels()
        self._config = config
        self._config_key = json.dumps(config.to_dict() | {"_name_or_path": ""}, sort_keys=True, default=str)
        self._disk = disk
        self._loaded: dict[str, BlockProgram] = {}

    def get(self, block: nn.Module, cosines: torch.Tensor, cache: PagedBlock, rows: int) -> BlockProgram:
        """The program for `rows` rows of a block such as `block`, compiled if it is not in the disk cache yet.

        `cosines` [1, head_dim] and `cache` show shapes and dtypes. EnvironmentProblemError without a C++ compiler.
        """
        key = self._key(block, rows)
        if key not in self._loaded:
            file = self._disk.file(
                f"programs/{key}.pt2", lambda target: _compile(block, self._config, cosines, cache, rows, target)
            )
            package = torch._inductor.aoti_load_package(str(file))
            self._loaded[key] = package.loader.run
        return self._loaded[key]

    def _key(self, block: nn.Module, rows: int) -> str:
        weights = [(name, tuple(weight.shape), str(weight.dtype)) for name, weight in block.named_parameters()]
        parts = (FORMAT, OPTIONS, machine_key(), transformers.__version__, torch.get_num_threads(), rows, weights)
        return hashlib.sha256(f"{parts}{self._config_key}".encode()).hexdigest()[:24]


@torch.no_grad()
def _compile(
    block: nn.Module, config: PretrainedConfig, cosines: torch.Tensor, cache: PagedBlock, rows: int, target: Path
) -> None:
    compiler()
    began = time.monotonic()
    example = (
        cosines.new_zeros(rows, 1, config.hidden_size),
        cosines.expand(rows, 1, -1).clone(),
        cosines.expand(rows, 1, -1).clone(),
        cache.keys.new_zeros(11, *cache.keys.shape[1:]),  # numbers that occur nowhere else, as they vary
        cache.values.new_zeros(11, *cache.values.shape[1:]),
        torch.zeros(rows, 7, dtype=torch.int32),
        torch.zeros(rows, dtype=torch.int64),
        [weight.detach() for weight in block.parameters()],
    )
    free: dict[int, object] = {0: Dim.DYNAMIC}
    shapes = (None, None, None, free, free, {1: Dim.DYNAMIC}, None, [None] * len(example[-1]))
    program = export(BlockStep(block), example, dynamic_shapes=shapes, strict=False)
    with (
        tempfile.TemporaryDirectory(prefix="corolla-") as folder,
        mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": folder}),
    ):
        torch._inductor.aoti_compile_and_package(program, package_path=str(target), inductor_configs=dict(OPTIONS))
    logger.info("compiled the decoder for %d rows in %.0f s", rows, time.monotonic() - began)
