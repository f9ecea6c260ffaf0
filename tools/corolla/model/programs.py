"""Decoder layers compiled ahead of time by inductor, one program per batch size, stored in the disk cache.

A program takes a block's weights as inputs: one is compiled and serves all blocks that are alike, in every process.
"""

import hashlib
import json
import logging
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import torch
import transformers
from torch import nn

from corolla.checkpoint.prepared import PreparedParts
from corolla.errors import EnvironmentProblemError
from corolla.kernels.build import compiler, load_kernels, machine_key

logger = logging.getLogger(__name__)

FORMAT = 4


class BlockProgram(Protocol):
    """A compiled block: the inputs of corolla.model.compilation.BlockStep, as a flat list, to its output."""

    def __call__(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]: ...


@dataclass(frozen=True)
class ProgramSpec:
    """What to compile: one block of a checkpoint in a dtype, for `rows` rows and pages of `page_size` positions.

    0 `rows` are any number of them. `quant` is how linear layers are quantized. With `adapters`, rows may be adapted;
    see corolla.model.lora.
    """

    checkpoint: str
    block: int
    dtype: str
    quant: str
    rows: int
    page_size: int
    adapters: bool = False


class BlockPrograms:
    """The programs of one model in this process."""

    def __init__(self, parts: PreparedParts, page_size: int) -> None:
        load_kernels()
        config = parts.checkpoint.config
        self._checkpoint = parts.checkpoint.path
        self._dtype = str(parts.dtype).removeprefix("torch.")
        self._quant = parts.quant
        self._config_key = json.dumps(config.to_dict() | {"_name_or_path": ""}, sort_keys=True, default=str)
        self._layer_types = getattr(config, "layer_types", None)
        self._page_size = page_size
        self._disk = parts.cache
        self._loaded: dict[str, BlockProgram] = {}

    def get(self, block: nn.Module, index: int, rows: int, *, adapters: bool = False) -> BlockProgram:
        """The program for `rows` rows (0: any number) of block `index`, compiled if it is not in the disk cache yet.

        EnvironmentProblemError when that fails, without a C++ compiler for example.
        """
        key = self._key(block, index, rows, adapters)
        if key not in self._loaded:
            spec = ProgramSpec(str(self._checkpoint), index, self._dtype, self._quant, rows, self._page_size, adapters)
            file = self._disk.file(f"programs/{key}.pt2", lambda target: _compile(spec, target))
            self._loaded[key] = torch._inductor.aoti_load_package(str(file)).loader.run
        return self._loaded[key]

    def _key(self, block: nn.Module, index: int, rows: int, adapters: bool) -> str:
        weights = [(name, tuple(weight.shape), str(weight.dtype)) for name, weight in block.named_parameters()]
        versions = (FORMAT, machine_key(), transformers.__version__)
        kind = self._layer_types and self._layer_types[index]
        parts = (*versions, rows, *(["adapters"] * adapters), self._page_size, weights, kind, self._config_key)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def _compile(spec: ProgramSpec, target: Path) -> None:
    """In a process of its own: the compiler stays out of this one's memory, and wants an ordinary Python."""
    compiler()
    began = time.monotonic()
    python = Path(sys.prefix, "bin", "python")
    command = [str(python), "-m", "corolla.model.compilation", json.dumps(asdict(spec)), str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise EnvironmentProblemError(
            f"the decoder for {spec.rows or 'any number of'} rows cannot be compiled: {done.stderr[-3000:]}; try "
            "another compiler (CXX), or write the repository with --decoder eager"
        )
    logger.info("compiled the decoder for %s rows in %.0f s", spec.rows or "any number of", time.monotonic() - began)
