"""Which dtype a checkpoint is served in, and how it is quantized, with the reason."""

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from transformers import PretrainedConfig

from corolla.checkpoint.stored_quant import stored_quant
from corolla.dtypes import DTYPES, DType, dtype_named
from corolla.errors import InvalidValueError
from corolla.kernels.build import processor_flags
from corolla.quantization import INT8, NF4, NONE, default_quant

T = TypeVar("T")

BFLOAT16_CAPABILITY = (8, 0)
INT8_CAPABILITY = (7, 5)
NF4_CAPABILITY = (6, 0)
"""What GPUs must have at least for arithmetic in bfloat16, and for the layers of bitsandbytes."""


@dataclass(frozen=True)
class Resolved(Generic[T]):
    """What was chosen, and why, in a few words."""

    value: T
    reason: str


@dataclass(frozen=True)
class Hardware:
    """What arithmetic a server's device has. `capability` is that of a GPU, None where none is known."""

    device: str
    capability: tuple[int, int] | None = None
    bfloat16_products: bool = False

    @classmethod
    def of(cls, device: str) -> "Hardware":
        """This machine's, `cpu` or `cuda`; of a machine without GPU, nothing is known about the one that will serve."""
        if device == "cpu":
            return cls(device, bfloat16_products=bool({"avx512_bf16", "amx_bf16"} & processor_flags()))
        return cls(device, torch.cuda.get_device_capability() if torch.cuda.is_available() else None)

    def lacks(self, capability: tuple[int, int]) -> bool:
        """Whether it is known to be a GPU of less than that."""
        return self.capability is not None and self.capability < capability


def resolve_dtype(wanted: str, config: PretrainedConfig, device: str) -> DType:
    """What `explained_dtype` says for this machine's `device`, cpu or cuda."""
    return explained_dtype(wanted, config, Hardware.of(device)).value


def resolve_quant(wanted: str | None, config: PretrainedConfig, device: str, tensor_parallel: int = 1) -> str:
    """What `explained_quant` says for this machine's `device`, cpu or cuda."""
    return explained_quant(wanted, config, Hardware.of(device), tensor_parallel).value


def explained_dtype(wanted: str, config: PretrainedConfig, hardware: Hardware) -> Resolved[DType]:
    """`wanted`, or for `auto` the checkpoint's own dtype with float32 replaced by bfloat16.

    On CPUs, which have no arithmetic for it, float16 is replaced as well; on GPUs that have none for bfloat16, float16
    is in its place.

    InvalidValueError for a dtype that cannot be served.
    """
    if wanted == "float16" and hardware.device == "cpu":
        raise InvalidValueError(
            "dtype", wanted, "auto, float32, bfloat16 on CPUs, which have no arithmetic for float16"
        )
    without = hardware.lacks(BFLOAT16_CAPABILITY)
    if wanted == "bfloat16" and without:
        raise InvalidValueError(
            "dtype", wanted, "auto, float16, float32 on a GPU older than compute capability 8.0, which has no "
            "arithmetic for bfloat16",
        )  # fmt: skip
    if wanted != "auto":
        return Resolved(dtype_named(wanted), "--dtype")
    stored = config.dtype if config.dtype is not None else torch.float32
    name = str(stored).removeprefix("torch.")
    if name not in DTYPES:
        raise InvalidValueError("config.json: dtype", name, f"{', '.join(DTYPES)}; or give --dtype")
    if without:
        return Resolved(
            DTYPES["float16"], f"stored in {name}; this GPU is older than compute capability 8.0 and lacks bfloat16"
        )
    if stored == torch.float32:
        return Resolved(DTYPES["bfloat16"], f"stored in float32; a step reads half as much{_products(hardware)}")
    if stored == torch.float16 and hardware.device == "cpu":
        reason = f"stored in float16, for which CPUs have no arithmetic{_products(hardware)}"
        return Resolved(DTYPES["bfloat16"], reason)
    return Resolved(DTYPES[name], f"as it is stored{_products(hardware) if stored == torch.bfloat16 else ''}")


def explained_quant(
    wanted: str | None, config: PretrainedConfig, hardware: Hardware, tensor_parallel: int = 1
) -> Resolved[str]:
    """`wanted`, or what the checkpoint is quantized in already, or what the device is best served with.

    Blocks in several shards are not quantized unless it is wanted, which is then refused. InvalidValueError where a
    GPU is too old for what is wanted or stored.
    """
    stored, default = stored_quant(config), default_quant(hardware.device, tensor_parallel)
    if wanted is not None:
        resolved = Resolved(wanted, "--quant")
    elif stored != NONE:
        resolved = Resolved(stored, "as it is stored")
    elif tensor_parallel > 1:
        resolved = Resolved(default, "blocks in several shards are not quantized")
    elif hardware.device == "cpu":
        resolved = Resolved(default, "exact; --quant int8 or nf4 reads less per step and takes less memory")
    elif hardware.lacks(NF4_CAPABILITY):
        resolved = Resolved(NONE, "this GPU is too old for nf4, which wants compute capability 6.0")
    else:
        resolved = Resolved(default, "a quarter of the memory, so that more blocks fit on a GPU")
    needed = {INT8: INT8_CAPABILITY, NF4: NF4_CAPABILITY}.get(resolved.value)
    if needed is not None and hardware.lacks(needed):
        major, minor = needed
        raise InvalidValueError("quant", resolved.value, f"{NONE} on a GPU below compute capability {major}.{minor}")
    return resolved


def _products(hardware: Hardware) -> str:
    if hardware.device != "cpu":
        return ""
    return "; this processor multiplies bfloat16" if hardware.bfloat16_products else "; products are float32"
