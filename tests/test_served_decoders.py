"""The decoders of a real server: batches across sessions, counted rows, configs that must agree."""

import re
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from tritonclient.grpc import InferenceServerClient

from checkpoints import random_prompt
from conftest import Remote
from corolla.client import CorollaClient
from corolla.errors import CorollaError
from waiting import wait_until
from wire import GrpcWire, texts

METRIC = re.compile(r'corolla_decoder_(rows|padding)_total\{model="(\w+)",size="(\d+)"\} (\d+)')


def counts(remote: Remote) -> Counter[tuple[str, str, int]]:
    """By what is counted, model and batch size."""
    with urllib.request.urlopen(f"http://{remote.server.metrics}/metrics") as answer:
        text = answer.read().decode()
    return Counter({(kind, model, int(size)): int(value) for kind, model, size, value in METRIC.findall(text)})


def test_steps_of_many_sessions_share_decoders_and_are_counted(remote: Remote) -> None:
    clients, steps = 6, 12
    before = counts(remote)
    prompts = [random_prompt(steps, seed) for seed in range(clients)]
    ids = [remote.sessions.open(steps) for _ in prompts]

    def run(prompt: list[int], session_id: str) -> None:
        wire = GrpcWire(remote.server.grpc)
        hidden = wire.infer("embed", input_ids=np.array([prompt], np.int64))["hidden_states"]
        for position in range(steps):
            wire.infer(
                "chain",
                hidden_states=hidden[:, position : position + 1],
                session_id=texts(session_id)[:, None],
                start_position=np.array([[position]], np.int32),
            )

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(run, prompts, ids))
    for session_id in ids:
        remote.sessions.close(session_id)

    def rows() -> dict[int, int]:
        new = counts(remote) - before
        return {size: new["rows", "chain", size] for size in (8, 4, 1)}

    wait_until(lambda: sum(rows().values()) >= clients * steps)
    assert sum(rows().values()) == clients * steps
    assert rows()[8] + rows()[4] > 0, "no two sessions were ever batched"


def test_generations_are_counted_too(remote: Remote) -> None:
    before = counts(remote)
    text = " ".join(f"t{token}" for token in random_prompt(3, 1))
    remote.http.generate({"text_input": text, "max_tokens": 7, "temperature": 0.0})
    wait_until(lambda: (counts(remote) - before)["rows", "generate", 1] >= 6)
    new = counts(remote) - before  # the prompt of three tokens ran on the decoder for four rows
    assert new["rows", "generate", 4] == 3
    assert new["padding", "generate", 4] == 1


def executions(remote: Remote, model: str) -> int:
    """How often the model ran, by Triton's own count."""
    with InferenceServerClient(remote.server.grpc) as client:
        return int(client.get_inference_statistics(model).model_stats[0].execution_count)


@pytest.mark.parametrize(("rows", "length", "model"), [(1, 1, "chain"), (2, 64, "chain"), (1, 129, "blocks_00_02")])
def test_the_client_sends_short_steps_to_the_chain_and_long_ones_to_the_ranges(
    remote: Remote, rows: int, length: int, model: str
) -> None:
    input_ids = np.array([random_prompt(length, seed) for seed in range(rows)], np.int64)
    hidden = remote.grpc.infer("embed", input_ids=input_ids)["hidden_states"]
    ids = [remote.sessions.open(length) for _ in range(rows)]
    before = executions(remote, model)
    with CorollaClient(remote.server.grpc) as client:
        output = client.step(hidden, ids, [0] * rows)
        with pytest.raises(CorollaError, match="start_position: 7 is not allowed"):
            client.step(hidden, ids, [7] * rows)
    assert executions(remote, model) > before
    logits = remote.grpc.infer("head", hidden_states=output)["logits"]
    expected = remote.reference.logits(torch.from_numpy(input_ids)).numpy()
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
    for session_id in ids:
        remote.sessions.close(session_id)
