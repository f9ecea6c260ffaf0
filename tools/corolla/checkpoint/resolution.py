"""Which dtype a checkpoint is served in, and how it is quantized."""

import torch
from transformers import PretrainedConfig

from corolla.checkpoint.stored_quant import stored_quant
from corolla.dtypes import DTYPES, DType, dtype_named
from corolla.errors import InvalidValueError
from corolla.quantization import NONE, default_quant


def resolve_dtype(wanted: str, config: PretrainedConfig, device: str) -> DType:
    """`wanted`, or for `auto` the checkpoint's own dtype with float32 replaced by bfloat16.

    On CPUs, which have no arithmetic for it, float16 is replaced as well.

    InvalidValueError for a dtype that cannot be served.
    """
    if wanted == "float16" and device == "cpu":
        raise InvalidValueError(
            "dtype", wanted, "auto, float32, bfloat16 on CPUs, which have no arithmetic for float16"
        )
    if wanted != "auto":
        return dtype_named(wanted)
    stored = config.dtype if config.dtype is not None else torch.float32
    if stored == torch.float32 or (stored == torch.float16 and device == "cpu"):
        return DTYPES["bfloat16"]
    name = str(stored).removeprefix("torch.")
    if name not in DTYPES:
        raise InvalidValueError("config.json: dtype", name, f"{', '.join(DTYPES)}; or give --dtype")
    return DTYPES[name]


def resolve_quant(wanted: str | None, config: PretrainedConfig, device: str, tensor_parallel: int = 1) -> str:
    """`wanted`, or what the checkpoint is quantized in already, or what the device is best served with.

    Blocks in several shards are not quantized unless it is wanted, which is then refused.
    """
    stored = stored_quant(config)
    return wanted or (stored if stored != NONE else default_quant(device, tensor_parallel))
