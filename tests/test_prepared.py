"""Each part of a checkpoint is converted once, by one process, and appears whole or not at all."""

import errno
import json
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
from test_checkpoint_folder import single_file, single_torch_file, torch_files

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


@pytest.mark.parametrize("store", [None, single_file, torch_files, single_torch_file])
def test_second_start_reads_no_weight_file(checkpoint: Path, cache: Path, store: Callable[[Path], Path] | None) -> None:
    """Not even a header: nonsense is in the files, of which only the size and the time are looked at."""
    if store is not None:
        store(checkpoint)
    names = (EMBEDDING, HEAD, *map(block_part, range(4)))
    first = {name: parts_of(checkpoint, cache).load(name) for name in names}
    for file in [*checkpoint.glob("*.safetensors"), *checkpoint.glob("*.bin")]:
        status = file.stat()
        file.write_bytes(bytes(status.st_size))
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    second = {name: parts_of(checkpoint, cache).load(name) for name in names}
    assert all(torch.equal(second[part][name], tensor) for part in names for name, tensor in first[part].items())


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


def test_frequencies_that_old_checkpoints_store_are_left_out(checkpoint: Path, cache: Path) -> None:
    shard = next(iter(checkpoint.glob("*.safetensors")))
    index = checkpoint / "model.safetensors.index.json"
    name = "model.layers.1.self_attn.rotary_emb.inv_freq"
    save_file(load_file(shard) | {name: torch.ones(8)}, shard, metadata={"format": "pt"})
    index.write_text(index.read_text().replace('"weight_map": {', f'"weight_map": {{"{name}": "{shard.name}",'))
    assert len(parts_of(checkpoint, cache).load(block_part(1))) == 9


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


def damage_block(checkpoint: Path, change: Callable[[dict[str, torch.Tensor], str], object]) -> None:
    """Changes the up projection of block 1 in its shard."""
    name = "model.layers.1.mlp.up_proj.weight"
    index = checkpoint / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    shard = checkpoint / weight_map[name]
    tensors = load_file(shard)
    change(tensors, name)
    save_file(tensors, shard, metadata={"format": "pt"})
    weight_map = {key: file for key, file in weight_map.items() if file != shard.name or key in tensors}
    index.write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, name: tensors.pop(name), r"block_001: the checkpoint holds no 'mlp.up_proj.weight'"),
        (lambda tensors, name: tensors.update({name: tensors[name][:, 1:].contiguous()}),
         r"block_001: 'mlp.up_proj.weight' has the shape \[150, 127\], but config.json asks for \[150, 128\]"),
    ],
    ids=["missing", "wrong shape"],
)  # fmt: skip
def test_tensors_that_do_not_fit_the_config_are_not_stored(
    checkpoint: Path, cache: Path, change: Callable[[dict[str, torch.Tensor], str], object], message: str
) -> None:
    damage_block(checkpoint, change)
    with pytest.raises(CheckpointError, match=message):
        parts_of(checkpoint, cache).load(block_part(1))
    assert parts_of(checkpoint, cache).load(block_part(0))
    assert [file.stem for file in stored(cache)] == [block_part(0)]


@pytest.mark.parametrize(("part", "shape"), [(EMBEDDING, "'weight'"), (HEAD, "'projection.weight'")])
def test_ends_that_do_not_fit_the_config_are_not_stored(checkpoint: Path, cache: Path, part: str, shape: str) -> None:
    config = checkpoint / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 301', '"vocab_size": 302'))
    with pytest.raises(CheckpointError, match=rf"{part}: {shape} has the shape \[301, 128\], .* \[302, 128\]"):
        parts_of(checkpoint, cache).load(part)
    assert stored(cache) == []


def test_buffers_of_old_checkpoints_are_left_out(checkpoint: Path, cache: Path) -> None:
    damage_block(
        checkpoint,
        lambda tensors, name: tensors.update({"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(8)}),
    )
    single_file(checkpoint)
    assert len(parts_of(checkpoint, cache).load(block_part(1))) == 9


def test_full_disk_leaves_nothing_and_says_what_to_do(
    checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_until_full(tensors: dict[str, torch.Tensor], file: Path) -> None:
        save_file(tensors, file)
        os.truncate(file, file.stat().st_size // 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(disk_cache, "save_file", save_until_full)
        with pytest.raises(EnvironmentProblemError, match=r"block_000.*No space left.*free disk space or set COROLLA"):
            parts_of(checkpoint, cache).load(block_part(0))
    assert [file for file in cache.rglob("*") if file.is_file() and file.parent.name != "locks"] == []
    assert parts_of(checkpoint, cache).load(block_part(0))


def test_missing_part_of_the_checkpoint_is_named(checkpoint: Path, cache: Path) -> None:
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model.layers.3.", "model.layers.33."))
    with pytest.raises(CheckpointError, match=r"the checkpoint holds no tensors model\.layers\.3\.\*"):
        parts_of(checkpoint, cache).load(block_part(3))
