"""Steps as requests of Triton's inference protocol, and its responses as outputs of steps."""

from typing import Any

import numpy as np
from tritonclient.grpc.service_pb2 import ModelInferRequest, ModelInferResponse

from corolla.wire.messages import SpanOutput, SpanStep, hops_to_json
from corolla.wire.states import WireStates

MODEL = "span"
ACKNOWLEDGEMENT = ("pushed", "free_tokens", "seconds", "duplicate")
"""The outputs without the hidden states."""


def to_request(step: SpanStep, request_id: str, *, acknowledge: bool) -> ModelInferRequest:
    """A request to `span`; to `acknowledge` asks for an answer without hidden states."""
    request = ModelInferRequest(model_name=MODEL, id=request_id)
    _add(request, "session_id", "BYTES", [len(step.session_ids)], _texts(*step.session_ids))
    _add(request, "start_position", "INT32", [len(step.starts)], np.array(step.starts, np.int32).tobytes())
    _add(request, "step_id", "BYTES", [1], _texts(step.step_id))
    _add(request, "timeout", "FP32", [1], np.float32(step.timeout).tobytes())
    if step.blocks is not None:
        _add(request, "blocks", "INT32", [2], np.array([step.blocks.start, step.blocks.stop], np.int32).tobytes())
    if step.next:
        _add(request, "next", "BYTES", [1], _texts(hops_to_json(step.next)))
    if step.states is not None:
        _add(request, "hidden_states", "UINT8", [len(step.states.data)], step.states.data.tobytes())
        _add(request, "encoding", "BYTES", [1], _texts(step.states.encoding))
        _add(request, "shape", "INT32", [3], np.array(step.states.shape, np.int32).tobytes())
    if acknowledge:
        for name in ACKNOWLEDGEMENT:
            request.outputs.add(name=name)
    return request


def from_response(response: ModelInferResponse) -> SpanOutput:
    """What `span` answered."""
    raw = {
        output.name: content for output, content in zip(response.outputs, response.raw_output_contents, strict=True)
    }
    states = None
    if "hidden_states" in raw:
        rows, positions, hidden_size = np.frombuffer(raw["shape"], np.int32).tolist()
        data = np.frombuffer(raw["hidden_states"], np.uint8)
        states = WireStates(data, raw["encoding"][4:].decode(), (rows, positions, hidden_size))
    return SpanOutput(
        states,
        pushed=bool(_number(raw, "pushed", bool)),
        free_tokens=int(_number(raw, "free_tokens", np.int64)),
        seconds=float(_number(raw, "seconds", np.float32)),
        duplicate=bool(_number(raw, "duplicate", bool)),
    )


def _add(request: ModelInferRequest, name: str, datatype: str, shape: list[int], content: bytes) -> None:
    request.inputs.add(name=name, datatype=datatype, shape=shape)
    request.raw_input_contents.append(content)


def _texts(*values: str) -> bytes:
    """BYTES elements: each with its length in front."""
    encoded = [value.encode() for value in values]
    return b"".join(len(value).to_bytes(4, "little") + value for value in encoded)


def _number(raw: dict[str, bytes], name: str, dtype: Any) -> Any:
    return np.frombuffer(raw[name], dtype)[0]
