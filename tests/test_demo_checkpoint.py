"""The demo checkpoint: a whole Hugging Face folder or none, trained again only when it would differ."""

import json
import subprocess
import sys
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from corolla.checkpoint import demo
from corolla.checkpoint.demo import DemoRecipe, ensure_demo_checkpoint, train_demo_checkpoint
from corolla.cli.demo_checkpoint import command
from corolla.errors import CheckpointError

TINY = DemoRecipe(
    vocab_size=320, hidden_size=32, intermediate_size=48, num_blocks=2, num_heads=4, num_kv_heads=2,
    max_positions=64, steps=3, step_tokens=64, windows=(16, 64), warmup_steps=1,
)  # fmt: skip
TEXT = "# Petals\n\nA corolla is all the petals of a flower, held together.\n" * 4


@pytest.fixture
def corpus(tmp_path: Path) -> list[Path]:
    file = tmp_path / "text.md"
    file.write_text(TEXT)
    return [file]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "demo"


def _siblings(out: Path) -> set[str]:
    return {path.name for path in out.parent.iterdir()} - {f"{out.name}.lock"}


def _train_in_process(arguments: tuple[list[Path], Path]) -> bool:
    return ensure_demo_checkpoint(*arguments, TINY, progress=False)


def test_default_recipe_has_3_to_5_million_parameters_and_grouped_attention() -> None:
    config = DemoRecipe().config()
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    assert 3e6 <= sum(parameter.numel() for parameter in model.parameters()) <= 5e6
    assert config.num_hidden_layers == 8
    assert config.num_key_value_heads < config.num_attention_heads


def test_folder_is_a_sharded_float32_checkpoint_that_loads(corpus: list[Path], out: Path) -> None:
    train_demo_checkpoint(corpus, out, TINY, progress=False)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    shards = set(index["weight_map"].values())
    assert len(shards) >= 2
    assert all((out / shard).is_file() for shard in shards)
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert config["vocab_size"] == TINY.vocab_size
    assert (out / "generation_config.json").is_file()
    assert _siblings(out) == {out.name}

    tokenizer, model = AutoTokenizer.from_pretrained(out), AutoModelForCausalLM.from_pretrained(out)
    assert len(tokenizer) == TINY.vocab_size
    prompt = tokenizer("A corolla", return_tensors="pt")
    assert tokenizer.eos_token_id not in prompt.input_ids
    assert model.generate(**prompt, max_new_tokens=4, do_sample=False).shape[1] > prompt.input_ids.shape[1]


@pytest.mark.parametrize("text", ["plain", " two  spaces\n\n\ttab", "Blüte, 花, 🌸👩‍🚀", "null \0 and \x7f"])
def test_tokenizer_gives_any_text_back(corpus: list[Path], text: str) -> None:
    tokenizer = demo._train_tokenizer([file.read_text() for file in corpus], TINY.vocab_size)
    assert tokenizer.get_vocab_size() == TINY.vocab_size
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_same_recipe_gives_the_same_bytes(corpus: list[Path], out: Path) -> None:
    torch.manual_seed(1)
    train_demo_checkpoint(corpus, out, TINY, progress=False)
    torch.manual_seed(2)
    again = out.with_name("again")
    train_demo_checkpoint(corpus, again, TINY, progress=False)
    files = sorted(path.name for path in out.iterdir())
    assert files == sorted(path.name for path in again.iterdir())
    assert all((out / name).read_bytes() == (again / name).read_bytes() for name in files)


def test_trains_again_only_for_another_text_or_recipe(corpus: list[Path], out: Path) -> None:
    assert ensure_demo_checkpoint(corpus, out, TINY, progress=False)
    assert not ensure_demo_checkpoint(corpus, out, TINY, progress=False)
    corpus[0].write_text(TEXT + "More.\n")
    assert ensure_demo_checkpoint(corpus, out, TINY, progress=False)
    assert ensure_demo_checkpoint(corpus, out, replace(TINY, seed=1), progress=False)
    assert not ensure_demo_checkpoint(corpus, out, replace(TINY, seed=1), progress=False)


def test_of_callers_at_once_one_trains(corpus: list[Path], out: Path) -> None:
    with get_context("spawn").Pool(2) as pool:
        assert sorted(pool.map(_train_in_process, [(corpus, out)] * 2, chunksize=1)) == [False, True]


@pytest.mark.parametrize("failing", ["_train_model", "_fingerprint"])
def test_failed_training_leaves_what_was_there(
    corpus: list[Path], out: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(demo, failing, fail)
        with pytest.raises(RuntimeError, match="out of luck"):
            train_demo_checkpoint(corpus, out, TINY, progress=False)
    assert _siblings(out) == set()

    train_demo_checkpoint(corpus, out, TINY, progress=False)
    before = (out / demo.FINGERPRINT_FILE).read_text()
    monkeypatch.setattr(demo, failing, fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        train_demo_checkpoint(corpus, out, replace(TINY, seed=1), progress=False)
    assert _siblings(out) == {out.name}
    assert (out / demo.FINGERPRINT_FILE).read_text() == before


def test_killed_training_leaves_no_folder_and_no_held_lock(corpus: list[Path], out: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from corolla.checkpoint import demo\n"
        "def wait(*_): print('training', flush=True); sys.stdin.read()\n"
        "demo._train_model = wait\n"
        "demo.train_demo_checkpoint([Path(sys.argv[1])], Path(sys.argv[2]), progress=False)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, corpus[0], out], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "training\n"
        process.kill()
    assert _siblings(out) == set()
    assert ensure_demo_checkpoint(corpus, out, TINY, progress=False)


def test_never_replaces_a_folder_that_is_something_else(corpus: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "precious"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    options = ["--out", str(out), "--corpus", str(corpus[0])]
    for arguments in (options, [*options, "--force"]):
        error = CliRunner().invoke(command, arguments).exception
        assert isinstance(error, CheckpointError)
        assert "is no demo checkpoint" in str(error)
    assert (out / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize(("content", "message"), [(b"", "no text"), (b"\xff\xfe", "is not UTF-8")])
def test_corpus_that_is_no_text_is_an_error(tmp_path: Path, out: Path, content: bytes, message: str) -> None:
    file = tmp_path / "bad.md"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        train_demo_checkpoint([file], out, TINY, progress=False)
    assert not out.exists()


def test_command_without_any_documentation_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corolla.cli.demo_checkpoint._project_root", lambda: tmp_path)
    error = CliRunner().invoke(command, []).exception
    assert isinstance(error, CheckpointError)
    assert "--corpus" in str(error)
