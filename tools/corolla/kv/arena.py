"""The KV arena: keys and values of all sessions, in shared memory, mapped by every process that hosts a block."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from corolla.kv.device_exports import DeviceExports
from corolla.kv.layout import KVLayout
from corolla.kv.run_directory import prepared_run_directory
from corolla.kv.shared_memory import create_reserved
from corolla.model.sharding import WHOLE, Shard


@dataclass(frozen=True)
class BlockCache:
    """Keys and values of one block, each [slots, kv_heads, head_dim]; a slot is one position of a page."""

    keys: torch.Tensor
    values: torch.Tensor


class KVArena:
    """The caches of the blocks that a process hosts, by block; other processes have the same memory."""

    def __init__(self, layout: KVLayout, caches: dict[int, BlockCache], device: torch.device) -> None:
        self.layout = layout
        self.device = device
        self._caches = caches

    def __getitem__(self, block: int) -> BlockCache:
        return self._caches[block]

    def copy(self, origins: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """Copies keys and values of all blocks from slots to slots."""
        sources, to = torch.from_numpy(origins).to(self.device), torch.from_numpy(targets).to(self.device)
        for cache in self._caches.values():
            for slots in (cache.keys, cache.values):
                slots.index_copy_(0, to, slots.index_select(0, sources))


def host_arena(directory: Path, layout: KVLayout, blocks: range, shard: Shard = WHOLE) -> KVArena:
    """A shard's arena in files of the run directory; their memory outlives every process."""
    files = {block: directory / "kv" / f"block_{block:03d}{shard.suffix()}" for block in blocks}
    with prepared_run_directory(directory, layout):
        (directory / "kv").mkdir(exist_ok=True)
        for file in files.values():
            create_reserved(file, layout.bytes_per_block)
    return KVArena(layout, {block: _map(file, layout) for block, file in files.items()}, torch.device("cpu"))


def device_arena(
    exports: DeviceExports,
    layout: KVLayout,
    blocks: range,
    device: torch.device,
    forget: Callable[[int], None],
    shard: Shard = WHOLE,
) -> KVArena:
    """A shard's arena in memory of a device, allocated by the first process that hosts a block.

    `forget` is called for each block whose memory is allocated: nothing is cached in it any more.
    """

    def allocate(block: int) -> dict[str, torch.Tensor]:
        forget(block)
        shape = (2, layout.slots, layout.kv_heads, layout.head_dim)
        return {"both": torch.zeros(shape, dtype=layout.torch_dtype, device=device)}

    caches = {}
    for block in blocks:
        keys, values = exports.get(f"kv_{block:03d}{shard.suffix()}", partial(allocate, block))["both"]
        caches[block] = BlockCache(keys, values)
    return KVArena(layout, caches, device)


def _map(file: Path, layout: KVLayout) -> BlockCache:
    flat = torch.from_file(str(file), shared=True, size=layout.elements_per_block, dtype=layout.torch_dtype)
    keys, values = flat.view(2, layout.slots, layout.kv_heads, layout.head_dim)
    return BlockCache(keys, values)
