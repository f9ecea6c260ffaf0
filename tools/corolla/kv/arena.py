"""The KV arena: keys and values of all sessions, in shared memory, mapped by every process that hosts a block."""

from dataclasses import dataclass
from pathlib import Path

import torch

from corolla.kv.layout import KVLayout
from corolla.kv.run_directory import prepared_run_directory
from corolla.kv.shared_memory import create_reserved


@dataclass(frozen=True)
class BlockCache:
    """Keys and values of one block, each [slots, kv_heads, head_dim]; a slot is one position of a page."""

    keys: torch.Tensor
    values: torch.Tensor


class KVArena:
    """The caches of the blocks that this process hosts; other processes map the same memory."""

    def __init__(self, directory: Path, layout: KVLayout, blocks: range) -> None:
        self.layout = layout
        files = {block: directory / "kv" / f"block_{block:03d}" for block in blocks}
        with prepared_run_directory(directory, layout):
            (directory / "kv").mkdir(exist_ok=True)
            for file in files.values():
                create_reserved(file, layout.bytes_per_block)
        self._caches = {block: self._map(file) for block, file in files.items()}

    def __getitem__(self, block: int) -> BlockCache:
        return self._caches[block]

    def _map(self, file: Path) -> BlockCache:
        layout = self.layout
        flat = torch.from_file(str(file), shared=True, size=layout.elements_per_block, dtype=layout.torch_dtype)
        keys, values = flat.view(2, layout.slots, layout.kv_heads, layout.head_dim)
        return BlockCache(keys, values)
