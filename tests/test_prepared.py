"""Each part of a checkpoint is converted once, by one process, and appears whole or not at all."""

import multiprocessing
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import Served
from corolla.checkpoint import disk_cache
from corolla.checkpoint.disk_cache import DiskCache
from corolla.checkpoint.folder import CheckpointFolder
from corolla.checkpoint.parts import EMBEDDING, HEAD, block_part
from corolla.checkpoint.prepared import PreparedParts
from corolla.errors import CheckpointError, EnvironmentProblemError

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def checkpoint(grouped: Served, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(grouped.checkpoint, tmp_path / "checkpoint"))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def parts_of(checkpoint: Path, cache: Path, dtype: torch.dtype = torch.float32) -> PreparedParts:
    return PreparedParts(CheckpointFolder(checkpoint), dtype, DiskCache(cache, limit=None))


def stored(cache: Path) -> list[Path]:
    """Entries; what a writer is busy with lies apart in `unfinished`."""
    return sorted(file for file in cache.glob("**/*.safetensors") if "unfinished" not in file.parts)


def in_process(act: Callable[[], None]) -> multiprocessing.process.BaseProcess:
    process = FORK.Process(target=act)
    process.start()
    return process


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_parts_hold_the_tensors_of_the_checkpoint_in_the_dtype(
    checkpoint: Path, cache: Path, grouped: Served, dtype: torch.dtype
) -> None:
    parts, model = parts_of(checkpoint, cache, dtype), grouped.reference.model
    modules = {
        EMBEDDING: {"weight": model.model.embed_tokens.weight},
        HEAD: {"norm.weight": model.model.norm.weight, "projection.weight": model.lm_head.weight},
        block_part(2): model.model.layers[2].state_dict(),
    }
    for part, expected in modules.items():
        loaded = parts.load(part)
        assert loaded.keys() == expected.keys()
        for name, tensor in loaded.items():
            assert tensor.dtype == dtype
            assert torch.equal(tensor, expected[name].to(dtype)), name
    assert len(stored(cache)) == 3


def test_tied_checkpoint_has_its_embedding_as_projection(served: Served, cache: Path) -> None:
    head = parts_of(served.checkpoint, cache).load(HEAD)
    assert torch.equal(head["projection.weight"], served.reference.model.lm_head.weight)


def test_part_is_prepared_once_and_then_mapped(checkpoint: Path, cache: Path) -> None:
    parts_of(checkpoint, cache).load(block_part(0))
    (file,) = stored(cache)
    status = file.stat()
    for shard in checkpoint.glob("*.safetensors"):
        shard.chmod(0)
    again = parts_of(checkpoint, cache).load(block_part(0))
    assert (file.stat().st_ino, file.stat().st_size) == (status.st_ino, status.st_size)
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(file))]
    assert mapped, "the tensors are a copy"
    assert again


def test_processes_that_prepare_at_once_write_a_part_once(
    checkpoint: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "writes"

    def slow_save(tensors: dict[str, torch.Tensor], file: Path) -> None:
        with log.open("a") as lines:
            lines.write(f"{os.getpid()}\n")
        time.sleep(0.3)
        save_file(tensors, file)

    monkeypatch.setattr(disk_cache, "save_file", slow_save)
    loads = [in_process(lambda: check_block(checkpoint, cache)) for _ in range(4)]
    for process in loads:
        process.join(30)
    assert [process.exitcode for process in loads] == [0] * 4
    assert len(log.read_text().splitlines()) == 1


def check_block(checkpoint: Path, cache: Path) -> None:
    """Block 1 is what the checkpoint's files hold."""
    whole: dict[str, torch.Tensor] = {}
    for file in checkpoint.glob("*.safetensors"):
        whole |= load_file(file)
    for name, tensor in parts_of(checkpoint, cache).load(block_part(1)).items():
        assert torch.equal(tensor, whole[f"model.layers.1.{name}"])


@pytest.mark.parametrize("when", ["before", "after"])
def test_writer_killed_half_way_leaves_nothing_to_be_read(
    checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Killed with the file half written, or whole but not in its place yet."""

    def save_and_die(tensors: dict[str, torch.Tensor], file: Path) -> None:
        save_file(tensors, file)
        if when == "before":
            os.truncate(file, file.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(disk_cache, "save_file", save_and_die)
        process = in_process(lambda: check_block(checkpoint, cache))
        process.join(30)
    assert process.exitcode == -signal.SIGKILL
    assert stored(cache) == []
    check_block(checkpoint, cache)
    assert len(stored(cache)) == 1
    assert list(cache.glob("**/*.part")) == []


def test_error_while_writing_leaves_nothing_and_says_what_to_do(checkpoint: Path, cache: Path) -> None:
    def load_with_little_room() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        with pytest.raises(EnvironmentProblemError, match=r"cannot be written .*set COROLLA_CACHE"):
            parts_of(checkpoint, cache).load(block_part(0))

    process = in_process(load_with_little_room)
    process.join(30)
    assert process.exitcode == 0
    assert [file for file in cache.glob("**/*") if file.is_file() and file.suffix in (".safetensors", ".part")] == []
    check_block(checkpoint, cache)


def test_folder_that_cannot_be_written_is_named(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentProblemError, match=r"file/cache.*COROLLA_CACHE"):
        parts_of(checkpoint, tmp_path / "file" / "cache").load(block_part(0))


def test_changed_checkpoint_gives_a_new_file(checkpoint: Path, cache: Path) -> None:
    before = parts_of(checkpoint, cache).load(block_part(1))
    shard = next(s for s in checkpoint.glob("*.safetensors") if "model.layers.1.mlp.up_proj.weight" in load_file(s))
    tensors = load_file(shard)
    tensors["model.layers.1.mlp.up_proj.weight"] += 1
    save_file(tensors, shard, metadata={"format": "pt"})
    after = parts_of(checkpoint, cache).load(block_part(1))
    assert torch.equal(after["mlp.up_proj.weight"], before["mlp.up_proj.weight"] + 1)
    assert len(stored(cache)) == 2


def test_dtypes_and_checkpoints_do_not_share_files(checkpoint: Path, cache: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(checkpoint, tmp_path / "other"))
    for folder, dtype in ((checkpoint, torch.float32), (checkpoint, torch.bfloat16), (other, torch.float32)):
        parts_of(folder, cache, dtype).load(EMBEDDING)
    assert len(stored(cache)) == 3


def test_only_the_parts_own_files_are_read(checkpoint: Path, cache: Path) -> None:
    """A server of some blocks needs no other shard than theirs, whole or damaged."""
    needed = set(CheckpointFolder(checkpoint).names("model.layers.0."))
    folder = CheckpointFolder(checkpoint)
    for shard in checkpoint.glob("*.safetensors"):
        if not needed & set(load_file(shard)):
            shard.write_bytes(b"damaged")
    assert PreparedParts(folder, torch.float32, DiskCache(cache, None)).load(block_part(0))
    with pytest.raises(CheckpointError, match=r"cannot be read .*fetch the checkpoint again"):
        PreparedParts(folder, torch.float32, DiskCache(cache, None)).load(HEAD)


def test_missing_part_of_the_checkpoint_is_named(checkpoint: Path, cache: Path) -> None:
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model.layers.3.", "model.layers.33."))
    with pytest.raises(CheckpointError, match=r"the checkpoint holds no tensors model\.layers\.3\.\*"):
        parts_of(checkpoint, cache).load(block_part(3))
