"""The model in parts computes what transformers computes from the whole checkpoint, in float32.

Tolerance: logits have magnitudes of about 10 and float32 carries 24 bits, so that another order of additions
moves them by some 1e-6 each; 1e-4 leaves room for depth and for other instruction sets.
"""

import pytest
import torch

from conftest import Served
from corolla.errors import InvalidValueError

ABSOLUTE = 1e-4


def some_ids(served: Served, batch: int, length: int) -> torch.Tensor:
    vocabulary = served.case.model_config().vocab_size
    return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (3, 33), (2, 200)])
def test_ranges_between_embedding_and_head_give_the_logits_of_transformers(
    served: Served, batch: int, length: int
) -> None:
    server, input_ids = served.server, some_ids(served, batch, length)
    logits = server.head(server.run_ranges(server.embedding(input_ids)))
    expected = served.reference.logits(input_ids)
    assert expected.abs().max() > 1, "the checkpoint is too flat to show a mistake"
    torch.testing.assert_close(logits, expected, rtol=0, atol=ABSOLUTE)


def test_chain_gives_what_the_ranges_give(served: Served) -> None:
    hidden_states = served.server.embedding(some_ids(served, 2, 50))
    torch.testing.assert_close(
        served.server.run_chain(hidden_states), served.server.run_ranges(hidden_states), rtol=0, atol=ABSOLUTE
    )


def test_whole_context_can_be_used_and_not_one_position_more(served: Served) -> None:
    server, context = served.server, served.case.model_config().max_position_embeddings
    input_ids = some_ids(served, 1, context)
    logits = server.head(server.run_chain(server.embedding(input_ids)))
    torch.testing.assert_close(logits, served.reference.logits(input_ids), rtol=0, atol=ABSOLUTE)
    with pytest.raises(InvalidValueError, match=f"1 to {context} positions"):
        server.run_chain(server.embedding(some_ids(served, 1, context + 1)))
