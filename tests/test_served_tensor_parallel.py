"""A real server whose block ranges run in two shards each says what transformers says, also after a shard was killed."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from checkpoints import BLOOM, random_prompt, text_of
from conftest import Remote, serve
from corolla.client import CorollaClient
from waiting import wait_until


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory, suite_cache: Path) -> Iterator[Remote]:
    case = replace(BLOOM, ranges=(range(BLOOM.blocks),))
    folder = tmp_path_factory.mktemp("sharded")
    options = {"decoder": "eager", "tensor_parallel": 2}
    with serve(case, folder, suite_cache, "float32", 1024, **options) as remote:
        yield remote


def shards(remote: Remote, model: str) -> list[psutil.Process]:
    """The processes of a model's further shards."""
    return [child for pid in remote.server.stub_pids(model) for child in psutil.Process(pid).children()]


@pytest.mark.parametrize("length", [6, 129])
def test_greedy_text_is_that_of_transformers(sharded: Remote, length: int) -> None:
    """From 129 tokens on, the prompt is computed by the ranges, whose shards share the cache with those of the chain."""
    prompt = random_prompt(length, seed=length)
    expected = sharded.reference.generate(prompt, max_new_tokens=24)
    assert sharded.reference.lead(prompt, expected) > 1e-4, "tokens this close could differ by rounding alone"
    with CorollaClient(sharded.server.grpc) as client:
        chunks = list(client.generate(text_of(prompt), max_tokens=24))
    assert "".join(chunk.text for chunk in chunks) == sharded.reference.text(prompt, expected)
