"""A checkpoint folder that cannot be used is refused with the file and the reason."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import GROUPED
from conftest import Served
from corolla.checkpoint.folder import CheckpointFolder
from corolla.errors import CheckpointError
from corolla.model.family import family_of

INDEX = "model.safetensors.index.json"


@pytest.fixture
def checkpoint(grouped: Served, tmp_path: Path) -> Path:
    """A sharded checkpoint that a test may change."""
    return Path(shutil.copytree(grouped.checkpoint, tmp_path / "checkpoint"))


def shards(checkpoint: Path) -> list[Path]:
    return sorted(checkpoint.glob("*.safetensors"))


def single_file(checkpoint: Path) -> Path:
    """The same checkpoint without an index."""
    tensors: dict[str, torch.Tensor] = {}
    for shard in shards(checkpoint):
        tensors |= load_file(shard)
        shard.unlink()
    (checkpoint / INDEX).unlink()
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    return checkpoint / "model.safetensors"


def remove_weights(checkpoint: Path) -> None:
    for file in [*shards(checkpoint), checkpoint / INDEX]:
        file.unlink()


def edit_config(checkpoint: Path, **changes: object) -> None:
    file = checkpoint / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def test_sharded_and_single_file_hold_the_same_tensors(checkpoint: Path) -> None:
    assert len(shards(checkpoint)) > 1
    names = CheckpointFolder(checkpoint).names("")
    sharded = CheckpointFolder(checkpoint).read(names)
    single_file(checkpoint)
    single = CheckpointFolder(checkpoint)
    assert sorted(single.names("")) == sorted(names)
    assert all(torch.equal(tensor, sharded[name]) for name, tensor in single.read(names).items())


def test_names_of_block_1_are_not_those_of_block_10(checkpoint: Path) -> None:
    single_file(checkpoint)
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.layers.10.extra"] = torch.zeros(1)
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    assert len(CheckpointFolder(checkpoint).names("model.layers.1.")) == 9


DAMAGES: list[tuple[str, Callable[[Path], object], str]] = [
    ("no folder", lambda c: shutil.rmtree(c), "no folder .*give a folder in Hugging Face format"),
    ("no config", lambda c: (c / "config.json").unlink(), "holds no config.json"),
    ("config no JSON", lambda c: (c / "config.json").write_text("{"), "config.json: "),
    ("config a list", lambda c: (c / "config.json").write_text("[]"), "config.json: "),
    ("no model type", lambda c: edit_config(c, model_type=None, architectures=None), "config.json: .*model_type"),
    ("unknown model type", lambda c: edit_config(c, model_type="daisy"), "config.json: .*daisy"),
    ("config out of range", lambda c: edit_config(c, num_hidden_layers="many"), "config.json: "),
    ("no weights", lambda c: remove_weights(c), f"neither model.safetensors nor {INDEX}"),
    ("missing shard", lambda c: shards(c)[1].unlink(), "names files that do not exist: .*model-00002-of-"),
    ("index no JSON", lambda c: (c / INDEX).write_text("{"), "not a safetensors index"),
    ("index a list", lambda c: (c / INDEX).write_text("[1]"), "not a safetensors index"),
    ("index without map", lambda c: (c / INDEX).write_text("{}"), "not a safetensors index .*weight_map"),
    ("map a list", lambda c: (c / INDEX).write_text('{"weight_map": ["a"]}'), "not a safetensors index"),
    ("map to a number", lambda c: (c / INDEX).write_text('{"weight_map": {"a": 1}}'), "not a safetensors index"),
    ("index pointing nowhere", lambda c: (c / INDEX).write_text('{"weight_map": {"a": "b.safetensors"}}'),
     "do not exist: .*b.safetensors"),
    ("damaged single file", lambda c: single_file(c).write_bytes(b"\x08\0\0\0\0\0\0\0damaged!"), "cannot be read"),
    ("empty single file", lambda c: single_file(c).write_bytes(b""), "cannot be read"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "message"), [d[1:] for d in DAMAGES], ids=[d[0] for d in DAMAGES])
def test_unusable_folder_is_refused(checkpoint: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(checkpoint)
    with pytest.raises(CheckpointError, match=message):
        CheckpointFolder(checkpoint)


def test_damaged_shard_is_named_when_it_is_read(checkpoint: Path) -> None:
    for shard in shards(checkpoint):
        shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    folder = CheckpointFolder(checkpoint)
    with pytest.raises(CheckpointError, match=r"model-000..-of-.*\.safetensors: cannot be read .*fetch the checkpoint"):
        folder.read(["model.norm.weight"])


def test_tensor_that_is_in_no_file_is_named(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no tensor 'model.norm.bias'"):
        CheckpointFolder(checkpoint).read(["model.norm.bias"])


def test_tensor_that_the_index_places_in_the_wrong_file_is_an_error(checkpoint: Path) -> None:
    index = json.loads((checkpoint / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    name = "model.norm.weight"
    index["weight_map"][name] = next(file for file in files if file != index["weight_map"][name])
    (checkpoint / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"cannot be read .*model.norm.weight"):
        CheckpointFolder(checkpoint).read([name])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; "
                                 "supported: bloom, falcon, gemma, llama, mistral, mixtral, qwen2, qwen3"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8,
                              "long_factor": [1.0] * 8, "original_max_position_embeddings": 128}},
         "rope type 'longrope' is not supported; supported: default, linear, dynamic, yarn, llama3"),
    ],
    ids=["model type", "rope type"],
)  # fmt: skip
def test_model_that_is_not_supported_is_refused_with_what_is(
    checkpoint: Path, changes: dict[str, object], message: str
) -> None:
    edit_config(checkpoint, **changes)
    config = CheckpointFolder(checkpoint).config
    with pytest.raises(CheckpointError, match=message):
        family_of(config)


def test_fingerprint_follows_config_and_files(checkpoint: Path) -> None:
    seen = {CheckpointFolder(checkpoint).fingerprint()}
    assert CheckpointFolder(checkpoint).fingerprint() in seen
    edit_config(checkpoint, rms_norm_eps=1e-3)
    seen.add(CheckpointFolder(checkpoint).fingerprint())
    shard = shards(checkpoint)[0]
    shard.write_bytes(shard.read_bytes())
    seen.add(CheckpointFolder(checkpoint).fingerprint())
    single_file(checkpoint)
    seen.add(CheckpointFolder(checkpoint).fingerprint())
    assert len(seen) == 4


def test_random_checkpoint_is_the_same_for_the_same_seed(grouped: Served, tmp_path: Path) -> None:
    GROUPED.write(tmp_path)
    for shard in shards(grouped.checkpoint):
        assert shard.read_bytes() == (tmp_path / shard.name).read_bytes()
