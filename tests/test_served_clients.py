"""The exact tensors that existing clients send are understood, over the stream that they use.

Where a test can tell, the answer is that of transformers' `generate` with the settings these tensors mean.
"""

import json
from typing import Any

import numpy as np
import pytest

from checkpoints import random_prompt, text_of
from conftest import Remote
from wire import Tensors, text_of_responses, texts

PROMPT = random_prompt(6, seed=6)
TEXT = text_of(PROMPT)


def tensor(value: Any, dtype: Any) -> np.ndarray:
    """[1, 1]"""
    return np.array([[value]], dtype)


def words(*values: str) -> np.ndarray:
    """[1, N]"""
    return texts(*values)[None]


def genai_perf_vllm(stream: bool) -> Tensors:
    return {
        "text_input": words(TEXT),
        "exclude_input_in_output": tensor(True, bool),
        "stream": tensor(stream, bool),
        "sampling_parameters": words(json.dumps({"max_tokens": "12"})),
    }


def genai_perf_tensorrtllm(stream: bool) -> Tensors:
    return {
        "text_input": words(TEXT),
        "max_tokens": tensor(12, np.int32),
        "exclude_input_in_output": tensor(True, bool),
        "stream": tensor(stream, bool),
        "min_length": tensor(12, np.int32),
    }


def openai_frontend(stream: bool) -> Tensors:
    return {
        "text_input": words(TEXT),
        "stream": tensor(stream, bool),
        "max_tokens": tensor(12, np.int32),
        "stop_words": words("never", "t999"),
        "top_p": tensor(1.0, np.float32),
        "temperature": tensor(0.0, np.float32),
        "frequency_penalty": tensor(0.0, np.float32),
        "presence_penalty": tensor(0.0, np.float32),
        "seed": tensor(5, np.uint64),
        "return_num_input_tokens": tensor(True, bool),
        "return_num_output_tokens": tensor(True, bool),
    }


def llama_index(stream: bool) -> Tensors:
    """LangChain sends the same, with UINT32 for INT32, which Triton refuses for any model that declares INT32."""
    return {
        "text_input": words(TEXT),
        "max_tokens": tensor(12, np.int32),
        "top_k": tensor(1, np.int32),
        "top_p": tensor(0.0, np.float32),
        "temperature": tensor(1.0, np.float32),
        "length_penalty": tensor(1.0, np.float32),
        "repetition_penalty": tensor(1.0, np.float32),
        "random_seed": tensor(0, np.uint64),
        "beam_width": tensor(1, np.int32),
        "stream": tensor(stream, bool),
    }


CLIENTS = [genai_perf_vllm, genai_perf_tensorrtllm, openai_frontend, llama_index]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("client", CLIENTS)
def test_tensors_of_a_client_give_the_greedy_text(remote: Remote, client: Any, stream: bool) -> None:
    tensors = client(stream)
    responses = remote.grpc.generate(tensors)
    echo = not stream and "exclude_input_in_output" not in tensors
    added = remote.reference.text(PROMPT, remote.reference.generate(PROMPT, max_new_tokens=12))
    assert text_of_responses(responses) == (TEXT if echo else "") + added
    assert responses[-1]["num_input_tokens"].tolist() == [[6]]
    assert responses[-1]["num_output_tokens"].tolist() == [[12]]
    assert len(responses) == 1 or stream


def test_client_may_ask_for_the_text_only(remote: Remote) -> None:
    """As LangChain and LlamaIndex do; the last response must carry the final flag by itself."""
    responses = remote.grpc.generate(llama_index(stream=True), outputs=["text_output"])
    assert all(set(response) == {"text_output"} for response in responses)
    added = remote.reference.text(PROMPT, remote.reference.generate(PROMPT, max_new_tokens=12))
    assert text_of_responses(responses) == added


@pytest.mark.parametrize(
    ("tensors", "settings"),
    [
        ({"temperature": tensor(0.9, np.float32), "seed": tensor(5, np.uint64)}, {"temperature": 0.9}),
        ({"top_k": tensor(7, np.int32), "random_seed": tensor(5, np.uint64)}, {"top_k": 7}),
        ({"top_p": tensor(0.5, np.float32), "random_seed": tensor(5, np.uint64)}, {"top_p": 0.5}),
        ({"min_p": tensor(0.25, np.float32), "seed": tensor(5, np.uint64)}, {"min_p": 0.25}),
        ({"repetition_penalty": tensor(1.5, np.float32)}, {"seed": None, "repetition_penalty": 1.5}),
        ({"sampling_parameters": words('{"temperature": "0.5", "top_p": 0.75, "seed": "5"}')},
         {"temperature": 0.5, "top_p": 0.75}),
        ({"sampling_parameters": words('{"ignore_eos": true}')}, {"seed": None, "eos_token_id": None}),
        ({"top_p": tensor(0.0, np.float32), "temperature": tensor(1.5, np.float32), "seed": tensor(5, np.uint64)},
         {"temperature": 1.5}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else None,
)  # fmt: skip
def test_every_setting_means_what_transformers_means(
    remote: Remote, tensors: Tensors, settings: dict[str, Any]
) -> None:
    common = {"text_input": words(TEXT), "max_tokens": tensor(32, np.int32), "stream": tensor(True, bool)}
    responses = remote.grpc.generate(common | tensors)
    new_ids = remote.reference.generate(PROMPT, **({"seed": 5, "max_new_tokens": 32} | settings))
    assert text_of_responses(responses) == remote.reference.text(PROMPT, new_ids)


def test_litellm_nests_its_parameters(remote: Remote) -> None:
    body = {
        "text_input": TEXT,
        "parameters": {"max_tokens": 12, "bad_words": [""], "stop_words": [""]},
        "stream": False,
    }
    added = remote.reference.text(PROMPT, remote.reference.generate(PROMPT, max_new_tokens=12))
    assert remote.http.generate(body)["text_output"] == TEXT + added
    streamed = remote.http.generate_stream(body | {"stream": True})
    assert "".join(event["text_output"] for event in streamed) == added


def test_json_may_hold_lists_of_words_and_scalars_that_nobody_knows(remote: Remote) -> None:
    stop_word = f" t{remote.reference.generate(PROMPT)[0]}"
    body = {"text_input": TEXT, "max_tokens": 12, "stop_words": ["never", stop_word], "bad_words": [], "user": "x"}
    assert remote.http.generate(body)["text_output"] == TEXT
