"""The view of one step on the KV arena, in the form in which compiled decoders use it."""

from collections.abc import Sequence

import numpy as np
import torch

from corolla.kv.arena import KVArena
from corolla.kv.steps import StepRows
from corolla.model.attention import PagedRows


def paged_rows(arena: KVArena, steps: Sequence[StepRows]) -> PagedRows:
    """One row per new position: the first row's positions in order, then the next one's, step after step."""
    page_size = arena.layout.page_size
    width = max(-(-(start + step.new_tokens) // page_size) for step in steps for start in step.starts)
    count = sum(len(step.sessions) * step.new_tokens for step in steps)
    pages = np.zeros((count, width), np.int32)
    positions = np.empty(count, np.int64)
    row = 0
    for step in steps:
        for session, start in zip(step.sessions, step.starts, strict=True):
            rows = slice(row, row + step.new_tokens)
            known = session.pages[:width]
            pages[rows, : len(known)] = known
            positions[rows] = range(start, start + step.new_tokens)
            row += step.new_tokens
    return PagedRows(torch.from_numpy(pages).to(arena.device), torch.from_numpy(positions).to(arena.device))
