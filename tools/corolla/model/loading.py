"""Modules around mapped tensors, without a copy."""

from collections.abc import Callable

import torch
from torch import nn

from corolla.errors import CheckpointError


def load_module(build: Callable[[], nn.Module], tensors: dict[str, torch.Tensor], part: str) -> nn.Module:
    """The module that `build` makes, with `tensors` as its parameters; CheckpointError when they do not fit."""
    with torch.device("meta"):
        module = build()
    try:
        module.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        raise CheckpointError(f"{part}: the tensors do not fit the config ({error})") from error
    return module.eval().requires_grad_(False)
