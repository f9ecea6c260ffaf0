"""The CPU kernels compute what PyTorch computes, for every shape that a model can have.

Tolerances: float32 sums in another order differ by less than 1e-4 here; bfloat16 results, which are rounded once
from float32 sums, differ from PyTorch's by at most one step of bfloat16 (2^-7 of the value).
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from corolla.checkpoint.disk_cache import DiskCache
from corolla.errors import EnvironmentProblemError
from corolla.kernels import build
from corolla.kernels.ops import paged_attention
from corolla.kernels.packing import pack, unpack
from corolla.kernels.quantized_packing import pack_int8, pack_nf4
from corolla.model.alibi import alibi_slopes
from corolla.model.lora import Adapter, AdapterTables, GroupedRows

pytestmark = pytest.mark.usefixtures("kernels")

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: {"rtol": 0, "atol": 1e-4}, torch.bfloat16: {"rtol": 2**-7, "atol": 1e-2}}


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 32), (33, 7), (1, 1), (31, 50), (150, 121)])
def test_packing_can_be_undone(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    weight = random(outputs, inputs, dtype=dtype)
    assert torch.equal(unpack(pack(weight), outputs, inputs), weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 32), (33, 7), (1, 1), (31, 50), (150, 121)])
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 23])
@pytest.mark.parametrize("biased", [False, True])
def test_packed_linear_equals_linear(rows: int, outputs: int, inputs: int, biased: bool, dtype: torch.dtype) -> None:
    x, weight = random(rows, inputs, dtype=dtype), random(outputs, inputs, dtype=dtype, seed=1)
    bias = random(outputs, dtype=dtype, seed=2) if biased else None
    result = torch.ops.corolla.packed_linear(x, pack(weight), bias, outputs)
    expected = nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(dtype)
    torch.testing.assert_close(result, expected, **TOLERANCE[dtype])


def test_packed_linear_takes_any_leading_shape_and_any_strides() -> None:
    x, weight = random(3, 40, 5, dtype=torch.float32).transpose(1, 2), random(33, 40, dtype=torch.float32, seed=1)
    result = torch.ops.corolla.packed_linear(x, pack(weight), None, 33)
    torch.testing.assert_close(result, nn.functional.linear(x, weight), **TOLERANCE[torch.float32])


def test_packed_linear_refuses_a_weight_that_does_not_fit() -> None:
    with pytest.raises(RuntimeError, match=r"weight of shape \[2, 7, 32, 1\] does not fit \[1, 9\]"):
        torch.ops.corolla.packed_linear(torch.zeros(1, 9), pack(torch.zeros(40, 7)), None, 40)
    with pytest.raises(RuntimeError, match="allowed: float32, bfloat16"):
        torch.ops.corolla.packed_linear(torch.zeros(1, 7, dtype=torch.float16), pack(torch.zeros(40, 7)), None, 40)


class Cache:
    """Random keys and values of 12 pages of 4 positions, and rows of sessions in them."""

    def __init__(self, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self.keys = random(12, 4, kv_heads, head_dim, dtype=dtype, seed=3)
        self.values = random(12, 4, kv_heads, head_dim, dtype=dtype, seed=4)

    def attend(
        self, function: Callable[..., torch.Tensor], *rows: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, ...]:
        keys, values = self.keys.clone(), self.values.clone()
        query, key, value, pages, positions = rows
        return function(query, key, value, keys, values, pages, positions, 0.3, **options), keys, values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(8, 2, 64), (5, 1, 24), (4, 4, 128), (6, 3, 17)])
def test_paged_attention_equals_the_form_in_pytorch(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    cache = Cache(kv_heads, head_dim, dtype)
    pages = torch.tensor([[3, 1, 0], [5, 6, 7], [5, 6, 7], [9, 0, 0], [0, 0, 0]], dtype=torch.int32)
    positions = torch.tensor([6, 8, 9, 0, -1])  # rows 1 and 2 belong to one session, row 4 is padding
    rows = (
        random(5, heads, head_dim, dtype=dtype), random(5, kv_heads, head_dim, dtype=dtype, seed=1),
        random(5, kv_heads, head_dim, dtype=dtype, seed=2), pages, positions,
    )  # fmt: skip
    result, keys, values = cache.attend(torch.ops.corolla.paged_attention, *rows)
    expected, expected_keys, expected_values = cache.attend(paged_attention, *rows)
    assert torch.equal(keys, expected_keys)
    assert torch.equal(values, expected_values)
    torch.testing.assert_close(result, expected, **TOLERANCE[dtype])
    assert not result[4].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 1, 4, 7, 100])
@pytest.mark.parametrize("slopes", [None, torch.float32, torch.bfloat16])
def test_windows_and_linear_biases_equal_the_form_in_pytorch(
    window: int, slopes: torch.dtype | None, dtype: torch.dtype
) -> None:
    cache = Cache(3, 24, dtype)
    pages = torch.tensor([[3, 1, 0], [5, 6, 7], [5, 6, 7], [9, 0, 0], [0, 0, 0]], dtype=torch.int32)
    rows = (
        random(5, 6, 24, dtype=dtype), random(5, 3, 24, dtype=dtype, seed=1), random(5, 3, 24, dtype=dtype, seed=2),
        pages, torch.tensor([6, 10, 11, 0, -1]),
    )  # fmt: skip
    options = {"window": window, "slopes": slopes and alibi_slopes(6, torch.device("cpu")).to(slopes)}
    result, *_ = cache.attend(torch.ops.corolla.paged_attention, *rows, **options)
    expected, *_ = cache.attend(paged_attention, *rows, **options)
    torch.testing.assert_close(result, expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 64, 32), (9, 33, 7), (40, 150, 121), (0, 32, 8)])
def test_expert_linear_equals_the_linear_layer_of_each_rows_expert(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    x, weight = random(rows, inputs, dtype=dtype), random(5, outputs, inputs, dtype=dtype, seed=1)
    experts = torch.randint(4, (rows,), generator=torch.Generator().manual_seed(2))  # nobody chose the last one
    result = torch.ops.corolla.expert_linear(x, pack(weight), experts, outputs)
    expected = torch.einsum("ni,noi->no", x.float(), weight[experts].float()).to(dtype)
    torch.testing.assert_close(result, expected, **TOLERANCE[dtype])


def test_expert_linear_refuses_experts_that_do_not_exist() -> None:
    for expert in (-1, 2):
        with pytest.raises(RuntimeError, match=rf"expert_linear: expert {expert} to {expert}; allowed: 0 to 1"):
            torch.ops.corolla.expert_linear(torch.zeros(1, 7), pack(torch.zeros(2, 9, 7)), torch.tensor([expert]), 9)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 7])
def test_tables_of_adapters_add_what_groups_of_rows_do(rows: int, dtype: torch.dtype) -> None:
    """Ranks differ; the second layer is adapted by one of them only."""
    layers = ((0, "first"), (0, "second"))
    weights = {
        (rank, layer): (random(rank, 33, dtype=torch.float32, seed=rank), random(rank, 50, dtype=torch.float32))
        for rank in (2, 9)
        for layer in layers
    }
    two = Adapter({layer: weights[2, layer] for layer in layers})
    nine = Adapter({layers[0]: weights[9, layers[0]]})
    adapters = [(two, None, nine, two)[row % 4] for row in range(rows)]
    x, y = random(rows, 1, 33, dtype=dtype), random(rows, 1, 50, dtype=dtype, seed=1)
    (table,) = AdapterTables([layers]).of_rows(adapters)
    for index, layer in enumerate(layers):
        expected = GroupedRows(adapters).add(layer, x, y)
        assert not torch.equal(expected, y)
        torch.testing.assert_close(torch.ops.corolla.lora_add(y, x, table, index), expected, **TOLERANCE[dtype])


def test_paged_attention_of_one_session_is_causal_attention() -> None:
    query, key, value = (random(10, 4, 16, dtype=torch.float32, seed=seed) for seed in range(3))
    pages = torch.tensor([[2, 0, 1]], dtype=torch.int32).expand(10, 3).contiguous()
    arguments = (torch.zeros(3, 4, 4, 16), torch.zeros(3, 4, 4, 16), pages, torch.arange(10), 0.25)
    expected = nn.functional.scaled_dot_product_attention(
        *(t.transpose(0, 1) for t in (query, key, value)), is_causal=True, scale=0.25
    ).transpose(0, 1)
    for function in (torch.ops.corolla.paged_attention, paged_attention):
        torch.testing.assert_close(function(query, key, value, *arguments), expected, rtol=0, atol=1e-5)


def quantized_cases() -> list[tuple[str, tuple[object, ...], torch.Tensor]]:
    """Operators for quantized weights, arguments and results."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(16, (70, 96), dtype=torch.uint8, generator=generator)
    cases = []
    for dtype in DTYPES:
        x, bias = random(9, 96, dtype=dtype), random(70, dtype=dtype, seed=1)
        for name, packed in (
            ("packed_linear_int8", pack_int8(numbers.char() - 8, torch.rand(70, generator=generator), dtype)),
            ("packed_linear_nf4", pack_nf4(numbers, torch.rand(105, generator=generator), dtype)),
        ):
            arguments = (x, *packed.values(), bias, 70)
            cases.append((name, arguments, getattr(torch.ops.corolla, name)(*arguments)))
    return cases


def test_the_portable_kernels_compute_the_same(suite_cache: Path, tmp_path: Path) -> None:
    """In a process of its own: they take the place of the others."""
    torch.save(quantized_cases(), tmp_path / "cases")
    portable = build.build(DiskCache(suite_cache, None), ("-DCOROLLA_PORTABLE", "-O1"))
    code = (
        "import sys, torch; from pathlib import Path; from corolla.kernels import build, ops; "
        "from corolla.kernels.packing import pack; build.load_library(Path(sys.argv[1]))\n"
        "compact = lambda weight: torch.ops.corolla.compact_weight(pack(weight), weight.shape[1], len(weight))\n"
        "for dtype, atol in ((torch.float32, 1e-4), (torch.bfloat16, 0.1)):\n"
        "    x, w, b = torch.randn(9, 51).to(dtype), torch.randn(70, 51).to(dtype), torch.randn(70).to(dtype)\n"
        "    expected = torch.nn.functional.linear(x.float(), w.float(), b.float()).to(dtype)\n"
        "    result = torch.ops.corolla.packed_linear(x, pack(w), b, 70)\n"
        "    torch.testing.assert_close(result, expected, rtol=1e-2, atol=atol)\n"
        "for rows in (9, 40):\n"
        "    x = torch.randn(rows, 51).bfloat16()\n"
        "    results = [torch.ops.corolla.packed_linear(x, form(w), b, 70) for form in (pack, compact)]\n"
        "    torch.testing.assert_close(*results, rtol=1e-2, atol=atol)\n"
        "for name, arguments, expected in torch.load(sys.argv[2]):\n"
        "    result = getattr(torch.ops.corolla, name)(*arguments)\n"
        "    torch.testing.assert_close(result, expected, rtol=1e-2, atol=1e-2)"
    )
    subprocess.run([sys.executable, "-c", code, str(portable), str(tmp_path / "cases")], check=True)


def test_without_a_compiler_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(EnvironmentProblemError, match=r"no-such-compiler does not run.*apt-get install g\+\+.*eager"):
        build.build(DiskCache(tmp_path, None))
    assert not list(tmp_path.glob("kernels/*"))


def test_a_compiler_that_fails_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblemError, match="unrecognized command-line option"):
        build.build(DiskCache(tmp_path, None), ("--no-such-option",))
