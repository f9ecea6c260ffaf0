"""What a server takes besides blocks and their cache: its processes, their libraries and what they compute in.

The constants are those of `python tests/planned_memory.py`; what runs blocks is measured by a dry step where it can be.
"""

from dataclasses import dataclass

from transformers import PretrainedConfig

from corolla.model.shape import ModelShape
from corolla.planning.quantity import Origin

MIB = 2**20
SERVER_BYTES = 230 * MIB
"""tritonserver and `corolla serve`."""
LIBRARY_BYTES = 130 * MIB
"""Python, torch and the rest, of which all processes map one copy."""
PROCESS_BYTES = 265 * MIB
"""What a model's process has for itself before its first step."""
CONTEXT_BYTES = 512 * MIB
"""What CUDA takes of a device for each process; not measured yet."""
DECODER_BYTES = 48 * MIB
"""Compiled programs, the buffers of their threads and what the allocator keeps."""
CHUNK_POSITIONS = 512
"""Positions of a long prompt that run at once, as in corolla.serving.blocks."""


@dataclass(frozen=True)
class ProcessMemory:
    """Bytes of one process: `private` of each, `work` more in those that run blocks; `libraries` once for all."""

    private: int
    work: int
    libraries: int
    origin: Origin
    formula: str


def usual_memory(config: PretrainedConfig, itemsize: int, device: str) -> ProcessMemory:
    """By rule, where no dry step was measured: the widest layers and the attention of one chunk of a long prompt."""
    shape = ModelShape.of(config)
    hidden = config.hidden_size
    inner = getattr(config, "intermediate_size", None) or getattr(config, "ffn_hidden_size", None) or 4 * hidden
    rows = CHUNK_POSITIONS * (4 * hidden + 3 * inner) * 4
    attention = 2 * shape.context_length * shape.heads * shape.head_dim * itemsize
    mask = CHUNK_POSITIONS * shape.context_length * itemsize
    formula = (
        f"{DECODER_BYTES // MIB} MiB + {CHUNK_POSITIONS} positions x (4 x {hidden} + 3 x {inner}) x 4 bytes + keys, "
        f"values and mask of {shape.context_length} positions"
    )
    work = DECODER_BYTES + rows + attention + mask
    if device == "cpu":
        return ProcessMemory(PROCESS_BYTES, work, LIBRARY_BYTES, Origin.CONSTANT, formula)
    return ProcessMemory(CONTEXT_BYTES, work, 0, Origin.CONSTANT, formula)


@dataclass(frozen=True)
class Processes:
    """How many of a server's processes are on a device: `working` run blocks, `idle` do not."""

    working: int
    idle: int

    @classmethod
    def of(cls, ranges: int, shards: int, device: str, *, ends: bool, span: bool = False) -> "Processes":
        """Of a server with so many block ranges, in shards on as many devices, or all on the CPU.

        `chain` and each range run blocks, `span` where there is one, and `generate` where the ends are; `embed` and
        `head` do not, nor does `sessions`, which is never on a GPU.
        """
        working = ranges + 1 + span + ends
        idle = 2 * ends + (device == "cpu")
        return cls(working * (shards if device == "cpu" else 1), idle)

    @property
    def count(self) -> int:
        """All of them."""
        return self.working + self.idle
