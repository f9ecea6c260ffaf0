"""The attention of all decoder layers: on the paged cache for rows of one position, PyTorch's own for longer ones."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import corolla.kernels.ops  # noqa: F401  (defines torch.ops.corolla)
from corolla.model.alibi import alibi_mask

NAME = "corolla"
"""The attention implementation to set in a model's config."""


@dataclass(frozen=True)
class PagedRows:
    """Where the rows of a step stand: each is one new position of a session.

    `pages` [N, P] int32 are the pages of each row's session in order; `positions` [N] int64, -1 for padding.
    """

    pages: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True)
class PagedBlock:
    """One block's part of the cache, each [pages, page_size, kv_heads, head_dim], as the cache of a decoder layer."""

    keys: torch.Tensor
    values: torch.Tensor

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Leaves storing to the attention, which stores and reads in one go."""
        return key_states, value_states


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    scaling: float,
    position_ids: torch.Tensor,
    sliding_window: int | None = None,
    slopes: torch.Tensor | None = None,
    rows: PagedRows | None = None,
    block: PagedBlock | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """In transformers' form: query [N, heads, T, head_dim] to [N, T, heads, head_dim]; T is 1 with `rows`.

    A row sees the last `sliding_window` positions, its own among them. `slopes` [heads] are those of linear biases;
    see corolla.kernels.ops.paged_attention.
    """
    if rows is None or block is None:
        if slopes is not None or (sliding_window is not None and sliding_window < key.shape[2]):
            mask = _mask(position_ids, key.shape[2], scaling, sliding_window, slopes)
            attention_mask = mask if slopes is None else mask.to(query.dtype)
        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        attended: torch.Tensor = sdpa(module, query, key, value, attention_mask, scaling=scaling)[0]
        return attended, None
    attended = torch.ops.corolla.paged_attention(
        query[:, :, 0], key[:, :, 0], value[:, :, 0], block.keys, block.values, rows.pages, rows.positions, scaling,
        sliding_window or 0, slopes,
    )  # fmt: skip
    return attended[:, None], None


def _mask(
    position_ids: torch.Tensor, length: int, scaling: float, sliding_window: int | None, slopes: torch.Tensor | None
) -> torch.Tensor:
    """What queries at `position_ids` [B, T] see of L positions: [B, 1, T, L] bool, or biases [B, heads, T, L]."""
    ends, seen = position_ids[:, None, :, None], torch.arange(length, device=position_ids.device)
    visible = seen <= ends
    if sliding_window is not None:
        visible &= seen > ends - sliding_window
    if slopes is None:
        return visible
    return alibi_mask(slopes, scaling, seen, ends, visible)


ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
