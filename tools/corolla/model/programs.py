"""Decoder layers and the head compiled ahead of time by inductor, stored in the disk cache.

A program takes weights as inputs: one is compiled per batch size and serves all blocks that are alike, in every
process.
"""

import hashlib
import json
import logging
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from torch import nn

from corolla.checkpoint.prepared import PreparedParts
from corolla.errors import EnvironmentProblemError
from corolla.kernels.build import compiler, machine_key
from corolla.kernels.packed_layers import wide_weights
from corolla.quantization import NONE

logger = logging.getLogger(__name__)

FORMAT = 5


@dataclass(frozen=True)
class ProgramSpec:
    """What to compile: one block of a checkpoint in a dtype, for `rows` rows and pages of `page_size` positions.

    0 `rows` are any number of them. `quant` is how linear layers are quantized; the weights `wide` are not compact,
    see corolla.kernels.packed_layers. With `adapters`, rows may be adapted; see corolla.model.lora. The `block` None
    is the head, for any number of rows.
    """

    checkpoint: str
    block: int | None
    dtype: str
    wide: list[str]
    quant: str = NONE
    rows: int = 0
    page_size: int = 0
    adapters: bool = False


class Programs:
    """The programs of one model, as files of the disk cache."""

    def __init__(self, parts: PreparedParts) -> None:
        config = parts.checkpoint.config
        self._checkpoint = str(parts.checkpoint.path)
        self._dtype = str(parts.dtype).removeprefix("torch.")
        self._quant = parts.quant
        self._config_key = json.dumps(config.to_dict() | {"_name_or_path": ""}, sort_keys=True, default=str)
        self._layer_types = getattr(config, "layer_types", None)
        self._disk = parts.cache

    def block(self, block: nn.Module, index: int, rows: int, page_size: int, *, adapters: bool = False) -> Path:
        """The program for `rows` rows (0: any number) of block `index`, compiled if it is not in the disk cache yet.

        EnvironmentProblemError when that fails, without a C++ compiler for example.
        """
        wide = wide_weights(block)
        spec = ProgramSpec(self._checkpoint, index, self._dtype, wide, self._quant, rows, page_size, adapters)
        kind = self._layer_types and self._layer_types[index]
        return self._get(spec, (rows, *(["adapters"] * adapters), page_size, _forms(block.named_parameters()), kind))

    def head(self, norm: nn.Module, projection: torch.Tensor) -> Path:
        """The program of the final norm and a packed projection; like `block`."""
        wide = [] if projection.dtype == torch.uint8 else ["projection"]
        spec = ProgramSpec(self._checkpoint, None, self._dtype, wide)
        return self._get(spec, ("head", _forms([*norm.named_parameters(), ("projection", projection)])))

    def _get(self, spec: ProgramSpec, key_parts: tuple[object, ...]) -> Path:
        versions = (FORMAT, machine_key(), transformers.__version__)
        key = hashlib.sha256(repr((*versions, *key_parts, self._config_key)).encode()).hexdigest()[:24]
        return self._disk.file(f"programs/{key}.pt2", lambda target: _compile(spec, target))


def _forms(weights: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, tuple[int, ...], str]]:
    return [(name, tuple(weight.shape), str(weight.dtype)) for name, weight in weights]


def _compile(spec: ProgramSpec, target: Path) -> None:
    """In a process of its own: the compiler stays out of this one's memory, and wants an ordinary Python."""
    compiler()
    began = time.monotonic()
    python = Path(sys.prefix, "bin", "python")
    command = [str(python), "-m", "corolla.model.compilation", json.dumps(asdict(spec)), str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise EnvironmentProblemError(
            f"{_in_words(spec)} cannot be compiled: {done.stderr[-3000:]}; try "
            "another compiler (CXX), or write the repository with --decoder eager"
        )
    logger.info("compiled %s in %.0f s", _in_words(spec), time.monotonic() - began)


def _in_words(spec: ProgramSpec) -> str:
    return "the head" if spec.block is None else f"the decoder for {spec.rows or 'any number of'} rows"
