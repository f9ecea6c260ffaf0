"""How fast this machine reads memory, which bounds decoding: every token reads all weights."""

import time

import torch

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
