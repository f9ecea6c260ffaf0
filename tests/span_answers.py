"""What tests make of the answers of `span`."""

import torch

from corolla.wire.messages import SpanOutput
from corolla.wire.states import decode


def states_of(output: SpanOutput) -> torch.Tensor:
    """Its hidden states [n, T, H]."""
    assert output.states is not None
    return decode(output.states, torch.float32)


def assert_same(hidden_states: torch.Tensor, expected: torch.Tensor) -> None:
    """Up to 1e-5 of the largest number among them."""
    assert hidden_states.shape == expected.shape
    assert (hidden_states - expected).abs().max() <= 1e-5 * expected.abs().max()
