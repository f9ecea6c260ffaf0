"""Runs the blocks of many checkpoints in FOLDER in 2 and in 4 shards, each a process.

The first of them runs them whole, too, and writes to FOLDER/COUNT.json by how much outputs differ, per checkpoint.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

from checkpoints import random_prompt
from corolla.checkpoint.disk_cache import DiskCache
from corolla.checkpoint.prepared import PreparedParts
from corolla.checkpoint.source import open_checkpoint
from corolla.kv.arena import KVArena, host_arena
from corolla.kv.layout import KVLayout
from corolla.kv.paged_cache import PagedCache
from corolla.kv.session import Session
from corolla.kv.steps import StepRows
from corolla.model.block_range import BlockRange
from corolla.model.ends import Embedding
from corolla.model.sharding import Shard
from corolla.model.tensor_parallel import join_shards, parallelizer

LENGTH, FIRST = 90, 80
"""Positions of two sequences, of which the first ones are one step and the others single ones."""


def stepwise(blocks: BlockRange, arena: KVArena, hidden_states: torch.Tensor) -> torch.Tensor:
    """Sequences of sessions with every other page of the arena, so that no cache is in one piece."""
    outputs = []
    size, pages = arena.layout.page_size, arena.layout.pages
    owned = [np.arange(row, pages, len(hidden_states)) for row in range(len(hidden_states))]
    sessions = [
        Session("", 0, 0, LENGTH, p.astype(np.int32), (p[:, None] * size + np.arange(size)).ravel(), False)
        for p in owned
    ]
    for start, end in [(0, FIRST), *((position, position + 1) for position in range(FIRST, LENGTH))]:
        starts = [start] * len(sessions)
        rows = StepRows(sessions, np.zeros(len(sessions), np.int64), starts, starts, end - start, None, 0)
        outputs.append(blocks.step(hidden_states[:, start:end], PagedCache(arena, rows)))
    return torch.cat(outputs, dim=1)


def run(rank: int, count: int, folder: Path) -> None:
    """One shard of all checkpoints."""
    shard = Shard(rank, count)
    torch.set_num_threads(1)
    mesh = join_shards(shard, folder / f"rendezvous-{shard.count}", torch.device("cpu"))
    cache = DiskCache(folder / "cache", None)
    differences = {}
    for checkpoint in sorted(folder.glob("checkpoints/*")):
        opened = open_checkpoint(checkpoint)
        config, dtype = opened.config, torch.float32
        hosted = range(config.num_hidden_layers)
        parts = PreparedParts(opened, dtype, cache, shard=shard)
        hidden_states = Embedding(parts)(torch.tensor([random_prompt(LENGTH, seed) for seed in (1, 2)]))
        layout = KVLayout.of(config, "float32", 2 * LENGTH + 32, 16, shard.count)
        arena = host_arena(folder / f"{checkpoint.name}-{shard.count}", layout, hosted, shard)
        blocks = BlockRange(parts, hosted, parallelizer(parts, mesh))
        outputs = blocks.forward(hidden_states), stepwise(blocks, arena, hidden_states)
        if shard.rank == 0:
            whole = BlockRange(PreparedParts(opened, dtype, cache), hosted)
            whole_layout = KVLayout.of(config, "float32", 2 * LENGTH + 32, 16)
            whole_arena = host_arena(folder / f"{checkpoint.name}-1", whole_layout, hosted)
            expected = whole.forward(hidden_states), stepwise(whole, whole_arena, hidden_states)
            differences[checkpoint.name] = {
                "forward": float((outputs[0] - expected[0]).abs().max()),
                "steps": float((outputs[1] - expected[1]).abs().max()),
                "kv_heads": [arena[0].keys.shape[1], whole_arena[0].keys.shape[1]],
            }
    if shard.rank == 0:
        (folder / f"{shard.count}.json").write_text(json.dumps(differences))
    dist.destroy_process_group()


if __name__ == "__main__":
    for shards in (2, 4):  # forked, as imports take longer than the rest
        start_processes(run, (shards, Path(sys.argv[1])), shards, start_method="fork")
