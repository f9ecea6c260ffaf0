"""Load on `chain` over gRPC: every user steps a session of its own, and Triton batches the steps of all users.

locust -f tests/load/chain_steps.py --headless -u 4 -r 4 -t 30s -s 30 -H 127.0.0.1:8001

A token is one step of one position with random hidden states, a request is a whole session from open to close. The
first token includes the opening. No embedding, no head, no sampling.
"""

from functools import cached_property
from typing import Any

import numpy as np
import tritonclient.grpc as grpc_client
from locust import events
from locust.env import Environment
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

import grpc_gevent  # noqa: F401
from corolla.client import CorollaClient
from timing import Timing
from users import StreamingUser, run

OPEN_SECONDS = 60.0
"""To wait for room."""


class ChainUser(StreamingUser):
    """Has a connection of its own, and one session at a time."""

    host = "127.0.0.1:8001"
    kind = "chain"

    def on_start(self) -> None:
        super().on_start()
        self._client = self.connections.enter_context(grpc_client.InferenceServerClient(self.address))
        self._sessions = self.connections.enter_context(CorollaClient(self.address))

    @cached_property
    def _hidden(self) -> tuple[str, int]:
        """Datatype and width of the hidden states."""
        inputs = {tensor.name: tensor for tensor in self._client.get_model_metadata("chain").inputs}
        return inputs["hidden_states"].datatype, int(inputs["hidden_states"].shape[-1])

    def request(self, timing: Timing) -> None:
        steps = self.options.max_tokens
        datatype, width = self._hidden
        reply = self._sessions.sessions("open", max_length=steps, timeout=OPEN_SECONDS)
        try:
            hidden = np.random.default_rng().normal(size=(steps, 1, 1, width)).astype(triton_to_np_dtype(datatype))
            for position in range(steps):
                self._step(datatype, hidden[position], reply["session_id"], position)
                timing.response_came()
                timing.tokens += 1
        finally:
            self._sessions.sessions("close", session_id=reply["session_id"])

    def _step(self, datatype: str, hidden_states: np.ndarray, session_id: str, position: int) -> None:
        """hidden_states [1, 1, H]"""
        tensors = (
            ("hidden_states", datatype, hidden_states),
            ("session_id", "BYTES", np.array([[session_id.encode()]], np.object_)),
            ("start_position", "INT32", np.array([[position]], np.int32)),
        )
        self._client.infer("chain", [_input(*tensor) for tensor in tensors])


def _input(name: str, datatype: str, values: np.ndarray) -> grpc_client.InferInput:
    tensor = grpc_client.InferInput(name, list(values.shape), datatype)
    tensor.set_data_from_numpy(values)
    return tensor


_counted = (0, 0)


@events.test_start.add_listener
def _begin_to_count(environment: Environment, **_: Any) -> None:
    global _counted
    _counted = _rows_and_batches(environment)


@events.test_stopping.add_listener
def _count(environment: Environment, **_: Any) -> None:
    """How many rows Triton's batcher put together; the server's other clients count as well."""
    rows, batches = (now - before for now, before in zip(_rows_and_batches(environment), _counted, strict=True))
    run.facts["rows_per_batch"] = round(rows / batches, 2) if batches else 0.0


def _rows_and_batches(environment: Environment) -> tuple[int, int]:
    """Of `chain` since the server started; without a server nothing, as the requests fail anyway."""
    with grpc_client.InferenceServerClient(str(environment.host or ChainUser.host)) as client:
        try:
            (statistics,) = client.get_inference_statistics("chain").model_stats
        except InferenceServerException:
            return 0, 0
    return statistics.inference_count, statistics.execution_count
