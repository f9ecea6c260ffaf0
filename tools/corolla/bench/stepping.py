"""Steps of one session, sent by a client over gRPC."""

from typing import Any

import numpy as np
import tritonclient.grpc as grpc_client
from tritonclient.utils import triton_to_np_dtype

from corolla.client import CorollaClient
from corolla.repository.plan import RepositoryPlan

OPEN_SECONDS = 60.0
"""To wait for room."""


def random_states(plan: RepositoryPlan, positions: int, seed: int = 0) -> np.ndarray:
    """Hidden states [1, T, H] of normal numbers, in the type that is served."""
    values = np.random.default_rng(seed).normal(size=(1, positions, plan.config.hidden_size))
    return values.astype(triton_to_np_dtype(plan.dtype.protocol_name))


class SteppedSession:
    """A session of `max_length` positions, open while the context lasts, with a connection of its own."""

    def __init__(self, address: str, plan: RepositoryPlan, max_length: int) -> None:
        self._datatype = plan.dtype.protocol_name
        self._client = grpc_client.InferenceServerClient(address)
        self._sessions = CorollaClient(address)
        reply = self._sessions.sessions("open", max_length=max_length, timeout=OPEN_SECONDS)
        self._session_id = reply["session_id"]

    def __enter__(self) -> "SteppedSession":
        return self

    def __exit__(self, *_: object) -> None:
        with self._client, self._sessions:
            self._sessions.sessions("close", session_id=self._session_id)

    def step(self, model: str, hidden_states: np.ndarray, start_position: int) -> np.ndarray:
        """Hidden states [1, T, H] through a model; a start before the cached length rolls back to it."""
        inputs = [
            _input("hidden_states", self._datatype, hidden_states),
            _input("session_id", "BYTES", np.array([[self._session_id.encode()]], np.object_)),
            _input("start_position", "INT32", np.array([[start_position]], np.int32)),
        ]
        outputs: np.ndarray = self._client.infer(model, inputs).as_numpy("output_hidden_states")
        return outputs


def _input(name: str, datatype: str, values: np.ndarray) -> Any:
    tensor = grpc_client.InferInput(name, list(values.shape), datatype)
    tensor.set_data_from_numpy(values)
    return tensor
