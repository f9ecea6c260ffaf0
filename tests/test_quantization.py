"""Quantized blocks compute what bitsandbytes computes from the same checkpoint, and all processes map the same numbers.

The eager decoder runs the layers of bitsandbytes, the compiled one our kernels on the same numbers. NF4 weights are the
same floats on both, so logits are equal up to the order of sums: 1e-4 in float32, as in test_exactness. The kernel for
INT8 does not quantize inputs, as LLM.int8 does; its own reference is transformers on the weights that the numbers stand
for, and it is closer to the original checkpoint than LLM.int8 is.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from checkpoints import CASES, GROUPED, random_prompt
from conftest import Served, serve_locally
from corolla.checkpoint.bitsandbytes import functional, layers
from corolla.checkpoint.disk_cache import DiskCache
from corolla.checkpoint.folder import CheckpointFolder
from corolla.checkpoint.linear_weights import stored_weight
from corolla.checkpoint.parts import EMBEDDING, HEAD, block_part
from corolla.checkpoint.prepared import PreparedParts
from corolla.cli.main import cli
from corolla.errors import CheckpointError, InvalidValueError
from corolla.model.block_range import BlockRange
from corolla.model.ends import Embedding, Head
from corolla.model.linears import use_linears
from corolla.quantization import INT8, NF4
from local_server import make_plan, served_model
from test_kernels import DTYPES, TOLERANCE, random

pytestmark = pytest.mark.usefixtures("kernels")

ABSOLUTE = 1e-4
QUANTS = (INT8, NF4)
REFERENCE_CASES = [GROUPED, CASES[1]]
"""Inputs in multiples of 64, and in other numbers. Among the others are multiples of 32, of which see below."""


def transformers_model(checkpoint: Path, quant: str, dtype: torch.dtype) -> Any:
    """With NF4 layers that multiply in the dtype: on some CPUs they would round to bfloat16 whatever it is."""
    nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": dtype}
    config = BitsAndBytesConfig(load_in_8bit=True) if quant == INT8 else BitsAndBytesConfig(load_in_4bit=True, **nf4)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, quantization_config=config, device_map="cpu")
    for module in model.modules():
        if isinstance(module, layers.Linear4bit):
            module.support_avx512bf16_for_cpu = False
    return model.eval()


@torch.inference_mode()
def logits(model: Any, input_ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids, use_cache=False).logits.float()


def meant_weight(weight: torch.Tensor, quant: str) -> torch.Tensor:
    """The weight that the numbers stand for, float64."""
    stored = stored_weight(weight, quant, packed=False)
    if quant == INT8:
        return stored["weight"].double() * stored["SCB"].double()[:, None] / 127
    _, state = functional.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    numbers = torch.stack([stored["weight"].view(-1) >> 4, stored["weight"].view(-1) & 15], 1).view(-1)
    scales = functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
    every = scales.repeat_interleave(64)[: weight.numel()]
    return (state.code[numbers.long()][: weight.numel()] * every).view(weight.shape).to(weight.dtype).double()


def layer_of(weight: torch.Tensor, bias: torch.Tensor | None, quant: str, *, packed: bool) -> nn.Module:
    with torch.device("meta"):
        plain = nn.Sequential(nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None))
        layer = use_linears(plain, weight.dtype, quant, packed=packed)
    tensors = stored_weight(weight, quant, packed=packed) | ({} if bias is None else {"bias": bias})
    layer.load_state_dict({f"0.{name}": tensor for name, tensor in tensors.items()}, assign=True)
    return layer.eval().requires_grad_(False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (33, 14), (96, 150), (48, 96), (70, 200), (1, 2)])
def test_kernels_multiply_by_the_weights_that_the_numbers_stand_for(
    outputs: int, inputs: int, quant: str, dtype: torch.dtype
) -> None:
    weight, bias = random(outputs, inputs, dtype=dtype, seed=1), random(outputs, dtype=dtype, seed=2)
    layer, meant = layer_of(weight, bias, quant, packed=True), meant_weight(weight, quant)
    for rows in (1, 3, 8, 9, 70):
        x = random(rows, inputs, dtype=dtype)
        expected = (x.double() @ meant.T + bias.double()).to(dtype)
        torch.testing.assert_close(layer(x), expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_nf4_kernels_equal_those_of_bitsandbytes(dtype: torch.dtype) -> None:
    weight, x = random(70, 256, dtype=dtype), random(2, 5, 256, dtype=dtype, seed=1)
    ours, theirs = (layer_of(weight, None, NF4, packed=packed)(x) for packed in (True, False))
    torch.testing.assert_close(ours, theirs, **TOLERANCE[dtype])


def test_kernels_take_no_rows_and_refuse_weights_that_do_not_fit() -> None:
    for quant in QUANTS:
        layer = layer_of(random(40, 64, dtype=torch.float32), None, quant, packed=True)
        assert layer(torch.zeros(0, 64)).shape == (0, 40)
        with pytest.raises(RuntimeError, match=rf"packed_linear_{quant}: weight of shape .* does not fit \[1, 66\]"):
            layer(torch.zeros(1, 66))


def test_what_cannot_be_packed_or_multiplied_is_refused_with_what_to_do() -> None:
    with pytest.raises(CheckpointError, match=r"13 inputs .*--quant int8"):
        stored_weight(random(8, 13, dtype=torch.bfloat16), NF4, packed=True)
    with pytest.raises(CheckpointError, match=r"96 inputs .*--decoder compiled or --quant int8"):
        layer_of(random(8, 96, dtype=torch.float32), None, NF4, packed=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("case", REFERENCE_CASES, ids=lambda case: case.name)
def test_the_eager_decoder_gives_the_logits_of_bitsandbytes_in_transformers(
    case: Any, quant: str, dtype: torch.dtype, tmp_path: Path, suite_cache: Path
) -> None:
    name = str(dtype).removeprefix("torch.")
    server = serve_locally(case, tmp_path, suite_cache, dtype=name, quant=quant).server
    input_ids = torch.tensor([random_prompt(33, seed) for seed in range(3)])
    expected = logits(transformers_model(tmp_path / "checkpoint", quant, dtype), input_ids)
    got = server.head(server.run_ranges(server.embedding(input_ids)))
    # The same operations on the same numbers.
    torch.testing.assert_close(got, expected, rtol=0, atol=ABSOLUTE)


@pytest.fixture(scope="module", params=QUANTS)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, suite_cache: Path) -> Served:
    """A server whose compiled decoder takes one row, and any number."""
    folder = tmp_path_factory.mktemp(request.param)
    return serve_locally(
        GROUPED,
        folder,
        suite_cache,
        decoder="compiled",
        max_batch_size=1,
        decoder_batch_sizes=(1,),
        quant=request.param,
    )


def quant_of(served: Served) -> str:
    return served_model(served.server.repository, "chain").quant


def weights_meant(served: Served) -> Any:
    """transformers on the weights that the numbers stand for."""
    model = AutoModelForCausalLM.from_pretrained(served.checkpoint, dtype=torch.float32).eval()
    for layer in model.model.layers:
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                module.weight.data = meant_weight(module.weight.data, quant_of(served)).float()
    return model


def test_compiled_decoders_step_and_prefill_on_quantized_weights(compiled: Served) -> None:
    server, prompt = compiled.server, torch.tensor([random_prompt(40, 5)])
    expected = logits(weights_meant(compiled), prompt)
    session_id, hidden = server.open(40), server.embedding(prompt)
    outputs = [
        server.run_chain(hidden[:, start:stop], [session_id], [start])
        for start, stop in ((0, 17), (17, 18), (18, 19), (19, 40))
    ]
    server.table.close(session_id)
    torch.testing.assert_close(server.head(torch.cat(outputs, dim=1)), expected, rtol=0, atol=ABSOLUTE)
    whole = server.head(server.run_ranges(hidden))
    torch.testing.assert_close(whole, expected, rtol=0, atol=ABSOLUTE)


def parts_of(checkpoint: Path, cache: Path, quant: str, *, packed: bool = True) -> PreparedParts:
    return PreparedParts(
        CheckpointFolder(checkpoint), torch.float32, DiskCache(cache, None), packed=packed, quant=quant
    )


def test_int8_on_our_kernels_is_as_close_to_the_checkpoint_as_llm_int8(grouped: Served, tmp_path: Path) -> None:
    input_ids = torch.tensor([random_prompt(33, seed) for seed in range(3)])
    parts = parts_of(grouped.checkpoint, tmp_path, INT8)
    ours = Head(parts)(BlockRange(parts, range(GROUPED.blocks)).forward(Embedding(parts)(input_ids)))
    theirs = logits(transformers_model(grouped.checkpoint, INT8, torch.float32), input_ids)
    exact = grouped.reference.logits(input_ids)
    assert (ours - exact).square().mean() < (theirs - exact).square().mean()


@pytest.mark.parametrize(("quant", "most"), [(INT8, 1.2), (NF4, 1.0)])
def test_a_block_is_quantized_once_and_needs_no_bitsandbytes_afterwards(
    grouped: Served, tmp_path: Path, quant: str, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`most` are bytes per weight: some tiles are not full here, and 150 inputs take a scale for each two."""
    parts_of(grouped.checkpoint, tmp_path, quant).load(block_part(0))
    monkeypatch.setitem(sys.modules, "corolla.checkpoint.bitsandbytes", None)
    block = BlockRange(parts_of(grouped.checkpoint, tmp_path, quant), range(0, 1)).layers[0]
    weights = sum(p.numel() for p in grouped.reference.model.model.layers[0].parameters() if p.ndim == 2)
    stored = sum(p.nbytes for name, p in block.named_parameters() if "norm" not in name)
    assert stored < most * weights
    with pytest.raises(ImportError):
        parts_of(grouped.checkpoint, tmp_path, quant).load(block_part(1))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("quant", QUANTS)
def test_layers_multiply_by_mapped_numbers_without_a_copy(
    grouped: Served, tmp_path: Path, quant: str, packed: bool
) -> None:
    blocks = BlockRange(parts_of(grouped.checkpoint, tmp_path, quant, packed=packed), range(0, 1))
    blocks.forward(torch.randn(1, 3, 128))
    ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()
              if str(tmp_path) in line]  # fmt: skip
    for name, parameter in blocks.layers[0].named_parameters():
        assert any(int(start, 16) <= parameter.data_ptr() < int(end, 16) for start, end in ranges), name


def test_the_ends_of_the_model_are_not_quantized_and_stored_once_for_all(grouped: Served, tmp_path: Path) -> None:
    for quant in ("none", *QUANTS):
        for part in (EMBEDDING, HEAD):
            for tensor in parts_of(grouped.checkpoint, tmp_path, quant).load(part).values():
                assert tensor.dtype == torch.float32
    assert len(list(tmp_path.glob("*/*.safetensors"))) == 2


def init(checkpoint: Path, out: Path, *options: str) -> Any:
    return CliRunner().invoke(cli, ["init", str(checkpoint), "--out", str(out), *options])


@pytest.mark.parametrize(
    ("options", "quant", "short"),
    [
        ((), "none", 128), (("--quant", "nf4"), "nf4", 128), (("--device", "cuda"), "nf4", 1),
        (("--device", "cuda", "--quant", "int8"), "int8", 128),
    ],
)  # fmt: skip
def test_init_writes_how_to_quantize(
    grouped: Served, tmp_path: Path, options: tuple[str, ...], quant: str, short: int
) -> None:
    assert init(grouped.checkpoint, tmp_path, *options).exit_code == 0
    for name in ("embed", "chain", "blocks_00_02", "generate"):
        model = served_model(tmp_path, name)
        assert (model.quant, model.max_short_tokens) == (quant, short)


def test_unknown_quantizations_are_refused(grouped: Served, tmp_path: Path) -> None:
    assert "'int4' is not one of 'none', 'int8', 'nf4'" in init(grouped.checkpoint, tmp_path, "--quant", "int4").output
    assert not list(tmp_path.iterdir())
    with pytest.raises(InvalidValueError, match="quant: 'int4' is not allowed; allowed: none, int8, nf4"):
        make_plan(grouped.checkpoint, GROUPED.ranges, quant="int4")
