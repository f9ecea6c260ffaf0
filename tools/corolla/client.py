"""A Python client of a Corolla server, over gRPC."""

from collections.abc import Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np
import tritonclient.grpc as grpc_client

from corolla.errors import CorollaError

DEFAULT_ADDRESS = "127.0.0.1:8001"

_DTYPES: dict[str, tuple[str, Any]] = {
    "max_tokens": ("INT32", np.int32),
    "min_length": ("INT32", np.int32),
    "top_k": ("INT32", np.int32),
    "temperature": ("FP32", np.float32),
    "top_p": ("FP32", np.float32),
    "min_p": ("FP32", np.float32),
    "repetition_penalty": ("FP32", np.float32),
    "presence_penalty": ("FP32", np.float32),
    "frequency_penalty": ("FP32", np.float32),
    "random_seed": ("UINT64", np.uint64),
    "stop_words": ("BYTES", np.object_),
    "bad_words": ("BYTES", np.object_),
}


@dataclass(frozen=True)
class GenerationChunk:
    """A piece of text; the last one tells how the generation ended: `finish_reason` is stop or length."""

    text: str
    finish_reason: str | None = None
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None


class CorollaClient:
    """Talks to one server, `host:port` of its gRPC endpoint. Not for use by several threads at once."""

    def __init__(self, address: str = DEFAULT_ADDRESS) -> None:
        self._address = address
        self._client = grpc_client.InferenceServerClient(address)

    def __enter__(self) -> "CorollaClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def generate(self, text: str, **options: Any) -> Iterator[GenerationChunk]:
        """Streams the text that follows `text`. Leaving the iteration early cancels the generation.

        Options are inputs of the `generate` model (docs/protocol.md): max_tokens, temperature, top_p, ...
        Raises CorollaError with the server's message, also when no server answers.
        """
        inputs = [_input("text_input", "BYTES", [text.encode()]), _input("stream", "BOOL", [True])]
        for name, value in options.items():
            if name not in _DTYPES:
                raise CorollaError(f"{name}: no option of generate; options: {', '.join(sorted(_DTYPES))}")
            values = [v.encode() for v in value] if isinstance(value, list | tuple) else [value]
            inputs.append(_input(name, _DTYPES[name][0], values))
        answers: SimpleQueue[tuple[Any, Exception | None]] = SimpleQueue()
        self._client.start_stream(lambda result, error: answers.put((result, error)))
        try:
            self._client.async_stream_infer("generate", inputs, enable_empty_final_response=True)
            yield from self._chunks(answers)
        finally:
            self._client.stop_stream(cancel_requests=True)

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
                    _decoded(result, "finish_reason"),
                    _number(result, "num_input_tokens"),
                    _number(result, "num_output_tokens"),
                )


def _input(name: str, datatype: str, values: list[Any]) -> grpc_client.InferInput:
    dtype = {"BYTES": np.object_, "BOOL": np.bool_}.get(datatype) or _DTYPES[name][1]
    tensor = grpc_client.InferInput(name, [1, len(values)], datatype)
    tensor.set_data_from_numpy(np.array([values], dtype))
    return tensor


def _decoded(result: Any, name: str) -> str | None:
    value = result.as_numpy(name)
    return None if value is None else value.ravel()[0].decode()


def _number(result: Any, name: str) -> int | None:
    value = result.as_numpy(name)
    return None if value is None else int(value.ravel()[0])
