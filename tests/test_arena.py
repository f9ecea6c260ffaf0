"""The KV arena is one memory for all processes, reserved before anything is stored in it."""

import multiprocessing
from pathlib import Path

import pytest
import torch

from checkpoints import CASES
from corolla.errors import EnvironmentProblemError
from corolla.kv.arena import host_arena
from corolla.kv.layout import KVLayout, default_attn_cache_tokens
from corolla.kv.shared_memory import create_reserved

LAYOUT = KVLayout(pages=3, page_size=4, blocks=4, kv_heads=2, head_dim=8, dtype="float32")


def test_blocks_are_as_large_as_the_layout_says(tmp_path: Path) -> None:
    arena = host_arena(tmp_path, LAYOUT, range(1, 3))
    for block in (1, 2):
        assert arena[block].keys.shape == arena[block].values.shape == (12, 2, 8)
    sizes = [file.stat().st_size for file in (tmp_path / "kv").iterdir()]
    assert sizes == [LAYOUT.bytes_per_block] * 2 == [2 * 12 * 2 * 8 * 4] * 2


def test_other_processes_read_what_was_written(tmp_path: Path) -> None:
    arena = host_arena(tmp_path, LAYOUT, range(0, 2))

    def write() -> None:
        other = host_arena(tmp_path, LAYOUT, range(1, 4))
        other[1].keys[5] = 3.5
        other[1].values[6] = 4.5

    process = multiprocessing.get_context("fork").Process(target=write)
    process.start()
    process.join()
    assert process.exitcode == 0
    assert arena[1].keys.sum() == 3.5 * 2 * 8
    assert arena[1].values[6].sum() == 4.5 * 2 * 8
    assert arena[0].keys.sum() == 0


def test_bytes_are_reserved_when_the_arena_is_made(tmp_path: Path) -> None:
    """Not by the first write, which could only fail with a bus error."""
    large = KVLayout(pages=64, page_size=16, blocks=1, kv_heads=2, head_dim=64, dtype="float32")
    host_arena(tmp_path, large, range(0, 1))
    status = (tmp_path / "kv" / "block_000").stat()
    assert status.st_blocks * 512 >= status.st_size == large.bytes_per_block


def test_arena_that_does_not_fit_is_refused_with_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "kv" / "block_000"
    file.parent.mkdir()
    with pytest.raises(EnvironmentProblemError, match=r"block_000: cannot reserve 4398046511104 MiB .*--shm-size") as e:
        create_reserved(file, 2**62)
    assert "--attn-cache-tokens" in str(e.value)
    assert list(file.parent.iterdir()) == [], "a file of the wrong size is left"


def test_memory_that_exists_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "kept"
    create_reserved(file, 8)
    file.write_bytes(b"contents")
    create_reserved(file, 8)
    assert file.read_bytes() == b"contents"


def test_another_layout_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    host_arena(tmp_path, LAYOUT, range(0, 1))
    other = KVLayout(pages=3, page_size=4, blocks=4, kv_heads=2, head_dim=8, dtype="bfloat16")
    with pytest.raises(EnvironmentProblemError, match="all models of a server must agree"):
        host_arena(tmp_path, other, range(0, 1))


@pytest.mark.parametrize(("tokens", "pages"), [(1, 1), (16, 1), (17, 2), (2048, 128)])
def test_cache_is_rounded_up_to_whole_pages(tokens: int, pages: int) -> None:
    layout = KVLayout.of(CASES[0].model_config(), "float32", tokens, page_size=16)
    assert (layout.pages, layout.slots) == (pages, 16 * pages)


def test_layouts_follow_heads_and_dtype_of_the_checkpoint() -> None:
    layouts = [KVLayout.of(case.model_config(), "bfloat16", 64, page_size=16) for case in CASES]
    assert [(layout.kv_heads, layout.head_dim) for layout in layouts] == [(2, 16), (1, 24), (5, 24), (3, 24), (2, 24)]
    assert layouts[0].bytes_per_block == 2 * 64 * 2 * 16 * 2
    assert layouts[0].torch_dtype == torch.bfloat16


def test_default_cache_is_larger_where_heads_share_keys() -> None:
    budgets = [default_attn_cache_tokens(case.model_config()) for case in CASES]
    assert budgets == [16384, 16384, 4096, 16384, 16384]
