"""Attention with linear biases: the farther back a key, the lower its score, for each head with a slope of its own."""

import math

import torch


def alibi_slopes(heads: int, device: torch.device) -> torch.Tensor:
    """Slopes [heads] float32: a geometric series, filled up from the series of twice as many heads.

    As in Press, Smith and Lewis, "Train Short, Test Long" (2022), and in the code that its authors published with it.
    Only differences of biases within a row matter to its softmax.
    """
    whole = 2 ** int(math.log2(heads))
    slopes = torch.pow(2 ** (-8 / whole), torch.arange(1, whole + 1, device=device))
    between = torch.pow(2 ** (-4 / whole), torch.arange(1, 2 * (heads - whole) + 1, 2, device=device))
    return torch.cat([slopes, between])


def alibi_mask(
    slopes: torch.Tensor, scale: float, seen: torch.Tensor, ends: torch.Tensor, visible: torch.Tensor
) -> torch.Tensor:
    """What is added to scores: [B, heads, T, L] float32, 0 at each row's own position, -inf where it is not to see.

    `slopes` [heads]; positions `seen` [L], `ends` [B, 1, T, 1], the rows' own; `visible` [B, 1, T, L] bool.
    """
    biases = scale * (_biases(slopes, seen) - _biases(slopes, ends))
    return torch.where(visible, biases, -torch.inf)


def _biases(slopes: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Slope times position, computed in the dtype of the slopes."""
    return (slopes[:, None, None] * positions.to(slopes.dtype)).float()
