"""A real server whose block ranges run in two shards says what transformers says, also after a shard was killed."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from checkpoints import BLOOM, random_prompt
from conftest import Remote, serve
from corolla.client import CorollaClient
from waiting import wait_until
from wire import texts


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


def test_log_says_how_blocks_run(sharded: Remote) -> None:
    assert sharded.server.log.count("blocks run in 2 shards, with the eager decoder") == 3


@pytest.mark.parametrize("length", [6, 129])
def test_greedy_text_is_that_of_transformers(sharded: Remote, length: int) -> None:
    """From 129 tokens on, the prompt is computed by the ranges, which share the cache of each shard with the chain."""
    sharded.assert_greedy_text(length, max_tokens=24)


def test_rows_take_over_each_others_cache_in_every_shard(sharded: Remote) -> None:
    """A step in which two sessions swap their caches, beside whole sequences."""
    prompts = np.array([random_prompt(21, seed) for seed in (1, 2)], np.int64)
    swapped = np.concatenate([prompts[::-1, :20], prompts[:, 20:]], axis=1)
    ids = [sharded.sessions.open(40) for _ in prompts]
    with CorollaClient(sharded.server.grpc) as client:
        hidden = sharded.grpc.infer("embed", input_ids=prompts)["hidden_states"]
        client.step(hidden[:, :20], ids, [0, 0])
    output = sharded.grpc.infer(
        "chain",
        hidden_states=hidden[:, 20:],
        session_id=texts(*ids)[:, None],
        start_position=np.array([[20], [20]], np.int32),
        hypo_ids=np.array([[1], [0]], np.int32),
    )["output_hidden_states"]
    logits = sharded.grpc.infer("head", hidden_states=output)["logits"][:, -1]
    expected = sharded.reference.logits(torch.from_numpy(swapped))[:, -1].numpy()
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
    for session_id in ids:
        sharded.sessions.close(session_id)


def test_shards_end_together_and_are_replaced_and_sessions_go_on(sharded: Remote) -> None:
    prompts = np.array([random_prompt(12, seed=5)], np.int64)
    hidden = sharded.grpc.infer("embed", input_ids=prompts)["hidden_states"]
    session_id = sharded.sessions.open(12)
    with CorollaClient(sharded.server.grpc) as client:
        client.step(hidden[:, :11], [session_id], [0])
        (of_range,) = shards(sharded, "blocks_00_02")
        os.kill(of_range.ppid(), signal.SIGKILL)
        (of_chain,) = shards(sharded, "chain")
        of_chain.kill()
        wait_until(lambda: not of_range.is_running())
        sharded.server.wait_for_log("of a shard ended with status -9; this process ends too")
        for model in ("chain", "blocks_00_02"):
            sharded.server.wait_for_log(f"model {model} serves again", timeout=120.0)
        output = client.step(hidden[:, 11:], [session_id], [11])
    logits = sharded.grpc.infer("head", hidden_states=output)["logits"]
    expected = sharded.reference.logits(torch.from_numpy(prompts))[:, 11:].numpy()
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
    sharded.sessions.close(session_id)
