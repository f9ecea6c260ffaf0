"""The dtypes a range may compute in, by the names of torch, Triton's config and Triton's protocol."""

from dataclasses import dataclass

import torch

from corolla.errors import InvalidValueError


@dataclass(frozen=True)
class DType:
    """One dtype: its torch name and object, its name in config.pbtxt and in the inference protocol."""

    name: str
    torch: torch.dtype
    config_name: str
    protocol_name: str


DTYPES = {
    dtype.name: dtype
    for dtype in (
        DType("float32", torch.float32, "TYPE_FP32", "FP32"),
        DType("float16", torch.float16, "TYPE_FP16", "FP16"),
        DType("bfloat16", torch.bfloat16, "TYPE_BF16", "BF16"),
    )
}


def dtype_named(name: str) -> DType:
    """The dtype of that torch name; InvalidValueError for any other name."""
    if name not in DTYPES:
        raise InvalidValueError("dtype", name, ", ".join(DTYPES))
    return DTYPES[name]
