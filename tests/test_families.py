"""Every model family computes what transformers computes, in float32, block by block and as a whole.

Tolerances: 1e-4 for whole sequences, whose sums are longer than one block's rounding errors add up to; 1e-3 for
steps, which sum up in another order than the whole.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from checkpoints import BLOOM, FAMILIES, Case, random_prompt, text_of
from conftest import Served, serve_locally
from corolla.model.family import supported_families
from corolla.model.shape import ModelShape
from local_server import run
from test_engine import start

WHOLE, STEPWISE = 1e-4, 1e-3
LEAD = 2e-5
"""By how much the best logit of a token must lead: more than the logits here differ by rounding."""
FIRST, SINGLE = 129, 12
"""Positions of the first step, which is longer than what decoders take row by row, and steps of one after it."""


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda case: case.name)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, suite_cache: object
) -> Iterator[Served]:
    case: Case = request.param
    served = serve_locally(case, tmp_path_factory.mktemp(case.name), suite_cache)  # type: ignore[arg-type]
    yield served
    assert served.server.table.status().open_sessions == 0


def test_every_family_is_tested() -> None:
    assert {case.model_type for case in FAMILIES} | {"llama"} == set(supported_families())


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """The blocks of a model of transformers."""
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList))


def hidden_states_of_blocks(served: Served, prompts: list[list[int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What goes in and out of each block of transformers: [B, T, H] both."""
    seen = []

    def note(_: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        seen.append((inputs[0], output if isinstance(output, torch.Tensor) else output[0]))

    handles = [block.register_forward_hook(note) for block in blocks_of(served.reference.model)]
    served.reference.logits(torch.tensor(prompts))
    for handle in handles:
        handle.remove()
    return seen


def test_blocks_give_what_those_of_transformers_give(family: Served) -> None:
    seen = hidden_states_of_blocks(family, [random_prompt(300, seed) for seed in (1, 2)])
    assert len(seen) == family.case.blocks
    for service, (inputs, expected) in zip(family.server.ranges, seen, strict=True):
        torch.testing.assert_close(run(service, inputs), expected, rtol=0, atol=WHOLE)


def test_steps_of_blocks_give_the_same(family: Served) -> None:
    prompts = [random_prompt(FIRST + SINGLE, seed) for seed in (3, 4)]
    steps = [(0, FIRST), *((position, position + 1) for position in range(FIRST, FIRST + SINGLE))]
    ids = [family.server.open(FIRST + SINGLE) for _ in prompts]
    for service, (inputs, expected) in zip(family.server.ranges, hidden_states_of_blocks(family, prompts), strict=True):
        outputs = [run(service, inputs[:, start:end], ids, [start] * len(ids)) for start, end in steps]
        torch.testing.assert_close(torch.cat(outputs, dim=1), expected, rtol=0, atol=STEPWISE)
    for session_id in ids:
        family.server.table.close(session_id)


def test_generated_tokens_are_those_of_transformers(family: Served) -> None:
    """Of prompts in the chain, of a prompt in the ranges, and across the ends of windows."""
    prompts = [random_prompt(length, seed=length) for length in (5, 14, 90)]
    engine, reference = family.server.engine(), family.reference
    outputs = [start(engine, prompt, max_tokens=48) for prompt in prompts]
    generated = [output.text() for output in outputs]
    engine.stop()
    for prompt, text in zip(prompts, generated, strict=True):
        prompt_ids = reference.tokenizer(text_of(prompt)).input_ids
        expected = reference.generate(prompt_ids, max_new_tokens=48)
        assert reference.lead(prompt_ids, expected) > LEAD, "tokens this close could differ by rounding alone"
        assert text == reference.text(prompt_ids, expected)


def test_context_of_models_without_position_embeddings() -> None:
    assert ModelShape.of(BLOOM.model_config()).context_length == 512
    assert ModelShape.of(AutoConfig.for_model("bloom")).context_length == 2048
