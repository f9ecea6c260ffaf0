"""Bad input gets an error that names the field, the value and what is allowed; the next request is served.

Triton itself answers a wrong dtype, a wrong rank and JSON that it cannot read; all else is checked here.
"""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from conftest import Remote
from waiting import wait_until
from wire import RequestError, Sessions, Tensors, Wire, texts

CONTEXT, HIDDEN, VOCABULARY = 1024, 128, 301


def ids(*values: int) -> np.ndarray:
    return np.array([values], np.int64)


def hidden(batch: int = 1, length: int = 1, size: int = HIDDEN, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros((batch, length, size), dtype)


def starts(*values: int) -> np.ndarray:
    return np.array(values, np.int32)[:, None]


def names(*values: str | bytes) -> np.ndarray:
    return texts(*values)[:, None]


def one(value: Any, dtype: Any) -> np.ndarray:
    """[1]"""
    return np.array([value], dtype)


@pytest.fixture(autouse=True)
def next_request_is_served(request: pytest.FixtureRequest, remote: Remote) -> Iterator[None]:
    """After each test: every kind of model answers as before, and nothing was left open."""
    yield
    assert remote.grpc.infer("pipeline", input_ids=ids(1, 2))["logits"].shape == (1, 2, VOCABULARY)
    assert remote.http.infer("chain", hidden_states=hidden())["output_hidden_states"].shape == (1, 1, HIDDEN)
    assert remote.http.generate({"text_input": "t5", "max_tokens": 1})["num_output_tokens"] == 1
    wait_until(lambda: remote.sessions.stat()["open_sessions"] == 0)


@pytest.fixture
def session(remote: Remote) -> Iterator[str]:
    """A session of 10 positions, 4 of them cached."""
    session_id = remote.sessions.open(10)
    remote.grpc.infer("chain", hidden_states=hidden(length=4), session_id=names(session_id), start_position=starts(0))
    yield session_id
    assert remote.sessions.stat(session_id)["length"] == 4
    remote.sessions.close(session_id)


@pytest.mark.parametrize(
    ("model", "tensors", "message"),
    [
        ("embed", {"input_ids": ids(1, VOCABULARY)}, "input_ids: 301 is not allowed; allowed: 0 to 300"),
        ("embed", {"input_ids": ids(-1)}, "input_ids: -1 is not allowed; allowed: 0 to 300"),
        ("embed", {"input_ids": ids(2**62)}, "input_ids: 4611686018427387904 is not allowed"),
        ("embed", {"input_ids": ids(1).astype(np.int32)}, "'input_ids' data-type is 'INT32', but .* expects 'INT64'"),
        ("embed", {"input_ids": ids(1)[0]}, r"shape for input 'input_ids' .*Expected \[-1,-1\], got \[1\]"),
        ("embed", {"input_ids": np.zeros((9, 1), np.int64)}, "batch-size must be <= 8"),
        ("embed", {}, "expected 1 inputs but got 0 inputs"),
        ("pipeline", {"input_ids": ids(1, 999)}, "input_ids: 999 is not allowed; allowed: 0 to 300"),
        ("pipeline", {"input_ids": np.zeros((1, 0), np.int64)},
         "hidden_states: 'a sequence of 0 positions' is not allowed; allowed: 1 to 1024 positions"),
        ("pipeline", {"input_ids": np.zeros((1, CONTEXT + 1), np.int64)}, "'a sequence of 1025 positions'"),
        ("head", {"hidden_states": hidden(size=127)}, r"Expected \[-1,-1,128\], got \[1,1,127\]"),
        ("head", {"hidden_states": hidden(dtype=np.float64)}, "data-type is 'FP64', but .* expects 'FP32'"),
        ("chain", {"hidden_states": hidden(size=129)}, r"Expected \[-1,-1,128\], got \[1,1,129\]"),
        ("chain", {"hidden_states": hidden()[0]}, r"got \[1,128\]"),
        ("chain", {"hidden_states": hidden(dtype=np.float16)}, "data-type is 'FP16', but .* expects 'FP32'"),
        ("chain", {"hidden_states": hidden(length=0)}, "'a sequence of 0 positions' is not allowed; allowed: 1 to"),
        ("chain", {"hidden_states": hidden(length=CONTEXT + 1)}, "'a sequence of 1025 positions'"),
        ("ranges", {"hidden_states": hidden(length=0)}, "'a sequence of 0 positions'"),
        ("chain", {"hidden_states": hidden(), "start_position": starts(0)},
         "start_position: 'a value without session_id' is not allowed; allowed: only together with session_id"),
        ("ranges", {"hidden_states": hidden(), "start_position": starts(0)}, "only together with session_id"),
        ("chain", {"hidden_states": hidden(), "session_id": names(b"\xff\xfe")},
         r"session_id: b'\\xff\\xfe' is not allowed; allowed: text in UTF-8"),
        ("chain", {"hidden_states": hidden(2), "session_id": names("a"), "start_position": starts(0, 0)},
         "batch size does not match"),
        ("chain", {"hidden_states": hidden(), "session_id": names("a"), "start_position": starts(0).astype(np.int64)},
         "data-type is 'INT64', but .* expects 'INT32'"),
        ("sessions", {"operation": texts("dance")},
         "operation: 'dance' is not allowed; allowed: open, close, stat"),
        ("sessions", {"operation": texts(b"\xff")}, r"operation: b'\\xff' is not allowed; allowed: text in UTF-8"),
        ("sessions", {"operation": texts("open")}, "max_length: None is not allowed; allowed: a value, for operation"),
        ("sessions", {"operation": texts("close")}, "session_id: None is not allowed; allowed: a value, for operation"),
        ("sessions", {"operation": texts("open"), "max_length": one(0, np.int32)},
         "max_length: 0 is not allowed; allowed: 1 to 1024"),
        ("sessions", {"operation": texts("open"), "max_length": one(-4, np.int32)}, "max_length: -4 is not allowed"),
        ("sessions", {"operation": texts("open"), "max_length": one(1025, np.int32)}, "max_length: 1025 is not"),
        ("sessions", {"operation": texts("open"), "max_length": one(8, np.int32), "timeout": one(np.nan, np.float32)},
         "timeout: nan is not allowed; allowed: 0 to 3600 seconds"),
        ("sessions", {"operation": texts("open"), "max_length": one(8, np.int32), "timeout": one(-1, np.float32)},
         "timeout: -1.0 is not allowed"),
        ("sessions", {"operation": texts("open"), "max_length": one(8, np.int32), "idle_timeout": one(0, np.float32)},
         "idle_timeout: 0.0 is not allowed; allowed: more than 0"),
        ("sessions", {"operation": texts("stat", "stat")}, r"Expected \[1\], got \[2\]"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 9 else None,
)  # fmt: skip
def test_wrong_tensor_is_refused(wire: Wire, model: str, tensors: Tensors, message: str) -> None:
    with pytest.raises(RequestError, match=message) as refused:
        wire.infer(model, **tensors)
    assert refused.value.status == "INVALID_ARGUMENT"


@pytest.mark.parametrize("model", ["chain", "ranges"])
@pytest.mark.parametrize(
    ("start", "length", "message"),
    [
        (-1, 1, "start_position: -1 is not allowed; allowed: 0 to"),
        (5, 1, "start_position: 5 is not allowed; allowed: 0 to 4, .* repeat the inputs from there"),
        (4, 7, "start_position: 4 is not allowed; allowed: .*max_length 10 .* open a longer session"),
        (11, 1, "start_position: 11 is not allowed"),
        (2**31 - 1, 1, "start_position: 2147483647 is not allowed"),
        (-(2**31), 1, "start_position: -2147483648 is not allowed"),
    ],
)
def test_position_outside_the_session_is_refused(
    wire: Wire, session: str, model: str, start: int, length: int, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as refused:
        wire.infer(model, hidden_states=hidden(1, length), session_id=names(session), start_position=starts(start))
    assert refused.value.status == "INVALID_ARGUMENT"


@pytest.mark.parametrize("model", ["chain", "ranges"])
@pytest.mark.parametrize("session_id", ["nobody", "", "x" * 10_000, "'; DROP TABLE sessions; --", "\u2740"])
def test_unknown_session_is_not_found(wire: Wire, model: str, session_id: str) -> None:
    with pytest.raises(RequestError, match=r"session_id: .* is not open on this server .* open a new") as refused:
        wire.infer(model, hidden_states=hidden(), session_id=names(session_id), start_position=starts(0))
    assert refused.value.status == "NOT_FOUND"
    assert len(refused.value.message) < 400
    for operation in ("close", "stat"):
        with pytest.raises(RequestError, match="is not open on this server") as refused:
            Sessions(wire).call(operation, session_id=texts(session_id))
        assert refused.value.status == "NOT_FOUND"


def test_session_twice_in_a_batch_is_refused(wire: Wire, session: str) -> None:
    with pytest.raises(RequestError, match=r"session_id: .* is not allowed; allowed: each session once in a batch"):
        wire.infer("chain", hidden_states=hidden(2), session_id=names(session, session), start_position=starts(4, 4))


def test_closed_session_cannot_be_used_or_closed_again(wire: Wire) -> None:
    session_id = Sessions(wire).open(8)
    Sessions(wire).close(session_id)
    with pytest.raises(RequestError, match="is not open on this server"):
        Sessions(wire).close(session_id)
    with pytest.raises(RequestError, match="is not open on this server"):
        wire.infer("ranges", hidden_states=hidden(), session_id=names(session_id), start_position=starts(0))


BAD_GENERATIONS: list[tuple[dict[str, Any], str]] = [
    ({"text_input": ""}, "text_input: '' is not allowed; allowed: a text that is not empty"),
    ({"text_input": "a\0b"}, "text_input: .* without NUL"),
    ({"text_input": "t5 " * CONTEXT}, "text_input: 'a prompt of 1025 tokens' is not allowed; allowed: 1 to 1023"),
    ({"text_input": "t5" + " t5" * (CONTEXT - 1)}, "text_input: 'a prompt of 1024 tokens' is not allowed"),
    ({"max_tokens": 0}, "max_tokens: 0 is not allowed; allowed: a whole number from 1 to"),
    ({"max_tokens": -1}, "max_tokens: -1 is not allowed"),
    ({"max_tokens": CONTEXT}, "max_tokens: 1024 is not allowed; allowed: 1 to 1023, the room after the prompt of 1"),
    ({"max_tokens": 2**31 - 1}, "max_tokens: 2147483647 is not allowed; allowed: 1 to 1023"),
    ({"min_length": -1}, "min_length: -1 is not allowed"),
    ({"temperature": -0.5}, "temperature: -0.5 is not allowed; allowed: from 0 to 100"),
    ({"temperature": float("nan")}, "temperature: nan is not allowed"),
    ({"temperature": 1e-30}, r"temperature: .* is not allowed; allowed: 0 \(greedy\), or from 1e-05 to 100"),
    ({"top_p": 1.5}, "top_p: 1.5 is not allowed; allowed: from 0 to 1"),
    ({"top_p": float("nan")}, "top_p: nan is not allowed"),
    ({"top_k": -2}, "top_k: -2 is not allowed"),
    ({"min_p": 2.0}, "min_p: 2.0 is not allowed"),
    ({"repetition_penalty": 0.0}, "repetition_penalty: 0.0 is not allowed; allowed: above 0 to 100"),
    ({"presence_penalty": -2.5}, "presence_penalty: -2.5 is not allowed; allowed: from -2 to 2"),
    ({"frequency_penalty": 3.0}, "frequency_penalty: 3.0 is not allowed"),
    ({"beam_width": 2}, "beam_width: 2 is not allowed; allowed: 1 only"),
    ({"stop_words": ["a"] * 300}, "stop_words: .* is not allowed; allowed: a text or a list of at most 256 texts"),
    ({"sampling_parameters": "[]"}, r"sampling_parameters: '\[\]' is not allowed; allowed: a JSON object"),
    ({"sampling_parameters": '{"maximum": 1}'}, "sampling_parameters: 'maximum' is not allowed; allowed: .*max_tokens"),
    ({"sampling_parameters": '{"max_tokens": "many"}'}, "max_tokens: 'many' is not allowed"),
    ({"sampling_parameters": '{"n": 2}'}, "n: 2 is not allowed; allowed: 1 only"),
]

_DTYPES = {"text_input": object, "stop_words": object, "sampling_parameters": object, "max_tokens": np.int32,
           "min_length": np.int32, "top_k": np.int32, "beam_width": np.int32}  # fmt: skip


def tensors_of(body: dict[str, Any]) -> Tensors:
    """What HTTP makes of JSON: [1, 1], lists [1, N]."""
    tensors = {}
    for name, value in body.items():
        values = value if isinstance(value, list) else [value]
        dtype = _DTYPES.get(name, np.float32)
        tensors[name] = texts(*values)[None] if dtype is object else np.array([values], dtype)
    return tensors


@pytest.mark.parametrize(("body", "message"), BAD_GENERATIONS, ids=lambda value: str(value)[:40])
def test_wrong_generation_is_refused(remote: Remote, body: dict[str, Any], message: str) -> None:
    whole = {"text_input": "t5"} | body
    with pytest.raises(RequestError, match=message) as refused:
        remote.http.generate(whole)
    assert refused.value.status == "INVALID_ARGUMENT"
    with pytest.raises(RequestError, match=message) as refused:
        list(remote.http.generate_stream(whole))
    assert refused.value.status == "INVALID_ARGUMENT"
    with pytest.raises(RequestError, match=message):
        remote.grpc.generate(tensors_of(whole))


def test_infinite_temperature_is_refused(remote: Remote) -> None:
    """JSON has no infinity."""
    with pytest.raises(RequestError, match="temperature: inf is not allowed; allowed: from 0 to 100"):
        remote.grpc.generate({"text_input": texts("t5")[None], "temperature": np.array([[np.inf]], np.float32)})


@pytest.mark.parametrize("name", ["text_input", "stop_words", "bad_words", "sampling_parameters"])
def test_text_that_is_no_utf_8_is_refused(remote: Remote, name: str) -> None:
    message = rf"{name}: b'\\xff\\xfe' is not allowed; allowed: text in UTF-8"
    tensors = {"text_input": texts("t5")[None], name: texts(b"\xff\xfe")[None]}
    with pytest.raises(RequestError, match=message):
        remote.grpc.generate(tensors)
    if name == "text_input":
        with pytest.raises(RequestError, match=message) as refused:
            remote.http.generate(b'{"text_input": "\xff\xfe"}')
        assert refused.value.status == "INVALID_ARGUMENT"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"max_tokens": np.array([[4]], np.int64)}, "data-type is 'INT64', but .* expects 'INT32'"),
        ({"max_tokens": np.array([[4, 5]], np.int32)}, r"Expected \[-1,1\], got \[1,2\]"),
        ({"max_tokens": np.array([4], np.int32)}, r"Expected \[-1,1\], got \[1\]"),
        ({"text_input": texts("t5", "t6")[:, None]}, "batch-size must be <= 1"),
        ({"unknown": np.array([[4]], np.int32)}, "unexpected inference input 'unknown'"),
    ],
)
def test_generation_with_a_wrong_tensor_is_refused(remote: Remote, tensors: Tensors, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        remote.grpc.generate({"text_input": texts("t5")[None]} | tensors)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"text_input": 5}', b'{"text_input": "t5", "max_tokens": "x"}'])
def test_json_that_is_no_request_is_refused(remote: Remote, body: bytes) -> None:
    assert remote.http.post("generate", body).status_code >= 400


def test_generate_without_a_text_is_refused(remote: Remote) -> None:
    with pytest.raises(RequestError, match="text_input: None is not allowed") as refused:
        remote.http.generate({"max_tokens": 3})
    assert refused.value.status == "INVALID_ARGUMENT"


def test_refused_requests_do_not_disturb_a_running_generation(remote: Remote) -> None:
    body = {"text_input": "t5 t17", "max_tokens": 200, "exclude_input_in_output": True}
    expected = remote.http.generate(body)["text_output"]
    seen = []
    for number, event in enumerate(remote.http.generate_stream(body | {"stream": True})):
        seen.append(event["text_output"])
        if number % 20 == 0:
            with pytest.raises(RequestError):
                remote.grpc.generate({"text_input": texts("")[None]})
            with pytest.raises(RequestError):
                remote.grpc.infer("chain", hidden_states=hidden(), session_id=names("nobody"))
    assert "".join(seen) == expected


def test_not_a_number_in_hidden_states_stays_in_its_row(remote: Remote) -> None:
    clean = np.random.default_rng(0).normal(size=(1, 6, HIDDEN)).astype(np.float32)
    poisoned = np.concatenate([np.full_like(clean, np.nan), clean])
    alone = remote.grpc.infer("chain", hidden_states=clean)["output_hidden_states"]
    together = remote.grpc.infer("chain", hidden_states=poisoned)["output_hidden_states"]
    np.testing.assert_allclose(together[1:], alone, rtol=0, atol=1e-4)
    assert np.isnan(together[0]).all()


def test_large_error_values_are_shortened(remote: Remote) -> None:
    with pytest.raises(RequestError) as refused:
        remote.http.generate({"text_input": "t5", "sampling_parameters": json.dumps({"stop": "x" * 100_000}) + "!"})
    assert len(refused.value.message) < 400
