"""Compact weights hold every bit of the weights, and products with them are those with packed ones.

Products are compared with those of packed weights: only the order of sums differs where there are outliers, so results
differ by at most one step of bfloat16 (2^-7 of the value), and by 1e-2 near zero.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from checkpoints import GROUPED
from corolla.checkpoint.disk_cache import DiskCache
from corolla.checkpoint.folder import CheckpointFolder
from corolla.checkpoint.parts import block_part
from corolla.checkpoint.prepared import PreparedParts
from corolla.kernels.compact_packing import compact, compact_shape, is_compact, pack_or_compact
from corolla.kernels.packed_layers import PackedLinear, wide_weights
from corolla.kernels.packing import pack
from corolla.model.block_range import BlockRange
from corolla.model.ends import Head
from corolla.model.program_chain import ProgramChain
from corolla.model.programs import Programs

pytestmark = pytest.mark.usefixtures("kernels")

SHAPES = [(64, 32), (33, 7), (1, 1), (31, 50), (150, 121), (96, 512)]
CLOSE = {"rtol": 2**-7, "atol": 1e-2}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def compacted(weight: torch.Tensor) -> torch.Tensor:
    codes = compact(weight)
    assert codes is not None
    return codes


def read_back(codes: torch.Tensor, outputs: int, inputs: int, rows: int) -> torch.Tensor:
    """The weight [outputs, inputs], by products with so many rows of the unit matrix at once: sums of one number."""
    products = [
        torch.ops.corolla.packed_linear(part.contiguous(), codes, None, outputs)
        for part in torch.eye(inputs).bfloat16().split(rows)
    ]
    return torch.cat(products).T


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("rows", [1, 7, 16, 64])
def test_no_bit_is_lost(outputs: int, inputs: int, rows: int) -> None:
    weight = random(outputs, inputs)
    codes = compacted(weight)
    assert codes.shape == compact_shape(outputs, inputs)
    assert torch.equal(read_back(codes, outputs, inputs, rows), weight)


@pytest.mark.parametrize("rows", [1, 64])
def test_weights_far_from_the_others_are_kept(rows: int) -> None:
    """The smallest and the largest numbers, zeros, and infinity.

    With few rows, a product is that with the smallest coded weight, of 2^-16 or less here, and that with the rest, both
    in float32: 2^-40 is lost at most.
    """
    weight = random(40, 64) * 0.02
    for place, value in enumerate((0.0, -0.0, 2.0**-126, 1e-20, -1e-12, 300.0, -3.3e38)):
        weight[place, 3 * place] = value
    found = read_back(compacted(weight), 40, 64, rows)
    assert torch.equal(found, weight) if rows > 16 else torch.allclose(found, weight, rtol=0, atol=2**-40)
    weight[39, 63] = torch.inf
    x = random(rows, 64).abs() + 1
    assert torch.ops.corolla.packed_linear(x, compacted(weight), None, 40)[:, 39].isinf().all()


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 8, 9, 16, 17, 40])
@pytest.mark.parametrize("biased", [False, True])
def test_products_are_those_of_packed_weights(rows: int, outputs: int, inputs: int, biased: bool) -> None:
    x, weight, bias = random(rows, inputs), random(outputs, inputs, seed=1), random(outputs, seed=2)
    results = [
        torch.ops.corolla.packed_linear(x, form, bias if biased else None, outputs)
        for form in (compacted(weight), pack(weight))
    ]
    torch.testing.assert_close(*results, **CLOSE)


@pytest.mark.parametrize("rows", [1, 9, 40])
def test_products_of_experts_are_those_of_packed_weights(rows: int) -> None:
    x, weight = random(rows, 50), random(5, 33, 50, seed=1)
    experts = torch.randint(4, (rows,), generator=torch.Generator().manual_seed(2))
    results = [torch.ops.corolla.expert_linear(x, form, experts, 33) for form in (compacted(weight), pack(weight))]
    torch.testing.assert_close(*results, **CLOSE)


def test_weights_with_many_outliers_are_only_packed() -> None:
    weight = random(64, 96)
    weight[40, :20] = 0  # 20 in the second tile, which has room for 8 and one per 512 weights: 14
    assert compact(weight) is None
    assert compact(torch.stack([random(64, 96), weight])) is None
    assert torch.equal(pack_or_compact(weight), pack(weight))


def test_what_does_not_fit_is_refused() -> None:
    codes = compacted(random(40, 8))
    for x, outputs in ((random(1, 9), 40), (random(1, 8).float(), 40), (random(1, 8), 100)):
        with pytest.raises(RuntimeError, match=r"packed_linear: weight of shape \[2, 512\] does not fit"):
            torch.ops.corolla.packed_linear(x, codes, None, outputs)
    with pytest.raises(RuntimeError, match="is no packed weight of 9 inputs and 40 outputs"):
        torch.ops.corolla.compact_weight(pack(random(40, 8)), 9, 40)


def test_a_layer_takes_either_form() -> None:
    weight = random(64, 96)
    for stored in (pack(weight), pack_or_compact(weight)):
        with torch.device("meta"):
            layer = nn.Sequential(PackedLinear(nn.Linear(96, 64, bias=False), torch.bfloat16))
        layer.load_state_dict({"0.weight": stored}, assign=True)
        torch.testing.assert_close(layer(random(3, 96)), nn.functional.linear(random(3, 96), weight), **CLOSE)
        assert wide_weights(layer) == (["0.weight"] if is_compact(torch.bfloat16) and stored.ndim == 4 else [])


@pytest.mark.skipif(not is_compact(torch.bfloat16), reason="this processor has no products of bfloat16")
def test_a_model_with_both_forms_runs_compiled(tmp_path: Path, suite_cache: Path) -> None:
    """One of its matrices is half zeros, as after pruning, and its head as well."""
    GROUPED.write(tmp_path)
    pruned = ("model.layers.0.mlp.up_proj.weight", "lm_head.weight")
    for file in tmp_path.glob("*.safetensors"):
        tensors = load_file(file)
        for name in tensors.keys() & set(pruned):
            tensors[name][::2] = 0
        save_file(tensors, file, metadata={"format": "pt"})
    parts = PreparedParts(CheckpointFolder(tmp_path), torch.bfloat16, DiskCache(suite_cache, None), packed=True)
    plain = replace(parts, packed=False)
    stored = parts.load(block_part(0))
    assert (stored["mlp.up_proj.weight"].dtype, stored["mlp.down_proj.weight"].dtype) == (torch.bfloat16, torch.uint8)
    x = random(1, 5, parts.checkpoint.config.hidden_size)
    blocks, reference = (BlockRange(each, range(1)) for each in (parts, plain))
    assert wide_weights(blocks.layers[0]) == ["mlp.up_proj.weight"]
    torch.testing.assert_close(blocks.forward(x), reference.forward(x), rtol=2**-5, atol=2**-5)  # bfloat16 in between
    torch.testing.assert_close(Head(parts)(x), Head(plain)(x), rtol=2**-5, atol=2**-5)
    ProgramChain([Programs(parts).block(blocks.layers[0], 0, 0, 4)], [[]])
