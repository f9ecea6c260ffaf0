"""Rotary embeddings, computed once per position."""

import torch
from torch import nn
from transformers import PretrainedConfig

FIRST_SIZE = 1024


class Unrotated(nn.Module):
    """In the place of a rotary embedding where positions are linear biases of the attention."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()

    def forward(self, like: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions [B, T] to nothing: two tensors [B, T, 0]."""
        nothing = like.new_empty(*position_ids.shape, 0)
        return nothing, nothing


class RotaryTable:
    """Cosines and sines of the positions of a model's context, in its dtype; grows as positions do."""

    def __init__(self, rotary_embedding: nn.Module, context_length: int, like: torch.Tensor) -> None:
        """`like` shows device and dtype."""
        self._rotary_embedding = rotary_embedding
        self._context_length = context_length
        self._like = like
        self._tables = self._compute(FIRST_SIZE)

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Two tensors [..., head_dim] for positions of any shape; negative ones count as 0."""
        positions = positions.clamp(min=0)
        if len(self._tables[0]) <= (last := int(positions.max())):
            self._tables = self._compute(2 * last)
        cosines, sines = self._tables
        return cosines[positions], sines[positions]

    @torch.inference_mode()
    def _compute(self, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        known = torch.arange(min(positions, self._context_length), device=self._like.device)
        cosines, sines = self._rotary_embedding(self._like, known[None])
        return cosines[0], sines[0]
