"""Hidden states as they travel between servers: plain bytes in one of a few encodings."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from corolla.errors import InvalidValueError

INT8 = "int8"
BLOCK = 64
"""Numbers along the hidden size that have one scale in int8."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ENCODINGS = (*_DTYPES, INT8)


@dataclass(frozen=True)
class WireStates:
    """Hidden states `shape` (n, T, H) as `data`, uint8 [bytes], in an `encoding`.

    InvalidValueError for an unknown encoding, or where the shape and the bytes do not fit together.
    """

    data: NDArray[np.uint8]
    encoding: str
    shape: tuple[int, int, int]

    def __post_init__(self) -> None:
        if self.encoding not in ENCODINGS:
            raise InvalidValueError("encoding", self.encoding, ", ".join(ENCODINGS))
        if len(self.shape) != 3 or min(self.shape) < 1:
            raise InvalidValueError("shape", list(self.shape), "three numbers, 1 or more: rows, positions, hidden size")
        wanted = encoded_bytes(self.shape, self.encoding)
        if self.data.dtype != np.uint8 or self.data.shape != (wanted,):
            raise InvalidValueError(
                "hidden_states",
                f"{self.data.dtype} {list(self.data.shape)}",
                f"{wanted} bytes, as {self.encoding} of the shape {list(self.shape)} has",
            )


def encoded_bytes(shape: tuple[int, int, int], encoding: str) -> int:
    """Bytes of hidden states (n, T, H)."""
    rows, positions, hidden_size = shape
    width = hidden_size + 4 * _scales(hidden_size) if encoding == INT8 else hidden_size * _DTYPES[encoding].itemsize
    return rows * positions * width


def encode(hidden_states: torch.Tensor, encoding: str) -> WireStates:
    """Hidden states [n, T, H] of any floating dtype. In float16, numbers beyond 65504 become infinite."""
    rows, positions, hidden_size = hidden_states.shape
    shape = (rows, positions, hidden_size)
    if encoding == INT8:
        data = _quantized(hidden_states.detach().reshape(-1, hidden_size).cpu().float())
    elif encoding in _DTYPES:
        data = hidden_states.detach().to("cpu", _DTYPES[encoding]).contiguous().view(torch.uint8)
    else:
        raise InvalidValueError("encoding", encoding, ", ".join(ENCODINGS))
    return WireStates(data.reshape(-1).numpy(), encoding, shape)


def decode(states: WireStates, dtype: torch.dtype) -> torch.Tensor:
    """Hidden states [n, T, H] in `dtype`; they do not share the memory of `states`."""
    data = torch.from_numpy(states.data.copy())
    if states.encoding != INT8:
        return data.view(_DTYPES[states.encoding]).view(states.shape).to(dtype)
    return _dequantized(data, states.shape).to(dtype)


def _quantized(rows: torch.Tensor) -> torch.Tensor:
    """Rows [N, H] float32 as bytes: N x H numbers int8, then N x ceil(H / BLOCK) scales float32.

    A number x of a block becomes q = round(x / s), and y = q s, with s = absmax(block) / 127. Rounding to the nearest
    whole number leaves |x / s - q| <= 1/2, and |x / s| <= 127 needs no clipping, so |x - y| <= s / 2 =
    absmax(block) / 254. In float32, s is off by a factor of 1 + e, x / s and q s by others, |e| <= 2^-24 each: x / s
    is then wrong by at most 127 x 2^-23, which can turn the rounding over but not further, and y by as much of
    itself, so |x - y| <= absmax(block) x (1 / 254 + 2^-22). Where s would be no normal number of float32,
    y is 0. A block with a number that is not finite comes back as NaN.
    """
    count, hidden_size = rows.shape
    padded = nn.functional.pad(rows, (0, -hidden_size % BLOCK)).view(count, -1, BLOCK)
    scales = padded.abs().amax(-1) / 127
    scales = torch.where(scales < torch.finfo(torch.float32).tiny, 0.0, scales)
    numbers = (padded / scales[..., None]).nan_to_num(0.0, 0.0, 0.0).round().to(torch.int8)
    numbers = numbers.view(count, -1)[:, :hidden_size].contiguous()
    return torch.cat([numbers.view(torch.uint8).reshape(-1), scales.contiguous().view(torch.uint8).reshape(-1)])


def _dequantized(data: torch.Tensor, shape: tuple[int, int, int]) -> torch.Tensor:
    rows, positions, hidden_size = shape
    count = rows * positions
    numbers, scales = data.split([count * hidden_size, len(data) - count * hidden_size])
    by_number = scales.clone().view(torch.float32).view(count, -1).repeat_interleave(BLOCK, dim=1)[:, :hidden_size]
    return (numbers.view(torch.int8).view(count, hidden_size).float() * by_number).view(shape)


def _scales(hidden_size: int) -> int:
    return -(-hidden_size // BLOCK)
