"""Every dialect of a generation request is understood, and what is wrong is named."""

import json
from typing import Any

import pytest

from corolla.errors import InvalidValueError
from corolla.generate.request import MAX_WORDS, GenerationRequest, parse_request


def parse(**inputs: Any) -> GenerationRequest:
    return parse_request({"text_input": "hello"} | inputs)


def parse_vllm(**parameters: Any) -> GenerationRequest:
    return parse(sampling_parameters=json.dumps(parameters))


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({}, {"echo": True}),
        ({"stream": True}, {"stream": True, "echo": False}),
        ({"stream": True, "exclude_input_in_output": False}, {"stream": True, "echo": True}),
        ({"exclude_input_in_output": True}, {"echo": False}),
        ({"max_tokens": 5, "min_length": 2}, {"max_tokens": 5, "min_tokens": 2}),
        ({"temperature": 0.5, "top_k": 3, "top_p": 0.25, "min_p": 0.125},
         {"temperature": 0.5, "top_k": 3, "top_p": 0.25, "min_p": 0.125}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_p": 0.0}, {"top_p": 1.0}),
        ({"repetition_penalty": 1.5, "presence_penalty": -2.0, "frequency_penalty": 2.0},
         {"repetition_penalty": 1.5, "presence_penalty": -2.0, "frequency_penalty": 2.0}),
        ({"seed": 2**64 - 1}, {"random_seed": 2**64 - 1}),
        ({"random_seed": 7}, {"random_seed": 7}),
        ({"stop_words": ["a", "", "b"], "bad_words": [""]}, {"stop_words": ("a", "b"), "bad_words": ()}),
        ({"beam_width": 1, "length_penalty": 1.0, "return_num_input_tokens": True}, {}),
        ({"max_tokens": None, "temperature": None}, {}),
    ],
    ids=str,
)  # fmt: skip
def test_tensors_are_read_as_their_clients_mean_them(inputs: dict[str, Any], expected: dict[str, Any]) -> None:
    assert parse(**inputs) == GenerationRequest(**({"text_input": "hello"} | expected))


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"max_tokens": "12"}, {"max_tokens": 12}),
        ({"temperature": "0", "top_p": "0.95", "top_k": "-1"}, {"temperature": 0.0, "top_p": 0.95, "top_k": 0}),
        ({"ignore_eos": "True", "min_tokens": 3}, {"ignore_eos": True, "min_tokens": 3}),
        ({"ignore_eos": "false"}, {"ignore_eos": False}),
        ({"stop": "END"}, {"stop_words": ("END",)}),
        ({"stop": "1"}, {"stop_words": ("1",)}),
        ({"stop": ["a", "b"], "seed": 3}, {"stop_words": ("a", "b"), "random_seed": 3}),
        ({"n": 1, "best_of": "1", "use_beam_search": False}, {}),
        ({"max_tokens": None}, {}),
        ({"bad_words": ["x"], "length_penalty": 1.0}, {"bad_words": ("x",)}),
    ],
    ids=str,
)
def test_sampling_parameters_of_vllm_may_hold_numbers_or_strings(
    parameters: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert parse_vllm(**parameters) == GenerationRequest("hello", **expected)


@pytest.mark.parametrize("text", ["", "{}"])
def test_empty_sampling_parameters_say_nothing(text: str) -> None:
    assert parse(sampling_parameters=text) == GenerationRequest("hello")


def test_tensor_wins_over_sampling_parameters() -> None:
    request = parse(sampling_parameters='{"max_tokens": 5, "seed": 1, "top_k": 3}', max_tokens=6, random_seed=2)
    assert (request.max_tokens, request.random_seed, request.top_k) == (6, 2, 3)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"max_tokens": 0}, "max_tokens: 0 is not allowed; allowed: a whole number from 1 to 2147483647"),
        ({"max_tokens": -3}, "max_tokens: -3 "),
        ({"max_tokens": True}, "max_tokens: True "),
        ({"min_length": -1}, "min_length: -1 "),
        ({"temperature": -0.1}, "temperature: -0.1 is not allowed; allowed: from 0 to 100"),
        ({"temperature": float("nan")}, "temperature: nan "),
        ({"temperature": float("inf")}, "temperature: inf "),
        ({"temperature": 1e-30}, r"temperature: 1e-30 is not allowed; allowed: 0 \(greedy\), or from 1e-05 to 100"),
        ({"top_p": -0.1}, "top_p: -0.1 is not allowed; allowed: from 0 to 1"),
        ({"top_p": 1.01}, "top_p: 1.01 "),
        ({"min_p": -0.5}, "min_p: -0.5 "),
        ({"top_k": -2}, "top_k: -2 "),
        ({"repetition_penalty": 0.0}, "repetition_penalty: 0.0 is not allowed; allowed: above 0"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty: nan "),
        ({"presence_penalty": 2.1}, "presence_penalty: 2.1 is not allowed; allowed: from -2 to 2"),
        ({"frequency_penalty": float("-inf")}, "frequency_penalty: -inf "),
        ({"beam_width": 2}, "beam_width: 2 is not allowed; allowed: 1 only"),
        ({"stop_words": ["x"] * (MAX_WORDS + 1)}, f"stop_words: .* at most {MAX_WORDS} texts"),
        ({"text_input": ""}, "text_input: '' is not allowed; allowed: a text that is not empty"),
        ({"text_input": None}, "text_input: None "),
        ({"text_input": "a\0b"}, "text_input: .* without NUL"),
        ({"sampling_parameters": "{"}, r"sampling_parameters: '\{' is not allowed; allowed: a JSON object"),
        ({"sampling_parameters": "[1]"}, r"sampling_parameters: '\[1\]' is not allowed; allowed: a JSON object"),
        ({"sampling_parameters": '{"n": 2}'}, "n: 2 is not allowed; allowed: 1 only"),
        ({"sampling_parameters": '{"use_beam_search": true}'}, "use_beam_search: True is not allowed"),
        ({"sampling_parameters": '{"max_tokens": "many"}'}, "max_tokens: 'many' is not allowed"),
        ({"sampling_parameters": '{"max_tokens": 1.5}'}, "max_tokens: 1.5 "),
        ({"sampling_parameters": '{"temperature": "NaN"}'}, "temperature: "),
        ({"sampling_parameters": '{"ignore_eos": 1}'}, "ignore_eos: 1 is not allowed; allowed: true or false"),
        ({"sampling_parameters": '{"stop": [1]}'}, "stop: .* a text or a list of at most"),
        ({"sampling_parameters": '{"seed": -1}'}, "seed: -1 "),
        ({"sampling_parameters": '{"seed": 18446744073709551616}'}, "seed: 18446744073709551616 "),
        ({"sampling_parameters": '{"min_tokens": "-1"}'}, "min_tokens: -1 "),
    ],
    ids=str,
)  # fmt: skip
def test_value_that_is_not_allowed_is_named_with_what_is(inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=f"^{message}"):
        parse(**inputs)


def test_unknown_sampling_parameter_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidValueError, match=r"sampling_parameters: 'maximum' is not allowed; .*max_tokens"):
        parse_vllm(maximum=3)


def test_long_wrong_value_is_shortened_in_the_message() -> None:
    with pytest.raises(InvalidValueError) as caught:
        parse(sampling_parameters="x" * 100_000)
    assert len(str(caught.value)) < 300
