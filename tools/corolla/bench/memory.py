"""How fast this machine reads memory, which bounds decoding: every token reads all weights."""

import time

import torch

from corolla.checkpoint.disk_cache import DiskCache
from corolla.checkpoint.parts import HEAD, block_part
from corolla.checkpoint.prepared import PreparedParts
from corolla.checkpoint.source import open_checkpoint
from corolla.model.batch_sizes import COMPILED
from corolla.repository.plan import RepositoryPlan

GIB = 2**30


def read_speed(size: int = GIB, rounds: int = 5) -> float:
    """Bytes per second that torch.sum reads of `size` bytes of float32, with torch's threads; best of `rounds`."""
    values = torch.ones(size // 4)
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        values.sum()
        best = min(best, time.perf_counter() - start)
    return values.nbytes / best


def step_weights(plan: RepositoryPlan) -> int:
    """Bytes of the weights that one decode step reads, as they are served: those of all blocks and the head."""
    parts = PreparedParts(
        open_checkpoint(plan.checkpoint),
        plan.dtype.torch,
        DiskCache.default(),
        packed=plan.decoder == COMPILED,
        quant=plan.quant,
    )
    names = [HEAD, *map(block_part, plan.hosted)]
    return sum(tensor.nbytes for name in names for tensor in parts.load(name).values())
