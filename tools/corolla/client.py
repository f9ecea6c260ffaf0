"""A Python client of a Corolla server, over gRPC."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np
import tritonclient.grpc as grpc_client
from tritonclient.utils import InferenceServerException, np_to_triton_dtype, triton_to_np_dtype

from corolla.errors import CorollaError, InvalidValueError

DEFAULT_ADDRESS = "127.0.0.1:8001"

_OPTIONS = {
    "max_tokens": "INT32",
    "min_length": "INT32",
    "top_k": "INT32",
    "temperature": "FP32",
    "top_p": "FP32",
    "min_p": "FP32",
    "repetition_penalty": "FP32",
    "presence_penalty": "FP32",
    "frequency_penalty": "FP32",
    "random_seed": "UINT64",
    "priority": "INT32",
    "timeout": "FP32",
    "session_id": "BYTES",
    "adapter": "BYTES",
    "sampling_parameters": "BYTES",
    "stop_words": "BYTES",
    "bad_words": "BYTES",
}


_SESSION_FIELDS = {
    "session_id": "BYTES",
    "max_length": "INT32",
    "timeout": "FP32",
    "priority": "INT32",
    "idle_timeout": "FP32",
    "adapter": "BYTES",
    "source": "BYTES",
    "address": "BYTES",
}


@dataclass(frozen=True)
class GenerationChunk:
    """A piece of text.

    The first one names the session, with which a generation that was broken off can be gone on with; the last
    one tells how the generation ended: `finish_reason` is stop or length.
    """

    text: str
    session_id: str | None = None
    finish_reason: str | None = None
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None


class CorollaClient:
    """Talks to one server, `host:port` of its gRPC endpoint. Not for use by several threads at once.

    Calls of `sessions` have `deadline` seconds, or as long as they take.
    """

    def __init__(self, address: str = DEFAULT_ADDRESS, deadline: float | None = None) -> None:
        self._address = address
        self._deadline = deadline
        self._client = grpc_client.InferenceServerClient(address)
        self._most_short: int | None = None

    def __enter__(self) -> "CorollaClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def generate(self, text: str, **options: Any) -> Iterator[GenerationChunk]:
        """Streams the text that follows `text`. Leaving the iteration early cancels the generation.

        Options are inputs of the `generate` model (docs/protocol.md): max_tokens, temperature, top_p, ...
        Raises CorollaError with the server's message, also when no server answers.
        """
        inputs = [_input("text_input", "BYTES", [text]), _input("stream", "BOOL", [True])]
        for name, value in options.items():
            if name not in _OPTIONS:
                raise CorollaError(f"{name}: no option of generate; options: {', '.join(sorted(_OPTIONS))}")
            inputs.append(_input(name, _OPTIONS[name], list(value) if isinstance(value, list | tuple) else [value]))
        answers: SimpleQueue[tuple[Any, Exception | None]] = SimpleQueue()
        ended = False
        self._client.start_stream(lambda result, error: answers.put((result, error)))
        try:
            with suppress(InferenceServerException):  # a stream that broke already has reported why
                self._client.async_stream_infer("generate", inputs, enable_empty_final_response=True)
            yield from self._chunks(answers)
            ended = True
        finally:  # a cancellation just after the end can keep Triton from ever unloading the model
            self._client.stop_stream(cancel_requests=not ended)

    def sessions(self, operation: str, **fields: str | float | None) -> dict[str, Any]:
        """Calls an operation of the `sessions` model; the reply's fields by name (docs/protocol.md).

        Raises CorollaError with the server's message, and when the deadline passes.
        """
        inputs = [flat_input("operation", "BYTES", operation)]
        inputs += [
            flat_input(name, _SESSION_FIELDS[name], value) for name, value in fields.items() if value is not None
        ]
        try:
            reply = self._client.infer("sessions", inputs, client_timeout=self._deadline)
        except InferenceServerException as error:
            raise CorollaError(f"{self._address}: {error.message()}") from error
        names = [output.name for output in reply.get_response().outputs]
        return {
            name: value.decode() if isinstance(value, bytes) else int(value)
            for name, value in ((name, reply.as_numpy(name)[0]) for name in names)
        }

    def step(self, hidden_states: np.ndarray, session_ids: Sequence[str], start_positions: Sequence[int]) -> np.ndarray:
        """One step of sessions, hidden states [B, T, H] in the model's dtype to the same.

        Short steps, of B * T <= max_short_tokens as the server was set up, run on the merged `chain`, where they
        share a batch with other clients' steps; longer ones on the `ranges`, where they hold up nobody. Raises
        CorollaError with the server's message.
        """
        inputs = [
            _array("hidden_states", hidden_states),
            _array("session_id", np.array([[session_id.encode()] for session_id in session_ids], np.object_)),
            _array("start_position", np.array(start_positions, np.int32)[:, None]),
        ]
        try:
            short = hidden_states.shape[0] * hidden_states.shape[1] <= self._max_short_tokens()
            reply = self._client.infer("chain" if short else "ranges", inputs)
        except InferenceServerException as error:
            raise CorollaError(f"{self._address}: {error.message()}") from error
        return reply.as_numpy("output_hidden_states")

    def _max_short_tokens(self) -> int:
        """What the server's `chain` says; asked once."""
        if self._most_short is None:
            config = self._client.get_model_config("chain").config
            self._most_short = int(config.parameters["max_short_tokens"].string_value)
        return self._most_short

    def _chunks(self, answers: SimpleQueue[tuple[Any, Exception | None]]) -> Iterator[GenerationChunk]:
        final = False
        while not final:
            result, error = answers.get()
            if error is not None:
                raise CorollaError(f"{self._address}: {error.message()}")  # type: ignore[attr-defined]
            final = result.get_response().parameters["triton_final_response"].bool_param
            text = result.as_numpy("text_output")
            if text is not None:
                yield GenerationChunk(
                    text.ravel()[0].decode(),
                    _decoded(result, "session_id"),
                    _decoded(result, "finish_reason"),
                    _number(result, "num_input_tokens"),
                    _number(result, "num_output_tokens"),
                )


def _input(name: str, datatype: str, values: list[Any]) -> grpc_client.InferInput:
    """An input [1, N] of a model that batches."""
    return _tensor(name, datatype, [values])


def flat_input(name: str, datatype: str, value: str | float) -> grpc_client.InferInput:
    """An input [1] of a model that does not."""
    return _tensor(name, datatype, [value])


def _array(name: str, values: np.ndarray) -> grpc_client.InferInput:
    """An input of a whole array, in its own dtype."""
    tensor = grpc_client.InferInput(name, list(values.shape), np_to_triton_dtype(values.dtype))
    tensor.set_data_from_numpy(values)
    return tensor


def _tensor(name: str, datatype: str, nested: list[Any]) -> grpc_client.InferInput:
    dtype = np.dtype(triton_to_np_dtype(datatype))
    try:
        values = np.array(nested, np.float64 if dtype.kind == "f" else np.object_)
        if dtype.kind in "iu" and not all(_fits(value, dtype) for value in values.ravel()):
            raise ValueError
    except (TypeError, ValueError) as error:
        raise InvalidValueError(name, nested[0], f"what fits into {datatype}") from error
    tensor = grpc_client.InferInput(name, list(values.shape), datatype)
    tensor.set_data_from_numpy(values.astype(dtype))
    return tensor


def _fits(value: Any, dtype: np.dtype) -> bool:
    """Whether a Python number is a whole one in the range of an integer dtype."""
    limits = np.iinfo(dtype)
    return isinstance(value, int) and limits.min <= value <= limits.max


def _decoded(result: Any, name: str) -> str | None:
    value = result.as_numpy(name)
    return None if value is None else value.ravel()[0].decode()


def _number(result: Any, name: str) -> int | None:
    value = result.as_numpy(name)
    return None if value is None else int(value.ravel()[0])
