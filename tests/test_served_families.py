"""Mixtral, Bloom and Falcon on a real server say what transformers says; Llama has tests of its own."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from checkpoints import BLOOM, FALCON_GROUPED, MIXTRAL, Case, random_prompt, text_of
from conftest import Remote, serve
from corolla.client import CorollaClient


@pytest.fixture(scope="module", params=[MIXTRAL, BLOOM, FALCON_GROUPED], ids=lambda case: case.name)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, suite_cache: Path
) -> Iterator[Remote]:
    case: Case = replace(request.param, ranges=(range(request.param.blocks),))
    with serve(case, tmp_path_factory.mktemp(case.name), suite_cache, "float32", 1024, decoder="eager") as remote:
        yield remote


@pytest.mark.parametrize("length", [6, 129])
def test_greedy_text_is_that_of_transformers(family: Remote, length: int) -> None:
    """From 129 tokens on, the prompt is computed by the ranges."""
    prompt = random_prompt(length, seed=length)
    expected = family.reference.generate(prompt, max_new_tokens=48)
    assert family.reference.lead(prompt, expected) > 1e-4, "tokens this close could differ by rounding alone"
    with CorollaClient(family.server.grpc) as client:
        chunks = list(client.generate(text_of(prompt), max_tokens=48))
    assert "".join(chunk.text for chunk in chunks) == family.reference.text(prompt, expected)
