"""The attention of all decoder layers: on the paged cache for rows of one position, PyTorch's own for longer ones."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import corolla.kernels.ops  # noqa: F401  (defines torch.ops.corolla)

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


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    rows: PagedRows | None = None,
    block: PagedBlock | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """In transformers' form: query [N, heads, T, head_dim] to [N, T, heads, head_dim]; T is 1 with `rows`."""
    if rows is None or block is None:
        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        attended: torch.Tensor = sdpa(module, query, key, value, attention_mask, scaling=scaling, **options)[0]
        return attended, None
    attended = torch.ops.corolla.paged_attention(
        query[:, :, 0], key[:, :, 0], value[:, :, 0], block.keys, block.values, rows.pages, rows.positions, scaling
    )
    return attended[:, None], None


ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)
