"""Requests to a running server over both protocols, and its answers in one form."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np
import requests
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

Tensors = dict[str, np.ndarray]

_HTTP_STATUS = {"400": "INVALID_ARGUMENT", "404": "NOT_FOUND", "503": "UNAVAILABLE", "500": "INTERNAL"}


class RequestError(Exception):
    """A refusal: `status` as gRPC names it, `message` as the server wrote it."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message

    @classmethod
    def of(cls, error: InferenceServerException) -> "RequestError":
        status = str(error.status()).removeprefix("StatusCode.")
        return cls(_HTTP_STATUS.get(status, status), error.message())


class Wire:
    """One protocol of a server at `address`."""

    name: str
    _module: Any

    def __init__(self, address: str) -> None:
        self.address = address

    def infer(self, model: str, **tensors: np.ndarray) -> Tensors:
        """The outputs by name; RequestError."""
        with self._module.InferenceServerClient(self.address) as client:
            try:
                result = client.infer(model, [self.input(name, value) for name, value in tensors.items()])
            except InferenceServerException as error:
                raise RequestError.of(error) from None
            return {name: result.as_numpy(name) for name in self._output_names(result)}

    def input(self, name: str, value: np.ndarray) -> Any:
        """One input as tritonclient wants it."""
        tensor = self._module.InferInput(name, list(value.shape), np_to_triton_dtype(value.dtype))
        tensor.set_data_from_numpy(value)
        return tensor

    def _output_names(self, result: Any) -> list[str]:
        raise NotImplementedError


class HttpWire(Wire):
    """The inference protocol over HTTP, and Triton's two endpoints for generation."""

    name = "http"
    _module = http_client

    def generate(self, body: dict[str, Any] | bytes) -> dict[str, Any]:
        """The answer of /generate."""
        response = self.post("generate", body)
        answer: dict[str, Any] = response.json()
        if "error" in answer:
            raise RequestError(_HTTP_STATUS.get(str(response.status_code), str(response.status_code)), answer["error"])
        return answer

    def generate_stream(self, body: dict[str, Any] | bytes) -> Iterator[dict[str, Any]]:
        """The events of /generate_stream, as they come; leaving early closes the connection."""
        with self.post("generate_stream", body, stream=True) as response:
            for line in response.iter_lines():
                if line.startswith(b"data: "):
                    event = json.loads(line.removeprefix(b"data: "))
                    if "error" in event:
                        raise RequestError(_HTTP_STATUS[str(response.status_code)], event["error"])
                    yield event

    def post(self, endpoint: str, body: dict[str, Any] | bytes, **options: Any) -> requests.Response:
        url = f"http://{self.address}/v2/models/generate/{endpoint}"
        data = body if isinstance(body, bytes) else json.dumps(body)
        return requests.post(url, data=data, timeout=120, **options)

    def _output_names(self, result: Any) -> list[str]:
        return [output["name"] for output in result.get_response()["outputs"]]


class GrpcWire(Wire):
    """The inference protocol over gRPC."""

    name = "grpc"
    _module = grpc_client

    def generate(self, tensors: Tensors, outputs: list[str] | None = None) -> list[Tensors]:
        """All responses of one request to `generate` over a stream; RequestError."""
        answers: SimpleQueue[tuple[Any, Any]] = SimpleQueue()
        responses: list[Tensors] = []
        with grpc_client.InferenceServerClient(self.address) as client:
            client.start_stream(lambda result, error: answers.put((result, error)))
            client.async_stream_infer(
                "generate",
                [self.input(name, value) for name, value in tensors.items()],
                outputs=[grpc_client.InferRequestedOutput(name) for name in outputs] if outputs else None,
            )
            final = False
            while not final:
                result, error = answers.get(timeout=120)
                if error is not None:
                    raise RequestError.of(error)
                final = result.get_response().parameters["triton_final_response"].bool_param
                responses.append({name: result.as_numpy(name) for name in self._output_names(result)})
        return responses

    def _output_names(self, result: Any) -> list[str]:
        return [output.name for output in result.get_response().outputs]


@dataclass(frozen=True)
class Sessions:
    """The `sessions` model over one protocol."""

    wire: Wire

    def open(self, max_length: int, **options: np.ndarray) -> str:
        reply = self.call("open", max_length=np.array([max_length], np.int32), **options)
        return str(reply["session_id"])

    def close(self, session_id: str) -> dict[str, Any]:
        return self.call("close", session_id=texts(session_id))

    def stat(self, session_id: str | None = None) -> dict[str, Any]:
        return self.call("stat", **({} if session_id is None else {"session_id": texts(session_id)}))

    def call(self, operation: str, **tensors: np.ndarray) -> dict[str, Any]:
        """The reply's fields."""
        outputs = self.wire.infer("sessions", operation=texts(operation), **tensors)
        assert all(value.shape == (1,) for value in outputs.values())
        return {name: v[0].decode() if v.dtype == object else int(v[0]) for name, v in outputs.items()}


def texts(*values: str | bytes) -> np.ndarray:
    """BYTES [N]."""
    return np.array([v if isinstance(v, bytes) else v.encode() for v in values], dtype=object)


def text_of_responses(responses: list[Tensors]) -> str:
    """What the responses say together."""
    return b"".join(response["text_output"].ravel()[0] for response in responses if "text_output" in response).decode()
