"""One linear layer on our kernels, on those of bitsandbytes and on that of PyTorch, its weight read from memory."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from corolla.bench.tables import markdown
from corolla.checkpoint.linear_weights import stored_weight
from corolla.kernels.build import load_kernels
from corolla.model.linears import use_linears
from corolla.quantization import INT8, NF4, NONE

COPIES_BYTES, MOST_COPIES = 128 * 2**20, 64
"""Copies of the weight are used in turn, so that no cache holds the next one."""

KERNELS = {
    "Corolla": (NONE, True),
    "Corolla, int8": (INT8, True),
    "Corolla, nf4": (NF4, True),
    "bitsandbytes, int8": (INT8, False),
    "bitsandbytes, nf4": (NF4, False),
    "PyTorch": (NONE, False),
}
"""Quantization, and whether the weight is packed for our kernels."""


@dataclass(frozen=True)
class LinearTime:
    """Seconds of one call with `rows` rows, whose weight takes `size` bytes."""

    kernel: str
    rows: int
    seconds: float
    size: int


def measure_linears(
    outputs: int, inputs: int, dtype: torch.dtype, rows: Sequence[int], threads: int, rounds: int
) -> list[LinearTime]:
    """The best of `rounds` passes over all copies for each kernel and number of rows."""
    torch.set_num_threads(threads)
    load_kernels()
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    given = [torch.randn(count, inputs, generator=generator).to(dtype) for count in rows]
    results = []
    for name, (quant, packed) in KERNELS.items():
        stored = stored_weight(weight, quant, packed=packed)
        size = sum(tensor.nbytes for tensor in stored.values())
        copies = min(MOST_COPIES, max(2, COPIES_BYTES // size))
        layers = [_layer(stored, weight, quant, packed=packed) for _ in range(copies)]
        results += [LinearTime(name, len(x), _best(layers, x, rounds), size) for x in given]
    return results


def _layer(stored: dict[str, torch.Tensor], weight: torch.Tensor, quant: str, *, packed: bool) -> nn.Module:
    outputs, inputs = weight.shape
    with torch.device("meta"):
        layer = use_linears(nn.Sequential(nn.Linear(inputs, outputs, bias=False)), weight.dtype, quant, packed=packed)
    layer.load_state_dict({f"0.{name}": tensor.clone() for name, tensor in stored.items()}, assign=True)
    return layer.eval().requires_grad_(False)


@torch.inference_mode()
def _best(layers: Sequence[nn.Module], x: torch.Tensor, rounds: int) -> float:
    """Seconds of one call."""
    best = float("inf")
    for _ in range(rounds + 1):
        start = time.perf_counter()
        for layer in layers:
            layer(x)
        best = min(best, time.perf_counter() - start)
    return best / len(layers)


def table(results: Sequence[LinearTime]) -> str:
    """The results as Markdown, one line per kernel: milliseconds and, for the fewest rows, GB/s of weights."""
    rows = sorted({r.rows for r in results})
    times = {(r.kernel, r.rows): r for r in results}
    return markdown(
        ["kernel", "MiB", "GB/s", *(f"{count} rows, ms" for count in rows)],
        (
            [
                kernel, f"{times[kernel, rows[0]].size / 2**20:.1f}",
                f"{times[kernel, rows[0]].size / times[kernel, rows[0]].seconds / 1e9:.1f}",
                *(f"{times[kernel, count].seconds * 1e3:.2f}" for count in rows),
            ]
            for kernel in dict.fromkeys(r.kernel for r in results)
        ),
    )  # fmt: skip
