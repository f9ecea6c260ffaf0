"""A generation as asked for, in any of the dialects that clients of Triton speak."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from corolla.errors import InvalidValueError

DEFAULT_MAX_TOKENS = 16
DEFAULT_TIMEOUT = 30.0
MAX_WORDS = 256
LOWEST_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class GenerationRequest:
    """One generation. None means the checkpoint's generation_config.json decides, or its default.

    `max_tokens` counts new tokens; None: 16, or what is left of the context. `temperature` 0 or `top_k` 1 mean
    greedy. `session_id` names a generation that was broken off: the text after `text_input` is sent again and
    goes on from there. `adapter` is the name of a loaded one. `stop_words` end the text and are not part of it;
    `bad_words` never occur in it. `echo` puts the prompt in front of the first text. `random_seed` None: unpredictable.
    Lower `priority` is served first: 0 is for people who wait, larger numbers for batch work. `timeout` is how long to
    wait for room in the cache, in seconds.
    """

    text_input: str
    session_id: str | None = None
    adapter: str | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    random_seed: int | None = None
    priority: int = 0
    timeout: float = DEFAULT_TIMEOUT
    stop_words: tuple[str, ...] = ()
    bad_words: tuple[str, ...] = ()
    ignore_eos: bool = False
    stream: bool = False
    echo: bool = True


def parse_request(inputs: Mapping[str, Any]) -> GenerationRequest:
    """The request of the `generate` model's inputs by name: scalars, `stop_words` and `bad_words` as lists.

    `sampling_parameters` is vLLM's JSON object, with numbers or strings for numbers; a tensor of the same
    meaning wins over it. Raises InvalidValueError.
    """
    values = _sampling_parameters(inputs.get("sampling_parameters"))
    for name, value in inputs.items():
        if value is not None and name in _TENSORS:
            values[_TENSORS[name]] = (name, value)
    stream = bool(inputs.get("stream") or False)
    exclude_input = inputs.get("exclude_input_in_output")
    for name, only in _SINGLE_VALUED.items():
        given, value = values.pop(name, (name, only))
        if value != only:
            raise InvalidValueError(given, value, f"{only!r} only")
    values.pop("length_penalty", None)
    fields = {name: _FIELDS[name](given, value) for name, (given, value) in values.items()}
    return GenerationRequest(
        text_input=_text(inputs.get("text_input")),
        session_id=inputs.get("session_id"),
        stream=stream,
        echo=not stream if exclude_input is None else not exclude_input,
        **fields,
    )


def _sampling_parameters(text: str | None) -> dict[str, tuple[str, Any]]:
    """Names as given and values, by the names of our fields."""
    if not text:
        return {}
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidValueError("sampling_parameters", text, f"a JSON object ({error})") from error
    if not isinstance(given, dict):
        raise InvalidValueError("sampling_parameters", text, "a JSON object")
    unknown = sorted(set(given) - set(_SAMPLING_PARAMETERS))
    if unknown:
        raise InvalidValueError("sampling_parameters", unknown[0], ", ".join(sorted(_SAMPLING_PARAMETERS)))
    return {
        _SAMPLING_PARAMETERS[name]: (name, _plain(name, value)) for name, value in given.items() if value is not None
    }


def _plain(name: str, value: Any) -> Any:
    """Numbers and booleans that came as strings, as genai-perf sends them; words and names stay text."""
    if not isinstance(value, str) or name in ("stop", "bad_words", "lora_name"):
        return value
    try:
        return json.loads(value.lower())
    except ValueError:
        return value


def _text(value: Any) -> str:
    if not value:
        raise InvalidValueError("text_input", value, "a text that is not empty")
    if "\0" in value:
        raise InvalidValueError("text_input", value, "a text without NUL characters")
    return str(value)


def _integer(low: int, high: int) -> Callable[[str, Any], int]:
    def convert(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise InvalidValueError(name, value, f"a whole number from {low} to {high}")
        return value

    return convert


def _real(low: float, high: float, *, above_low: bool = False) -> Callable[[str, Any], float]:
    def convert(name: str, value: Any) -> float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not low <= value <= high or (above_low and value == low):
            raise InvalidValueError(name, value, f"{'above' if above_low else 'from'} {low:g} to {high:g}")
        return float(value)

    return convert


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidValueError(name, value, "true or false")
    return value


def _name(name: str, value: Any) -> str | None:
    if not isinstance(value, str):
        raise InvalidValueError(name, value, "the name of a loaded adapter")
    return value or None


def _words(name: str, value: Any) -> tuple[str, ...]:
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words) or len(words) > MAX_WORDS:
        raise InvalidValueError(name, value, f"a text or a list of at most {MAX_WORDS} texts")
    return tuple(word for word in words if word)


def _top_k(name: str, value: Any) -> int:
    """vLLM writes -1 for no limit, others 0."""
    return max(0, _integer(-1, 2**31 - 1)(name, value))


def _top_p(name: str, value: Any) -> float:
    """Clients of TensorRT-LLM write 0 for no limit, others 1."""
    return _real(0, 1)(name, value) or 1.0


def _temperature(name: str, value: Any) -> float:
    """Below LOWEST_TEMPERATURE, logits divided by it can be infinite."""
    temperature = _real(0, 100)(name, value)
    if 0 < temperature < LOWEST_TEMPERATURE:
        raise InvalidValueError(name, value, f"0 (greedy), or from {LOWEST_TEMPERATURE:g} to 100")
    return temperature


_FIELDS: dict[str, Callable[[str, Any], Any]] = {
    "max_tokens": _integer(1, 2**31 - 1),
    "min_tokens": _integer(0, 2**31 - 1),
    "temperature": _temperature,
    "top_k": _top_k,
    "top_p": _top_p,
    "min_p": _real(0, 1),
    "repetition_penalty": _real(0, 100, above_low=True),
    "presence_penalty": _real(-2, 2),
    "frequency_penalty": _real(-2, 2),
    "random_seed": _integer(0, 2**64 - 1),
    "priority": _integer(-(2**31), 2**31 - 1),
    "timeout": _real(0, 3600),
    "stop_words": _words,
    "bad_words": _words,
    "ignore_eos": _boolean,
    "adapter": _name,
}

_SINGLE_VALUED = {"beam_width": 1, "n": 1, "best_of": 1, "use_beam_search": False}

_TENSORS = {name: name for name in (*_FIELDS, "beam_width", "length_penalty") if name != "ignore_eos"} | {
    "min_length": "min_tokens",
    "seed": "random_seed",
}

_SAMPLING_PARAMETERS = {
    name: name
    for name in (
        "max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
        "presence_penalty", "frequency_penalty", "bad_words", "ignore_eos", "length_penalty",
        "n", "best_of", "use_beam_search",
    )
} | {"stop": "stop_words", "seed": "random_seed", "lora_name": "adapter"}  # fmt: skip
