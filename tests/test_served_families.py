"""Mixtral, Bloom and Falcon on a real server say what transformers says; Llama has tests of its own."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from checkpoints import BLOOM, FALCON_GROUPED, MIXTRAL, Case
from conftest import Remote, serve


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
    family.assert_greedy_text(length, max_tokens=48)
