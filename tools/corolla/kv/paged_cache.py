"""The view of one step on the KV arena, in the form in which transformers' decoder layers use a cache."""

import numpy as np
import torch
from numpy.typing import NDArray

from corolla.kv.arena import KVArena
from corolla.kv.session import Session
from corolla.kv.steps import StepRows


class PagedCache:
    """Stores the new keys and values of a step and shows each row all up to the step's end.

    Rows shorter than the longest see their own last position repeated, which `attention_mask` hides: a row
    never reads a slot of another session, not even one that is masked. `position_ids` is [B, T] int64;
    `attention_mask` [B, 1, T, L] bool, None where a plain causal mask will do.
    """

    def __init__(self, arena: KVArena, rows: StepRows) -> None:
        self.rows = rows
        self._arena = arena
        device = arena.device
        ends = [start + rows.new_tokens for start in rows.starts]
        self._length = max(ends)
        self._run: slice | None = None
        first = rows.sessions[0]
        if len(rows.sessions) == 1 and first.contiguous:
            self._run = slice(int(first.slots[0]), int(first.slots[0]) + self._length)
        else:
            self._read = torch.from_numpy(_readable(rows.sessions, ends, self._length).ravel()).to(device)
        written = [
            session.slots[start:end] for session, start, end in zip(rows.sessions, rows.starts, ends, strict=True)
        ]
        self._write = torch.from_numpy(np.concatenate(written)).to(device)
        positions = np.array(rows.starts)[:, None]
        if rows.new_tokens > 1:
            positions = positions + np.arange(rows.new_tokens)
        self.position_ids = torch.from_numpy(positions).to(device)
        self.attention_mask = self._mask(rows, positions)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, kv_heads, T, head_dim] of block `layer_idx` in, [B, kv_heads, L, head_dim] out."""
        cache = self._arena[layer_idx]
        return self._store(cache.keys, key_states), self._store(cache.values, value_states)

    def _store(self, slots: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        batch, heads, new_tokens, head_dim = states.shape
        slots.index_copy_(0, self._write, states.transpose(1, 2).reshape(batch * new_tokens, heads, head_dim))
        if self._run is not None:
            return slots[self._run].transpose(0, 1)[None]
        return slots.index_select(0, self._read).view(batch, self._length, heads, head_dim).transpose(1, 2)

    def _mask(self, rows: StepRows, positions: NDArray[np.int64]) -> torch.Tensor | None:
        starts = rows.starts
        if (rows.new_tokens == 1 or starts[0] == 0) and starts.count(starts[0]) == len(starts):
            return None
        mask = (np.arange(self._length) <= positions[..., None])[:, None]
        return torch.from_numpy(mask).to(self._arena.device)


def _readable(sessions: list[Session], ends: list[int], length: int) -> NDArray[np.int64]:
    """The slots [B, L] of each row's positions, its last one repeated up to the longest row's length."""
    slots = np.empty((len(sessions), length), np.int64)
    for row, session, end in zip(slots, sessions, ends, strict=True):
        row[:end] = session.slots[:end]
        row[end:] = session.slots[end - 1]
    return slots
