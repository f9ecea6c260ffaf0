"""Checkpoints that transformers saved quantized by bitsandbytes are served with their very numbers, or refused.

The reference of the eager decoder is transformers on the same folder, that of our kernels what they make of the
unquantized checkpoint, which test_quantization compares with transformers.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from checkpoints import GROUPED, random_prompt
from conftest import Served
from corolla.bench.serving import make_plan as bench_plan
from corolla.checkpoint.bitsandbytes import layers
from corolla.checkpoint.disk_cache import DiskCache
from corolla.checkpoint.folder import CheckpointFolder
from corolla.checkpoint.parts import EMBEDDING, HEAD, block_part
from corolla.checkpoint.prepared import PreparedParts
from corolla.cli.main import cli
from corolla.errors import CheckpointError, InvalidValueError
from corolla.model.block_range import BlockRange
from corolla.model.ends import Embedding, Head
from corolla.quantization import INT8, NF4, NONE
from local_server import LocalServer, make_plan, served_model

pytestmark = pytest.mark.usefixtures("kernels")

ABSOLUTE = 1e-4
BLOCKS = range(GROUPED.blocks)
LAYER = "model.layers.1.mlp.down_proj"


@dataclass(frozen=True)
class Saved:
    """A checkpoint that transformers quantized to `quant` and saved, and the unquantized one it was made of."""

    folder: Path
    plain: Path
    quant: str

    def reference(self, input_ids: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The logits of transformers, with NF4 layers that multiply in the dtype, as in test_quantization.

        It leaves what is not quantized in the dtype of the checkpoint, whatever it is told.
        """
        model = AutoModelForCausalLM.from_pretrained(self.folder, device_map="cpu").eval()
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        for module in model.modules():
            if isinstance(module, layers.Linear4bit):
                module.support_avx512bf16_for_cpu = False
                module.compute_dtype = dtype
        with torch.inference_mode():
            return model(input_ids, use_cache=False).logits.float()


SETTINGS = {
    "int8": {"load_in_8bit": True},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4-double": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
}


@pytest.fixture(scope="module")
def checkpoints(grouped: Served, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Saved]:
    """By the names in SETTINGS; quantized in float32 and saved in several files."""
    saved = {}
    for name, settings in SETTINGS.items():
        model = AutoModelForCausalLM.from_pretrained(
            grouped.checkpoint,
            dtype=torch.float32,
            quantization_config=BitsAndBytesConfig(**settings),
            device_map="cpu",
        )
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder, max_shard_size="200KB")
        saved[name] = Saved(folder, grouped.checkpoint, name.partition("-")[0])
    return saved


@pytest.fixture(params=SETTINGS)
def saved(request: pytest.FixtureRequest, checkpoints: dict[str, Saved]) -> Saved:
    return checkpoints[request.param]


def parts_of(
    checkpoint: Path, cache: Path, quant: str, *, packed: bool, dtype: torch.dtype = torch.float32
) -> PreparedParts:
    return PreparedParts(CheckpointFolder(checkpoint), dtype, DiskCache(cache, None), packed=packed, quant=quant)


def prompts() -> torch.Tensor:
    return torch.tensor([random_prompt(33, seed) for seed in range(3)])


def logits(parts: PreparedParts) -> torch.Tensor:
    return Head(parts)(BlockRange(parts, BLOCKS).forward(Embedding(parts)(prompts())))


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_the_eager_decoder_gives_the_logits_of_transformers(saved: Saved, tmp_path: Path, suite_cache: Path) -> None:
    server = LocalServer(make_plan(saved.folder, GROUPED.ranges, quant=saved.quant), tmp_path, suite_cache)
    got = server.head(server.run_ranges(server.embedding(prompts())))
    # The same operations on the same numbers.
    torch.testing.assert_close(got, saved.reference(prompts()), rtol=0, atol=ABSOLUTE)


def test_eager_decoders_serve_it_in_another_dtype_than_it_was_saved_in(saved: Saved, tmp_path: Path) -> None:
    parts = parts_of(saved.folder, tmp_path, saved.quant, packed=False, dtype=torch.bfloat16)
    torch.testing.assert_close(logits(parts), saved.reference(prompts(), torch.bfloat16), rtol=0, atol=ABSOLUTE)


def test_what_eager_decoders_map_are_the_tensors_of_the_checkpoint(saved: Saved, tmp_path: Path) -> None:
    expected = all_tensors(saved.folder)
    loaded = parts_of(saved.folder, tmp_path, saved.quant, packed=False).load(block_part(1))
    for name, tensor in loaded.items():
        assert torch.equal(tensor, expected.pop(f"model.layers.1.{name}")), name
    assert {name.rpartition(".")[2] for name in expected if name.startswith("model.layers.1.")} <= {"weight_format"}


@pytest.mark.parametrize("name", ["int8", "nf4-double"])
def test_our_kernels_read_the_numbers_that_quantizing_gives(
    checkpoints: dict[str, Saved], tmp_path: Path, name: str
) -> None:
    saved = checkpoints[name]
    kept, made = (parts_of(folder, tmp_path, saved.quant, packed=True) for folder in (saved.folder, saved.plain))
    for part in (EMBEDDING, HEAD, *map(block_part, BLOCKS)):
        ours, theirs = kept.load(part), made.load(part)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert torch.equal(logits(kept), logits(made))


@pytest.mark.parametrize("name", ["nf4", "nf4-double"])
def test_our_kernels_give_the_logits_of_transformers_for_nf4(
    checkpoints: dict[str, Saved], tmp_path: Path, name: str
) -> None:
    saved = checkpoints[name]
    got = logits(parts_of(saved.folder, tmp_path, NF4, packed=True))
    # The same weights; sums in another order.
    torch.testing.assert_close(got, saved.reference(prompts()), rtol=0, atol=ABSOLUTE)


def init(checkpoint: object, out: Path, *options: str) -> Result:
    return CliRunner().invoke(cli, ["init", str(checkpoint), "--out", str(out), *options])


@pytest.mark.parametrize("options", [(), ("--device", "cuda"), ("--dtype", "float32")])
def test_init_serves_it_as_it_is(saved: Saved, tmp_path: Path, options: tuple[str, ...]) -> None:
    for more in ((), ("--quant", saved.quant)):
        assert init(saved.folder, tmp_path, *options, *more).exit_code == 0
        model = served_model(tmp_path, "chain")
        assert (model.quant, model.dtype.name) == (saved.quant, "float32" if "float32" in options else "bfloat16")
    assert bench_plan(saved.folder, "auto").quant == saved.quant


def test_other_quantizations_of_it_are_refused(saved: Saved, tmp_path: Path) -> None:
    for quant in {NONE, INT8, NF4} - {saved.quant}:
        message = f"quant: '{quant}' is not allowed; allowed: {saved.quant}, as the checkpoint is quantized already"
        with pytest.raises(InvalidValueError, match=message):
            raise init(saved.folder, tmp_path, "--quant", quant).exception or AssertionError
        with pytest.raises(InvalidValueError, match=message):
            parts_of(saved.folder, tmp_path, quant, packed=True)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def changed(checkpoints: dict[str, Saved], tmp_path: Path) -> Callable[..., Path]:
    """Copies a checkpoint, `int8` or `nf4`, with other settings, and with tensors that `edit` changed."""

    def change(quant: str, edit: Callable[[dict[str, torch.Tensor]], None] | None = None, **settings: Any) -> Path:
        source, folder = checkpoints["int8" if quant == INT8 else "nf4-double"].folder, tmp_path / "changed"
        shutil.copytree(source, folder)
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] |= settings
        (folder / "config.json").write_text(json.dumps(config))
        if edit is not None:
            tensors = all_tensors(folder)
            for file in folder.glob("model*"):
                file.unlink()
            edit(tensors)
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return change


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type: 'fp4' is not allowed; allowed: nf4"),
        ({"bnb_4bit_quant_type": None}, "bnb_4bit_quant_type: 'fp4' is not allowed; allowed: nf4"),
        ({"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage: 'bfloat16' is not allowed; allowed: uint8"),
        ({"load_in_8bit": True}, r"load_in_8bit, load_in_4bit: \(True, True\) is not allowed; allowed: one of them"),
        ({"load_in_4bit": False}, r"load_in_8bit, load_in_4bit: \(False, False\) is not allowed; allowed: one of them"),
        ({"llm_int8_skip_modules": []}, r"llm_int8_skip_modules: \[\] is not allowed; allowed: null, or names with"),
        ({"llm_int8_skip_modules": ["lm_head", "model.layers.3.mlp"]}, "names with lm_head .* and no layer of a block"),
        ({"llm_int8_skip_modules": ["lm_head", "up_proj"]}, "names with lm_head .* and no layer of a block"),
        ({"llm_int8_skip_modules": ["("]}, "names with lm_head .* and no layer of a block"),
        ({"llm_int8_skip_modules": 3}, "names with lm_head .* and no layer of a block"),
        ({"quant_method": "gptq"}, "quant_method: 'gptq' is not allowed; allowed: bitsandbytes .*--quant int8 or nf4"),
        ({"quant_method": "awq"}, "quant_method: 'awq' is not allowed; allowed: bitsandbytes .*--quant int8 or nf4"),
    ],
)
def test_settings_that_cannot_be_served_are_refused(
    changed: Callable[..., Path], tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidValueError, match=rf"config\.json: quantization_config.*{message}"):
        raise init(changed(NF4, **settings), tmp_path / "out").exception or AssertionError
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "value", "allowed"), [("llm_int8_threshold", 0.0, "6.0"), ("llm_int8_has_fp16_weight", True, "False")]
)
def test_settings_of_int8_that_cannot_be_served_are_refused(
    changed: Callable[..., Path], name: str, value: object, allowed: str
) -> None:
    with pytest.raises(InvalidValueError, match=f"{name}: {value} is not allowed; allowed: {allowed}"):
        CheckpointFolder(changed(INT8, **{name: value}))


def test_skipping_the_head_by_name_and_old_configs_are_served(changed: Callable[..., Path]) -> None:
    folder = changed(NF4, llm_int8_skip_modules=["lm_head", "multi_modal_projector"], quant_method=None)
    assert CheckpointFolder(folder).quant == NF4


def replace(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, torch.Tensor]], None]:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = make(tensors[name])

    return edit


def drop(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


def state_with(**more: object) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda state: torch.tensor(list(json.dumps(json.loads(bytes(state.tolist())) | more).encode())).byte()


STATE = f"{LAYER}.weight.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(
    ("quant", "edit", "message"),
    [
        (NF4, replace(STATE, state_with(blocksize=128)), "blocksize: 128 is not allowed; allowed: 64"),
        (NF4, replace(STATE, state_with(nested_blocksize=128)), "nested_blocksize: 128 is not allowed; allowed: 256"),
        (NF4, replace(STATE, state_with(shape=[150, 128])), r"shape: \[150, 128\] is not allowed; allowed: \[128, 150"),
        (NF4, replace(STATE, lambda state: state[:-4]), "bitsandbytes__nf4' cannot be read"),
        (NF4, replace(STATE, state_with(blocks=1)), "bitsandbytes__nf4' cannot be read"),
        (NF4, drop(STATE), "holds no 'mlp.down_proj.weight.quant_state.bitsandbytes__nf4'"),
        (NF4, drop(f"{LAYER}.weight.absmax"), "holds no 'mlp.down_proj.weight.absmax'"),
        (NF4, drop(f"{LAYER}.weight.nested_absmax"), "'mlp.down_proj.weight.absmax' has the dtype torch.uint8"),
        (NF4, replace(f"{LAYER}.weight.quant_map", lambda code: -code), "quant_map' is not that"),
        (NF4, replace(f"{LAYER}.weight", lambda w: w[:-1].clone()), r"down_proj.weight' has the shape \[9599, 1\]"),
        (INT8, replace(f"{LAYER}.weight_format", lambda f: f + 1), "weight_format: 1 is not allowed; allowed: 0"),
        (INT8, drop(f"{LAYER}.SCB"), "holds no 'mlp.down_proj.SCB'"),
        (INT8, replace(f"{LAYER}.weight", lambda w: w.float()), "has the dtype torch.float32, .* asks for torch.int8"),
    ],
)  # fmt: skip
def test_tensors_that_mean_something_else_are_refused(
    changed: Callable[..., Path], tmp_path: Path, quant: str, edit: Any, message: str
) -> None:
    folder = changed(quant, edit)
    for packed in (True, False):
        with pytest.raises(CheckpointError, match=f"block_001: .*{message}"):
            parts_of(folder, tmp_path / "cache", quant, packed=packed).load(block_part(1))
    assert not list(tmp_path.glob("cache/**/*.safetensors"))


def test_a_quantized_head_is_refused(changed: Callable[..., Path], tmp_path: Path) -> None:
    folder = changed(INT8, replace("lm_head.weight", lambda weight: weight.to(torch.int8)))
    with pytest.raises(CheckpointError, match=r"head: .* dtype torch.int8, .* asks for floating-point numbers"):
        parts_of(folder, tmp_path / "cache", INT8, packed=True).load(HEAD)
