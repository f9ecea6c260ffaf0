"""A checkpoint folder that cannot be used is refused with the file and the reason."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from checkpoints import GROUPED
from conftest import Served
from corolla.checkpoint.disk_cache import DiskCache
from corolla.checkpoint.folder import CheckpointFolder
from corolla.checkpoint.parts import block_part
from corolla.checkpoint.prepared import PreparedParts
from corolla.errors import CheckpointError
from corolla.model.family import family_of

INDEX = "model.safetensors.index.json"
TORCH_INDEX = "pytorch_model.bin.index.json"
TORCH_FILE = "pytorch_model.bin"


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


def torch_files(checkpoint: Path) -> Path:
    """The same checkpoint in files of torch.save."""
    weight_map = json.loads((checkpoint / INDEX).read_text())["weight_map"]
    for shard in shards(checkpoint):
        torch.save(load_file(shard), shard.with_suffix(".bin"))
        shard.unlink()
    (checkpoint / INDEX).unlink()
    renamed = {name: file.replace(".safetensors", ".bin") for name, file in weight_map.items()}
    (checkpoint / TORCH_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": renamed}))
    return checkpoint / next(iter(renamed.values()))


def single_torch_file(checkpoint: Path, content: object = None, **options: Any) -> Path:
    """The same checkpoint in one file of torch.save, or another content in its place."""
    tensors = load_file(single_file(checkpoint))
    (checkpoint / "model.safetensors").unlink()
    torch.save(content or tensors, checkpoint / TORCH_FILE, **options)
    return checkpoint / TORCH_FILE


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def remove_weights(checkpoint: Path) -> None:
    for file in [*shards(checkpoint), checkpoint / INDEX]:
        file.unlink()


def edit_config(checkpoint: Path, **changes: object) -> None:
    file = checkpoint / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


@pytest.mark.parametrize("store", [single_file, torch_files, single_torch_file])
def test_every_format_holds_the_same_tensors(checkpoint: Path, store: Callable[[Path], Path]) -> None:
    assert len(shards(checkpoint)) > 1
    names = CheckpointFolder(checkpoint).names("")
    sharded = {name: tensor.clone() for name, tensor in CheckpointFolder(checkpoint).read(names).items()}
    store(checkpoint)
    other = CheckpointFolder(checkpoint)
    assert sorted(other.names("")) == sorted(names)
    assert all(torch.equal(tensor, sharded[name]) for name, tensor in other.read(names).items())


def test_safetensors_are_preferred(checkpoint: Path) -> None:
    torch.save({}, checkpoint / TORCH_FILE)
    assert CheckpointFolder(checkpoint).names("model.norm.")


class KeptFolder(CheckpointFolder):
    """Holds on to what was read, so that it stays mapped."""

    def read(self, names: list[str]) -> dict[str, torch.Tensor]:
        tensors = super().read(names)
        self.__dict__.setdefault("kept", []).append(tensors)
        return tensors


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_some_blocks_of_a_checkpoint_read_little_more_than_their_own_bytes(tmp_path: Path, suffix: str) -> None:
    """Blocks 4 to 8 of 32, six to a shard. What is counted: bytes read, and pages of the files that were touched."""
    config = LlamaConfig(
        hidden_size=256, intermediate_size=768, num_hidden_layers=32, num_attention_heads=4, vocab_size=64
    )
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        block = family_of(config).block(config, 0)
    weight_map = {}
    for first in range(0, 32, 6):
        indices = range(first, min(first + 6, 32))
        file = f"shard-{first}.{suffix}"
        shard = {f"model.layers.{i}.{n}": torch.ones(w.shape) for i in indices for n, w in block.named_parameters()}
        save_file(shard, tmp_path / file) if suffix == "safetensors" else torch.save(shard, tmp_path / file)
        weight_map |= dict.fromkeys(shard, file)
    (tmp_path / (INDEX if suffix == "safetensors" else TORCH_INDEX)).write_text(json.dumps({"weight_map": weight_map}))

    parts = PreparedParts(KeptFolder(tmp_path), torch.bfloat16, DiskCache(tmp_path / "cache", None))
    before = bytes_read()
    for index in range(4, 8):
        parts.load(block_part(index))
    needed = 4 * sum(weight.nbytes for weight in block.parameters())
    assert needed <= bytes_read() - before + bytes_touched(f".{suffix}", tmp_path) < 1.1 * needed


def bytes_read() -> int:
    """By this process so far, by way of system calls."""
    return int(dict(line.split(":") for line in Path("/proc/self/io").read_text().splitlines())["rchar"])


def bytes_touched(suffix: str, folder: Path) -> int:
    """Of this process's mappings of the folder's files: pages that it has used, or the kernel mapped beside them."""
    total, counted = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if "-" in name and len(rest) >= 4:
            counted = line.endswith(suffix) and Path(rest[-1]).parent == folder
        elif counted and name == "Rss:":
            total += int(rest[0]) * 1024
    return total


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
    ("no weights", lambda c: remove_weights(c),
     f"holds none of {INDEX}, model.safetensors, {TORCH_INDEX}, {TORCH_FILE}"),
    ("missing shard", lambda c: shards(c)[1].unlink(), "names files that do not exist: .*model-00002-of-"),
    ("index no JSON", lambda c: (c / INDEX).write_text("{"), "not an index of weight files"),
    ("index a list", lambda c: (c / INDEX).write_text("[1]"), "not an index of weight files"),
    ("index without map", lambda c: (c / INDEX).write_text("{}"), "not an index of weight files .*weight_map"),
    ("map a list", lambda c: (c / INDEX).write_text('{"weight_map": ["a"]}'), "not an index of weight files"),
    ("map to a number", lambda c: (c / INDEX).write_text('{"weight_map": {"a": 1}}'), "not an index of weight files"),
    ("index pointing nowhere", lambda c: (c / INDEX).write_text('{"weight_map": {"a": "b.safetensors"}}'),
     "do not exist: .*b.safetensors"),
    ("damaged single file", lambda c: single_file(c).write_bytes(b"\x08\0\0\0\0\0\0\0damaged!"), "cannot be read"),
    ("empty single file", lambda c: single_file(c).write_bytes(b""), "cannot be read"),
    ("empty torch file", lambda c: single_torch_file(c).write_bytes(b""), "pytorch_model.bin: cannot be read"),
    ("truncated torch file", lambda c: truncate(single_torch_file(c)), "pytorch_model.bin: cannot be read"),
    ("old torch file", lambda c: single_torch_file(c, _use_new_zipfile_serialization=False),
     "older than 1.6.*save it again"),
    ("torch file with code", lambda c: single_torch_file(c, {"a": Path("b")}), "not unpickled as that may run code"),
    ("torch file of a list", lambda c: single_torch_file(c, [torch.ones(1)]), "something else than tensors by name"),
    ("missing torch shard", lambda c: torch_files(c).unlink(), f"{TORCH_INDEX}: names files that do not exist"),
]  # fmt: skip


def open_all(checkpoint: Path) -> None:
    folder = CheckpointFolder(checkpoint)
    folder.fetch()
    folder.names("")


@pytest.mark.parametrize(("damage", "message"), [d[1:] for d in DAMAGES], ids=[d[0] for d in DAMAGES])
def test_unusable_folder_is_refused(checkpoint: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(checkpoint)
    with pytest.raises(CheckpointError, match=message):
        open_all(checkpoint)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_damaged_shard_is_named_when_it_is_read(checkpoint: Path, suffix: str) -> None:
    if suffix == "bin":
        torch_files(checkpoint)
    for shard in checkpoint.glob(f"*.{suffix}"):
        truncate(shard)
    folder = CheckpointFolder(checkpoint)
    with pytest.raises(CheckpointError, match=rf"model-000..-of-.*\.{suffix}: cannot be read .*fetch the checkpoint"):
        folder.read(["model.norm.weight"])


def test_tensor_that_is_in_no_file_is_named(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no tensor 'model.norm.bias'"):
        CheckpointFolder(checkpoint).read(["model.norm.bias"])


@pytest.mark.parametrize("file", [INDEX, TORCH_INDEX])
def test_tensor_that_the_index_places_in_the_wrong_file_is_an_error(checkpoint: Path, file: str) -> None:
    if file == TORCH_INDEX:
        torch_files(checkpoint)
    index = json.loads((checkpoint / file).read_text())
    files = sorted(set(index["weight_map"].values()))
    name = "model.norm.weight"
    index["weight_map"][name] = next(file for file in files if file != index["weight_map"][name])
    (checkpoint / file).write_text(json.dumps(index))
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
