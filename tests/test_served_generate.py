"""Text from a real server is the text of transformers' `generate`, however it is asked for."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from checkpoints import END_OF_TEXT_ID, FRAGMENTS, random_prompt, text_of
from conftest import Remote
from corolla.client import CorollaClient, GenerationChunk
from corolla.errors import CorollaError
from waiting import wait_until
from wire import Tensors, text_of_responses, texts

PROMPT_LENGTHS = (1, 6, 40, 127, 128, 129, 300, 700)
"""From 129 tokens on, the prompt is computed by the ranges; from 513 on, in two pieces."""


def prompt_of(length: int) -> list[int]:
    return random_prompt(length, seed=length)


def expected_text(remote: Remote, prompt_ids: list[int], **settings: Any) -> str:
    """What transformers adds to the prompt."""
    new_ids = remote.reference.generate(prompt_ids, **settings)
    if "seed" not in settings:
        assert remote.reference.lead(prompt_ids, new_ids) > 1e-4, "tokens this close could differ by rounding alone"
    return remote.reference.text(prompt_ids, new_ids)


def streamed(remote: Remote, prompt_ids: list[int], **options: Any) -> list[GenerationChunk]:
    with CorollaClient(remote.server.grpc) as client:
        return list(client.generate(text_of(prompt_ids), **({"max_tokens": 64} | options)))


def text_streamed(remote: Remote, prompt_ids: list[int], **options: Any) -> str:
    return "".join(chunk.text for chunk in streamed(remote, prompt_ids, **options))


@pytest.mark.parametrize("length", PROMPT_LENGTHS)
def test_greedy_text_is_that_of_transformers(remote: Remote, length: int) -> None:
    prompt = prompt_of(length)
    chunks = streamed(remote, prompt)
    assert "".join(chunk.text for chunk in chunks) == expected_text(remote, prompt)
    assert (chunks[-1].finish_reason, chunks[-1].num_input_tokens, chunks[-1].num_output_tokens) == (
        "length", length, 64,
    )  # fmt: skip
    assert all(chunk.finish_reason is None for chunk in chunks[:-1])


def test_concurrent_generations_of_mixed_lengths_are_all_right(remote: Remote) -> None:
    with ThreadPoolExecutor(len(PROMPT_LENGTHS)) as pool:
        generated = list(pool.map(lambda length: text_streamed(remote, prompt_of(length)), PROMPT_LENGTHS))
    for length, text in zip(PROMPT_LENGTHS, generated, strict=True):
        assert text == expected_text(remote, prompt_of(length)), length
    wait_until(lambda: remote.sessions.stat()["open_sessions"] == 0)


@pytest.mark.parametrize("length", [6, 129])
def test_http_gives_one_answer_with_the_prompt_in_front(remote: Remote, length: int) -> None:
    prompt = prompt_of(length)
    answer = remote.http.generate({"text_input": text_of(prompt), "max_tokens": 64})
    assert answer["text_output"] == text_of(prompt) + expected_text(remote, prompt)
    assert (answer["finish_reason"], answer["num_input_tokens"], answer["num_output_tokens"]) == ("length", length, 64)


def test_http_streams_events_without_the_prompt(remote: Remote) -> None:
    prompt = prompt_of(6)
    events = list(remote.http.generate_stream({"text_input": text_of(prompt), "max_tokens": 64, "stream": True}))
    assert len(events) > 1
    assert "".join(event["text_output"] for event in events) == expected_text(remote, prompt)
    assert events[-1]["finish_reason"] == "length"
    assert all("finish_reason" not in event for event in events[:-1])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("exclude", [None, False, True])
def test_echo_is_left_out_of_streams_unless_asked_for(remote: Remote, stream: bool, exclude: bool | None) -> None:
    prompt = prompt_of(6)
    tensors: Tensors = {"text_input": texts(text_of(prompt))[None], "stream": np.array([[stream]]),
                        "max_tokens": np.array([[8]], np.int32)}  # fmt: skip
    if exclude is not None:
        tensors["exclude_input_in_output"] = np.array([[exclude]])
    echo = not (stream if exclude is None else exclude)
    added = expected_text(remote, prompt, max_new_tokens=8)
    assert text_of_responses(remote.grpc.generate(tensors)) == (text_of(prompt) if echo else "") + added


def test_without_stream_grpc_gives_one_response_with_everything(remote: Remote) -> None:
    prompt = prompt_of(6)
    (response,) = remote.grpc.generate(
        {"text_input": texts(text_of(prompt))[None], "max_tokens": np.array([[8]], np.int32)}
    )
    assert {name: value.shape for name, value in response.items() if name != "session_id"} == dict.fromkeys(
        ("text_output", "finish_reason", "num_input_tokens", "num_output_tokens"), (1, 1)
    )


def test_default_is_sixteen_greedy_tokens(remote: Remote) -> None:
    prompt = prompt_of(6)
    answer = remote.http.generate({"text_input": text_of(prompt), "exclude_input_in_output": True})
    assert answer["text_output"] == expected_text(remote, prompt, max_new_tokens=16)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.8},
        {"temperature": 1.3, "top_k": 12, "top_p": 0.75},
        {"min_p": 0.25},
        {"top_p": 0.5, "repetition_penalty": 1.25},
    ],
    ids=str,
)  # fmt: skip
def test_sampled_text_is_that_of_transformers_with_the_same_seed(remote: Remote, settings: dict[str, Any]) -> None:
    prompt = prompt_of(6)
    added = expected_text(remote, prompt, seed=77, **settings)
    assert text_streamed(remote, prompt, random_seed=77, **settings) == added
    body = {"text_input": text_of(prompt), "max_tokens": 64, "seed": 77, "exclude_input_in_output": True}
    assert remote.http.generate(body | settings)["text_output"] == added


def test_seed_decides_and_no_seed_means_chance(remote: Remote) -> None:
    first, again, other = (text_streamed(remote, prompt_of(6), temperature=1.5, random_seed=s) for s in (1, 1, 2))
    assert first == again != other
    drawn = {text_streamed(remote, prompt_of(6), temperature=1.5) for _ in range(2)}
    assert len(drawn) == 2


def test_stop_word_ends_the_text_before_it(remote: Remote) -> None:
    prompt = prompt_of(40)
    whole = expected_text(remote, prompt)
    stop_word = whole[20:26]
    chunks = streamed(remote, prompt, stop_words=["never", stop_word])
    assert "".join(chunk.text for chunk in chunks) == whole[: whole.find(stop_word)]
    assert chunks[-1].finish_reason == "stop"
    assert (chunks[-1].num_output_tokens or 64) < 64


def test_bad_words_never_occur(remote: Remote) -> None:
    prompt = prompt_of(40)
    words = [token for token in remote.reference.generate(prompt) if token not in FRAGMENTS][:3]
    text = text_streamed(remote, prompt, bad_words=[f"t{word}" for word in words])
    assert text == expected_text(remote, prompt, bad_words_ids=[[word] for word in words])
    assert not {f"t{word}" for word in words} & set(text.split())


def test_end_token_ends_the_text(remote: Remote) -> None:
    """Some prompt leads a sampled text to the end token."""
    prompt, seed = next(
        (prompt_of(6), seed)
        for seed in range(50)
        if remote.reference.generate(prompt_of(6), seed=seed, temperature=1.5, top_k=0)[-1] == END_OF_TEXT_ID
    )
    new_ids = remote.reference.generate(prompt, seed=seed, temperature=1.5, top_k=0)
    chunks = streamed(remote, prompt, random_seed=seed, temperature=1.5, top_k=0)
    assert "".join(chunk.text for chunk in chunks) == remote.reference.text(prompt, new_ids)
    assert (chunks[-1].finish_reason, chunks[-1].num_output_tokens) == ("stop", len(new_ids))


def test_streamed_pieces_never_split_a_character(remote: Remote) -> None:
    """Many tokens are half a character. What is sent of one is whole, or a replacement that is final."""
    seeds = range(6)
    texts_seen = []
    for seed in seeds:
        pieces = [c.text for c in streamed(remote, prompt_of(6), random_seed=seed, temperature=2.0, max_tokens=200)]
        assert not any(piece.endswith("\ufffd") for piece in pieces[:-1])
        texts_seen.append("".join(pieces))
        assert texts_seen[-1] == expected_text(remote, prompt_of(6), seed=seed, temperature=2.0, max_new_tokens=200)
    assert any(ord(character) > 0x7F and character != "\ufffd" for text in texts_seen for character in text)


def leave_grpc(remote: Remote) -> None:
    with CorollaClient(remote.server.grpc) as client:
        for _ in client.generate(text_of(prompt_of(6)), max_tokens=1000):
            break


def leave_http(remote: Remote) -> None:
    body = {"text_input": text_of(prompt_of(6)), "max_tokens": 1000, "stream": True}
    events = remote.http.generate_stream(body)
    next(events)
    events.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("leave", [leave_grpc, leave_http])
def test_client_that_leaves_in_mid_stream_frees_its_session(remote: Remote, leave: Any) -> None:
    sessions = remote.sessions
    wait_until(lambda: sessions.stat()["open_sessions"] == 0)
    free = sessions.stat()["free_tokens"]
    leave(remote)
    wait_until(lambda: sessions.stat()["free_tokens"] == free, timeout=5)
    assert text_streamed(remote, prompt_of(6)) == expected_text(remote, prompt_of(6))


def test_clients_that_leave_do_not_disturb_those_that_stay(remote: Remote) -> None:
    with ThreadPoolExecutor(6) as pool:
        stays = [pool.submit(text_streamed, remote, prompt_of(length), max_tokens=64) for length in (6, 40, 300)]
        for leave in (leave_grpc, leave_http, leave_grpc):
            pool.submit(leave, remote).result()
    for length, text in zip((6, 40, 300), stays, strict=True):
        assert text.result() == expected_text(remote, prompt_of(length))


def test_client_names_an_option_it_does_not_know(remote: Remote) -> None:
    with pytest.raises(CorollaError, match=r"maximum: no option of generate; options: .*max_tokens"):
        streamed(remote, prompt_of(6), maximum=3)


def test_client_tells_the_servers_error(remote: Remote) -> None:
    with pytest.raises(CorollaError, match=r"temperature: -1.0 is not allowed"):
        streamed(remote, prompt_of(6), temperature=-1.0)
    assert text_streamed(remote, prompt_of(6)) == expected_text(remote, prompt_of(6))


@pytest.mark.parametrize("options", [{"max_tokens": 2**40}, {"max_tokens": "many"}, {"random_seed": -1}])
def test_client_names_a_value_that_fits_no_tensor(remote: Remote, options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(CorollaError, match=f"{name}: .* is not allowed; allowed: what fits into"):
        streamed(remote, prompt_of(6), **options)


def test_client_says_when_no_server_answers() -> None:
    with CorollaClient("127.0.0.1:9") as client, pytest.raises(CorollaError, match=r"127.0.0.1:9"):
        list(client.generate("t5"))
