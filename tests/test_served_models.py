"""The models of a real server compute what transformers computes, over HTTP and gRPC.

Tolerance: 1e-4 absolute on logits in float32, as in test_exactness.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from checkpoints import random_prompt
from conftest import Remote
from waiting import wait_until
from wire import RequestError, Sessions, Wire, texts

ABSOLUTE = 1e-4
LENGTH = 40


def some_ids(batch: int, length: int = LENGTH) -> np.ndarray:
    return np.array([random_prompt(length, seed) for seed in range(batch)], np.int64)


def expected_logits(remote: Remote, input_ids: np.ndarray) -> np.ndarray:
    logits: np.ndarray = remote.reference.logits(torch.from_numpy(input_ids)).numpy()
    return logits


def assert_logits(logits: np.ndarray, expected: np.ndarray) -> None:
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, expected, rtol=0, atol=ABSOLUTE)


def step(wire: Wire, model: str, hidden_states: np.ndarray, ids: list[str], starts: list[int] | None) -> np.ndarray:
    """One step of a row per session."""
    tensors = {"hidden_states": hidden_states, "session_id": texts(*ids)[:, None]}
    if starts is not None:
        tensors["start_position"] = np.array(starts, np.int32)[:, None]
    return wire.infer(model, **tensors)["output_hidden_states"]


@contextmanager
def opened(wire: Wire, *max_lengths: int) -> Iterator[list[str]]:
    ids = [Sessions(wire).open(length) for length in max_lengths]
    try:
        yield ids
    finally:
        for session_id in ids:
            Sessions(wire).close(session_id)


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 200), (8, 33)])
def test_pipeline_gives_the_logits_of_transformers(remote: Remote, wire: Wire, batch: int, length: int) -> None:
    input_ids = some_ids(batch, length)
    assert_logits(wire.infer("pipeline", input_ids=input_ids)["logits"], expected_logits(remote, input_ids))


@pytest.mark.parametrize("model", ["ranges", "chain"])
def test_hidden_states_through_the_blocks_give_the_same_logits(remote: Remote, wire: Wire, model: str) -> None:
    input_ids = some_ids(3)
    embedded = wire.infer("embed", input_ids=input_ids)["hidden_states"]
    hidden_states = wire.infer(model, hidden_states=embedded)["output_hidden_states"]
    assert_logits(wire.infer("head", hidden_states=hidden_states)["logits"], expected_logits(remote, input_ids))


def test_each_range_is_a_model_of_its_own(remote: Remote, wire: Wire) -> None:
    input_ids = some_ids(1)
    hidden_states = wire.infer("embed", input_ids=input_ids)["hidden_states"]
    for blocks in remote.case.ranges:
        name = f"blocks_{blocks.start:02d}_{blocks.stop:02d}"
        hidden_states = wire.infer(name, hidden_states=hidden_states)["output_hidden_states"]
    assert_logits(wire.infer("head", hidden_states=hidden_states)["logits"], expected_logits(remote, input_ids))


def test_session_may_change_between_chain_and_ranges_with_every_step(remote: Remote, wire: Wire) -> None:
    input_ids = some_ids(1)
    hidden_states = wire.infer("embed", input_ids=input_ids)["hidden_states"]
    outputs, start = [], 0
    with opened(wire, LENGTH) as ids:
        for turn, chunk in enumerate([13, 1, 1, 17, 1, 7]):
            part = hidden_states[:, start : start + chunk]
            outputs.append(step(wire, ["chain", "ranges"][turn % 2], part, ids, [start]))
            start += chunk
            assert Sessions(wire).stat(ids[0])["length"] == start
    logits = wire.infer("head", hidden_states=np.concatenate(outputs, axis=1))["logits"]
    assert_logits(logits, expected_logits(remote, input_ids))


def test_rows_of_a_batch_stand_at_different_positions(remote: Remote, wire: Wire) -> None:
    starts = [0, 3, 16, 37]
    input_ids = some_ids(len(starts))
    hidden_states = wire.infer("embed", input_ids=input_ids)["hidden_states"]
    with opened(wire, *[LENGTH] * len(starts)) as ids:
        for row, start in enumerate(starts):
            if start:
                step(wire, "ranges", hidden_states[row : row + 1, :start], ids[row : row + 1], [0])
        new = np.stack([hidden_states[row, start : start + 3] for row, start in enumerate(starts)])
        outputs = step(wire, "chain", new, ids, starts)
    logits = wire.infer("head", hidden_states=outputs)["logits"]
    expected = expected_logits(remote, input_ids)
    assert_logits(logits, np.stack([expected[row, start : start + 3] for row, start in enumerate(starts)]))


def test_repeated_step_and_rollback(remote: Remote, wire: Wire) -> None:
    first, other = some_ids(2)
    embedded = wire.infer("embed", input_ids=np.stack([first, other]))["hidden_states"]
    with opened(wire, LENGTH) as ids:
        step(wire, "chain", embedded[:1, :20], ids, [0])
        once = step(wire, "chain", embedded[:1, 20:30], ids, [20])
        again = step(wire, "ranges", embedded[:1, 20:30], ids, [20])
        np.testing.assert_allclose(again, once, rtol=0, atol=ABSOLUTE)
        rolled_back = step(wire, "ranges", embedded[1:, 11:], ids, [11])
        assert Sessions(wire).stat(ids[0])["length"] == LENGTH
    mixed = np.concatenate([first[:11], other[11:]])[None]
    logits = wire.infer("head", hidden_states=rolled_back)["logits"]
    assert_logits(logits, expected_logits(remote, mixed)[:, 11:])


def test_steps_without_a_position_go_on_where_the_session_is(remote: Remote, wire: Wire) -> None:
    input_ids = some_ids(1)
    embedded = wire.infer("embed", input_ids=input_ids)["hidden_states"]
    with opened(wire, LENGTH) as ids:
        outputs = [step(wire, "chain", part, ids, None) for part in np.split(embedded, [9, 10, 30], axis=1)]
    logits = wire.infer("head", hidden_states=np.concatenate(outputs, axis=1))["logits"]
    assert_logits(logits, expected_logits(remote, input_ids))


def test_concurrent_sessions_do_not_disturb_each_other(remote: Remote) -> None:
    """Each client steps one token at a time; the server batches them as they come."""
    clients = 6
    input_ids = some_ids(clients)
    embedded = remote.grpc.infer("embed", input_ids=input_ids)["hidden_states"]

    def run(row: int) -> np.ndarray:
        with opened(remote.grpc, LENGTH) as ids:
            parts = []
            for position in range(20):
                model = ["chain", "ranges"][(row + position) % 2]
                parts.append(step(remote.grpc, model, embedded[row, position, None][None], ids, [position]))
        return np.concatenate(parts, axis=1)

    with ThreadPoolExecutor(clients) as pool:
        outputs = np.concatenate(list(pool.map(run, range(clients))))
    logits = remote.grpc.infer("head", hidden_states=outputs)["logits"]
    assert_logits(logits, expected_logits(remote, input_ids)[:, :20])


def test_sessions_count_what_they_reserve(remote: Remote, wire: Wire) -> None:
    sessions = Sessions(wire)
    before = sessions.stat()
    reply = sessions.call("open", max_length=np.array([17], np.int32))
    assert len(reply["session_id"]) == 32
    assert (reply["max_length"], reply["length"], reply["reserved_tokens"]) == (17, 0, 32)
    assert reply["free_tokens"] == before["free_tokens"] - 32
    assert reply["total_tokens"] == before["total_tokens"] == 8 * 1024
    assert reply["open_sessions"] == before["open_sessions"] + 1
    named = sessions.stat(reply["session_id"])
    assert (named["max_length"], named["reserved_tokens"]) == (17, 32)
    closed = sessions.close(reply["session_id"])
    assert (closed["reserved_tokens"], closed["free_tokens"]) == (32, before["free_tokens"])


def test_open_waits_for_room_without_holding_up_anybody(remote: Remote) -> None:
    sessions = remote.sessions
    wait_until(lambda: sessions.stat()["open_sessions"] == 0)
    held = [sessions.open(1024) for _ in range(8)]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(sessions.open, 500, timeout=np.array([60], np.float32))
        wait_until(lambda: sessions.stat()["waiting"] == 1)
        with pytest.raises(RequestError, match=r"no room for max_length 1 within 0 s: 0 of 8192 tokens") as refused:
            sessions.open(1)
        assert refused.value.status == "UNAVAILABLE"
        sessions.close(held.pop())
        session_id = waiting.result(timeout=60)
    assert sessions.stat(session_id)["max_length"] == 500
    for other in [*held, session_id]:
        sessions.close(other)


def test_idle_session_expires(remote: Remote) -> None:
    sessions = remote.sessions
    free = sessions.stat()["free_tokens"]
    sessions.open(100, idle_timeout=np.array([0.2], np.float32))
    wait_until(lambda: sessions.stat()["free_tokens"] == free)
