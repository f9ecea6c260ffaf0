"""Models of a real server are paused and resumed; sessions go on."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from checkpoints import random_prompt, text_of
from conftest import Remote
from corolla.cli.main import cli
from corolla.client import CorollaClient
from corolla.errors import InvalidValueError
from corolla.pausing import ModelControl
from wire import RequestError, texts

ABSOLUTE = 1e-4  # on logits in float32, as in test_exactness


def step(remote: Remote, model: str, hidden_states: np.ndarray, session_id: str, start: int) -> np.ndarray:
    return remote.grpc.infer(
        model,
        hidden_states=hidden_states,
        session_id=texts(session_id)[:, None],
        start_position=np.array([[start]], np.int32),
    )["output_hidden_states"]


def test_a_session_goes_on_after_its_range_was_paused(remote: Remote) -> None:
    input_ids = np.array([random_prompt(30, seed=3)], np.int64)
    embedded = remote.grpc.infer("embed", input_ids=input_ids)["hidden_states"]
    session_id = remote.sessions.open(30)
    first = step(remote, "ranges", embedded[:, :10], session_id, 0)
    assert CliRunner().invoke(cli, ["pause", "blocks_02_03", "--address", remote.server.grpc]).exit_code == 0
    try:
        with pytest.raises(RequestError):
            step(remote, "ranges", embedded[:, 10:20], session_id, 10)
        second = step(remote, "chain", embedded[:, 10:20], session_id, 10)
    finally:
        resumed = CliRunner().invoke(cli, ["resume", "blocks_02_03", "--address", remote.server.grpc])
    assert resumed.output == "blocks_02_03: serves again\n"
    third = step(remote, "ranges", embedded[:, 20:], session_id, 20)
    remote.sessions.close(session_id)
    logits = remote.grpc.infer("head", hidden_states=np.concatenate([first, second, third], axis=1))["logits"]
    expected = remote.reference.logits(torch.from_numpy(input_ids)).numpy()
    np.testing.assert_allclose(logits, expected, rtol=0, atol=ABSOLUTE)


def test_pausing_waits_for_running_requests_and_refuses_new_ones(remote: Remote) -> None:
    prompt = random_prompt(6, seed=7)
    expected = remote.reference.generate(prompt, max_new_tokens=300)
    with CorollaClient(remote.server.grpc) as client, ModelControl(remote.server.grpc) as control:
        chunks = client.generate(text_of(prompt), max_tokens=300)
        begun = next(chunks).text
        try:
            with ThreadPoolExecutor(1) as pool:
                pausing = pool.submit(control.pause, "generate", timeout=60)
                rest = "".join(chunk.text for chunk in chunks)
                pausing.result()
            with pytest.raises(RequestError):
                remote.grpc.infer("generate", text_input=texts(text_of(prompt))[:, None])
        finally:
            control.resume("generate")
    assert begun + rest == remote.reference.text(prompt, expected)


def test_only_models_that_the_server_has_can_be_paused(remote: Remote) -> None:
    with ModelControl(remote.server.grpc) as control, pytest.raises(InvalidValueError, match=r"blocks_00_02.*generate"):
        control.pause("blocks", timeout=1)


def test_resuming_a_model_that_serves_changes_nothing(remote: Remote) -> None:
    with ModelControl(remote.server.grpc) as control:
        control.resume("embed")
