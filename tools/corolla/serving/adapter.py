"""The one module that knows Triton's Python backend: requests to tensors, results and errors to responses."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils

from corolla.errors import (
    AdapterError,
    CorollaError,
    InvalidRequestError,
    InvalidValueError,
    NotFoundError,
    OverloadedError,
)

REPLACEMENT_TIMEOUT = 30.0
REPLACEMENT_POLL = 0.1

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def tensor(request: Any, name: str) -> torch.Tensor | None:
    """An input as a torch tensor on the same memory, valid while the request is; None if absent."""
    found = pb_utils.get_input_tensor_by_name(request, name)
    return None if found is None else torch.from_dlpack(found.to_dlpack())


def integers(request: Any, name: str) -> list[int] | None:
    """A small integer input, flattened; None if absent."""
    found = pb_utils.get_input_tensor_by_name(request, name)
    return None if found is None else found.as_numpy().ravel().tolist()


def strings(request: Any, name: str) -> list[str] | None:
    """A BYTES input, flattened; None if absent. InvalidValueError for bytes that are no UTF-8."""
    found = pb_utils.get_input_tensor_by_name(request, name)
    if found is None:
        return None
    try:
        return [value if isinstance(value, str) else value.decode() for value in found.as_numpy().ravel()]
    except UnicodeDecodeError as error:
        raise InvalidValueError(name, error.object, "text in UTF-8") from error


def scalar(request: Any, name: str) -> Any | None:
    """The single value of an input as bool, int, float or str; None if absent.

    InvalidValueError for any other number of values, and for bytes that are no UTF-8.
    """
    found = pb_utils.get_input_tensor_by_name(request, name)
    if found is None:
        return None
    values = found.as_numpy().ravel()
    if values.size != 1:
        raise InvalidValueError(name, f"{values.size} values", "exactly one")
    if values.dtype == object:
        return (strings(request, name) or [""])[0]
    return values[0].item()


def wants(request: Any, name: str) -> bool:
    """Whether an output was asked for."""
    return name in request.requested_output_names()


def array(request: Any, name: str) -> Any | None:
    """An input as a numpy array on the same memory, valid while the request is; None if absent."""
    found = pb_utils.get_input_tensor_by_name(request, name)
    return None if found is None else found.as_numpy()


def response(**outputs: Any) -> Any:
    """A response of torch tensors and numpy arrays by output name."""
    return pb_utils.InferenceResponse([_output(name, value) for name, value in outputs.items()])


def error_response(error: Exception) -> Any:
    """A response that carries an error; what is no CorollaError is named by its type as well."""
    return pb_utils.InferenceResponse([], _triton_error(error))


def span_error_response(error: Exception) -> Any:
    """Like `error_response`, with the status in front: Triton's streams carry errors without it."""
    return pb_utils.InferenceResponse([], _triton_error(error, prefix=f"{_status(error)}: "))


def answered(make: Callable[[], Any]) -> Any:
    """The response that `make` returns, or one with the error it raises."""
    try:
        return make()
    except Exception as error:
        return error_response(error)


def make_counter(family: str, description: str, labels: dict[str, str]) -> Any:
    """A counter among the server's metrics; it lives as long as its family, which goes with it."""
    found = pb_utils.MetricFamily(name=family, description=description, kind=pb_utils.MetricFamily.COUNTER)
    return _Counter(found, found.Metric(labels=labels))


@dataclass(frozen=True)
class _Counter:
    family: Any
    metric: Any

    def increment(self, value: float) -> None:
        self.metric.increment(value)


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, CorollaError) else f"internal error: {type(error).__name__}: {error}"


def _status(error: Exception) -> str:
    """As gRPC names it."""
    if isinstance(error, InvalidRequestError | AdapterError):
        return "INVALID_ARGUMENT"
    if isinstance(error, NotFoundError):
        return "NOT_FOUND"
    return "UNAVAILABLE" if isinstance(error, OverloadedError) else "INTERNAL"


def _triton_error(error: Exception, prefix: str = "") -> Any:
    codes = pb_utils.TritonError
    status = _status(error)
    code = codes.INVALID_ARG if status == "INVALID_ARGUMENT" else getattr(codes, status)
    return codes(prefix + _message(error), code)


def _output(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return pb_utils.Tensor.from_dlpack(name, value.cpu().contiguous())
    return pb_utils.Tensor(name, value)


def step_blocks(model: str, hidden_states: torch.Tensor, session_id: str, start_position: int) -> torch.Tensor:
    """Steps one session through another model of this server, hidden states [1, T, H] to the same.

    A step can be repeated without harm, so while the model's process is being replaced it is tried again for
    REPLACEMENT_TIMEOUT seconds. Raises InvalidRequestError or CorollaError with the model's message.
    """
    request = pb_utils.InferenceRequest(
        model_name=model,
        requested_output_names=["output_hidden_states"],
        inputs=[
            _output("hidden_states", hidden_states),
            _output("session_id", np.array([[session_id.encode()]], dtype=object)),
            _output("start_position", np.array([[start_position]], np.int32)),
        ],
    )
    deadline = time.monotonic() + REPLACEMENT_TIMEOUT
    while (answer := request.exec()).has_error():
        error = answer.error()
        if error.code() == pb_utils.TritonError.INVALID_ARG:
            raise InvalidRequestError(error.message())
        if time.monotonic() > deadline:
            raise CorollaError(error.message())
        time.sleep(REPLACEMENT_POLL)
    output = pb_utils.get_output_tensor_by_name(answer, "output_hidden_states")
    return torch.from_dlpack(output.to_dlpack()).clone()
