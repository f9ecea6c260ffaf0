"""Which checkpoints servers take for the same model."""

import json
import random
import shutil
from pathlib import Path

import pytest

from corolla.checkpoint.hub import HubModel
from corolla.checkpoint.identity import ModelIdentity


@pytest.fixture
def single(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "model.safetensors").write_bytes(random.Random(0).randbytes(1_000_000))
    return folder


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = tmp_path / "sharded"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))
    for part in (1, 2):
        (folder / f"model-{part}.safetensors").write_bytes(bytes(100))
    index = {"metadata": {"total_size": 200}, "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_model_of_the_hub_is_its_name_and_commit() -> None:
    assert ModelIdentity.of(HubModel("org/name", "0" * 40)) == ModelIdentity("org/name", "0" * 40)
    assert ModelIdentity.of(HubModel("org/name", "0" * 40), "ours") == ModelIdentity("ours", "0" * 40)


def test_folder_is_its_name_wherever_it_lies(single: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "other"
    shutil.copytree(single, elsewhere)
    first, second = ModelIdentity.of(single), ModelIdentity.of(elsewhere)
    assert (first.name, second.name) == ("tiny", "other")
    assert first.revision == second.revision
    assert ModelIdentity.of(elsewhere, "tiny") == first


def test_other_weights_in_a_single_file_are_another_revision(single: Path) -> None:
    before = ModelIdentity.of(single)
    (single / "model.safetensors").write_bytes(random.Random(1).randbytes(1_000_000))
    assert ModelIdentity.of(single) != before


def test_part_of_the_weight_files_is_enough(sharded: Path) -> None:
    whole = ModelIdentity.of(sharded)
    (sharded / "model-2.safetensors").unlink()
    assert ModelIdentity.of(sharded) == whole


@pytest.mark.parametrize(
    ("name", "content", "same"),
    [
        ("config.json", {"hidden_size": 64, "model_type": "llama", "transformers_version": "5.0"}, True),
        ("config.json", {"hidden_size": 128, "model_type": "llama"}, False),
        ("model.safetensors.index.json", {"metadata": {"total_size": 100}, "weight_map": {}}, False),
    ],
)
def test_config_and_index_make_the_revision(sharded: Path, name: str, content: object, same: bool) -> None:
    before = ModelIdentity.of(sharded)
    (sharded / name).write_text(json.dumps(content))
    assert (ModelIdentity.of(sharded) == before) == same
