"""The disk cache: what is mapped stays, the least recently used goes first, a limit is a limit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from corolla.checkpoint.disk_cache import DiskCache
from corolla.cli.cache import command
from corolla.errors import EnvironmentProblemError, InvalidValueError

KIBIBYTES = 64


def tensors() -> dict[str, torch.Tensor]:
    return {"weight": torch.ones(KIBIBYTES * 256)}


def fill_from_another_process(folder: Path, *names: str) -> None:
    """Stores entries that no living process maps, each used later than the one before."""
    code = (
        "import sys, torch, pathlib; from corolla.checkpoint.disk_cache import DiskCache\n"
        f"cache = DiskCache(pathlib.Path(sys.argv[1]), None)\n"
        f"[cache.get(name, lambda: {{'weight': torch.ones({KIBIBYTES * 256})}}) for name in sys.argv[2:]]"
    )
    subprocess.run([sys.executable, "-c", code, str(folder), *names], check=True)
    for age, name in enumerate(reversed(names)):
        os.utime(folder / f"{name}.safetensors", (1e9 - age, 1e9 - age))


def stored(folder: Path) -> list[str]:
    return sorted(entry.name for entry in DiskCache(folder, None).entries())


def test_least_recently_used_entries_leave_first(tmp_path: Path) -> None:
    fill_from_another_process(tmp_path, "k/a", "k/b", "k/c")
    evicted = DiskCache(tmp_path, None).prune(int(2.5 * KIBIBYTES * 1024))
    assert [entry.name for entry in evicted] == ["k/a"]
    assert stored(tmp_path) == ["k/b", "k/c"]


def test_entries_that_a_process_maps_are_never_evicted(tmp_path: Path) -> None:
    fill_from_another_process(tmp_path, "k/a", "k/b")
    cache = DiskCache(tmp_path, None)
    mapped = cache.get("k/a", tensors)
    assert {entry.name: entry.in_use for entry in cache.entries()} == {"k/a": True, "k/b": False}
    DiskCache(tmp_path, None).prune(0)
    assert stored(tmp_path) == ["k/a"]
    assert bool((mapped["weight"] == 1).all())


def test_a_new_entry_pushes_old_ones_out_to_keep_the_limit(tmp_path: Path) -> None:
    fill_from_another_process(tmp_path, "k/a", "k/b")
    DiskCache(tmp_path, limit=int(2.5 * KIBIBYTES * 1024)).get("k/c", tensors)
    assert stored(tmp_path) == ["k/b", "k/c"]


def test_what_cannot_fit_beside_mapped_entries_is_an_error_that_names_the_limit(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, limit=int(1.5 * KIBIBYTES * 1024))
    cache.get("k/a", tensors)
    with pytest.raises(EnvironmentProblemError, match="COROLLA_CACHE_LIMIT"):
        cache.get("k/b", tensors)
    assert stored(tmp_path) == ["k/a"]


def kill_a_writer(folder: Path, name: str) -> None:
    """Kills a process whose file is written but not in place yet."""
    code = (
        "import sys, time, torch, pathlib; from corolla.checkpoint import disk_cache\n"
        "disk_cache._flush = lambda file: (print('written', flush=True), time.sleep(60))\n"
        "cache = disk_cache.DiskCache(pathlib.Path(sys.argv[1]), None)\n"
        f"cache.get(sys.argv[2], lambda: {{'weight': torch.ones({KIBIBYTES * 256})}})"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(folder), name], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"written\n"
    writer.kill()
    writer.wait()


def bytes_under(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def test_what_a_killed_writer_left_is_no_entry_and_goes_with_the_next_pruning(tmp_path: Path) -> None:
    kill_a_writer(tmp_path, "k/a")
    assert stored(tmp_path) == []
    assert bytes_under(tmp_path) > 0
    DiskCache(tmp_path, None).prune(10**9)
    assert bytes_under(tmp_path) == 0


def test_the_next_writer_replaces_what_a_killed_one_left(tmp_path: Path) -> None:
    kill_a_writer(tmp_path, "k/a")
    DiskCache(tmp_path, None).get("k/a", tensors)
    assert stored(tmp_path) == ["k/a"]
    assert bytes_under(tmp_path) == (tmp_path / "k" / "a.safetensors").stat().st_size


def test_eviction_does_not_take_the_folder_of_an_entry_being_written(tmp_path: Path) -> None:
    fill_from_another_process(tmp_path, "k/a")
    DiskCache(tmp_path, limit=int(1.5 * KIBIBYTES * 1024)).get("k/b", tensors)
    assert stored(tmp_path) == ["k/b"]


def test_damaged_entry_is_named_with_what_to_do(tmp_path: Path) -> None:
    fill_from_another_process(tmp_path, "k/a")
    (tmp_path / "k" / "a.safetensors").write_bytes(b"junk")
    with pytest.raises(EnvironmentProblemError, match="corolla cache clear"):
        DiskCache(tmp_path, None).get("k/a", tensors)


def test_limit_in_the_environment_must_be_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COROLLA_CACHE_LIMIT", "lots")
    with pytest.raises(InvalidValueError, match="COROLLA_CACHE_LIMIT: 'lots'"):
        DiskCache.default()


def test_commands_list_prune_and_clear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COROLLA_CACHE", str(tmp_path))
    fill_from_another_process(tmp_path, "k/a", "k/b")
    runner = CliRunner()
    assert "in 2 files" in runner.invoke(command, ["ls"]).output
    assert "in 1 files" in runner.invoke(command, ["prune", "--limit", str(int(1.5 * KIBIBYTES * 1024))]).output
    assert "in 1 files" in runner.invoke(command, ["clear"]).output
    assert stored(tmp_path) == []
