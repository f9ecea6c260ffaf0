"""Memory that one process allocates and others open; with CPU tensors, as the logic is the same for CUDA's."""

import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.multiprocessing

from corolla.kv.arena import device_arena
from corolla.kv.device_exports import DeviceExports
from corolla.kv.layout import KVLayout

CONTEXT = multiprocessing.get_context("spawn")


@pytest.fixture(autouse=True)
def shared_by_file_name() -> Iterator[None]:
    """Handles of CPU tensors that any process can open, as those of CUDA are."""
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    yield
    torch.multiprocessing.set_sharing_strategy(strategy)


def _owner(directory: Path, value: float, pipe: Connection) -> None:
    torch.multiprocessing.set_sharing_strategy("file_system")
    tensors = DeviceExports(directory).get("part", lambda: {"weight": torch.full((4,), value)})
    pipe.send(tensors["weight"].tolist())
    pipe.recv()


class Owner:
    """A process that opens the group `part`, until it is killed."""

    def __init__(self, directory: Path, value: float) -> None:
        self._pipe, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_owner, args=(directory, value, theirs), daemon=True)
        self._process.start()
        self.values = self._pipe.recv()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def _must_not_allocate() -> dict[str, torch.Tensor]:
    raise AssertionError("allocated a second time")


def test_all_processes_have_the_memory_of_the_first(tmp_path: Path) -> None:
    owner = Owner(tmp_path, 1.0)
    second = Owner(tmp_path, 2.0)
    assert second.values == owner.values == [1.0] * 4
    ours = DeviceExports(tmp_path).get("part", _must_not_allocate)["weight"]
    ours[0] = 7.0
    third = Owner(tmp_path, 3.0)
    assert third.values == [7.0, 1.0, 1.0, 1.0]
    for process in (owner, second, third):
        process.kill()


def test_successor_of_a_dead_owner_allocates_again_and_the_others_notice(tmp_path: Path) -> None:
    owner = Owner(tmp_path, 1.0)
    exports = DeviceExports(tmp_path)
    exports.get("part", _must_not_allocate)
    generation = exports.generation
    owner.kill()
    successor = Owner(tmp_path, 3.0)
    assert successor.values == [3.0] * 4
    assert exports.generation == generation + 1
    assert exports.get("part", _must_not_allocate)["weight"].tolist() == [3.0] * 4
    successor.kill()


def test_arena_on_a_device_forgets_what_was_cached_when_it_is_allocated(tmp_path: Path) -> None:
    layout = KVLayout(pages=4, page_size=16, blocks=3, kv_heads=2, head_dim=8, dtype="float32")
    forgotten: list[int] = []
    exports, cpu = DeviceExports(tmp_path), torch.device("cpu")
    arena = device_arena(exports, layout, range(1, 3), cpu, forgotten.append)
    assert forgotten == [1, 2]
    assert arena[1].keys.shape == (layout.slots, 2, 8)
    arena[2].values.fill_(5.0)
    again = device_arena(exports, layout, range(1, 3), cpu, forgotten.append)
    assert forgotten == [1, 2]
    assert bool((again[2].values == 5.0).all())
