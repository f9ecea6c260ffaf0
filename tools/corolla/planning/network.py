"""How many tokens a second the network carries as hidden states."""

import time
from collections.abc import Callable

import numpy as np
import tritonclient.grpc as grpc_client
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

from corolla.errors import CorollaError, InvalidValueError

DEFAULT_MBPS = 1000.0
"""Megabits a second, where none are given and no peer is asked."""
POSITIONS = 1024
"""Of one message, as of a long prompt."""
ROUNDS = 5
UNKNOWN_SESSION = b"of nobody: a measurement of the network"


def tokens_of_mbps(mbps: float, hidden_size: int, itemsize: int) -> float:
    """Tokens a second at so many megabits a second."""
    if not mbps > 0:
        raise InvalidValueError("network_mbps", mbps, "a number above 0")
    return mbps * 1e6 / 8 / (hidden_size * itemsize)


def tokens_to_peer(address: str, hidden_size: int) -> float:
    """Tokens a second to and from the server at host:port of its gRPC endpoint; the slower of both ways.

    Hidden states go to its `chain` for a session that does not exist, so that it computes nothing; where it has the
    model's embedding, that sends as many back. CorollaError when no server of such a model answers.
    """
    try:
        with grpc_client.InferenceServerClient(address) as client:
            up = _best_seconds(_sender(client, hidden_size))
            down = _best_seconds(_receiver(client)) if client.is_model_ready("embed") else up
    except InferenceServerException as error:
        raise CorollaError(
            f"{address}: {error.message()}; give host:port of the gRPC endpoint of a running server of this model"
        ) from error
    return POSITIONS / max(up, down)


def _best_seconds(act: Callable[[], object]) -> float:
    """Of a call that was warmed up: what else goes on can only make it slower."""
    taken = []
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        act()
        taken.append(time.perf_counter() - start)
    return min(taken[1:])


def _sender(client: grpc_client.InferenceServerClient, hidden_size: int) -> Callable[[], None]:
    (datatype,) = [entry.datatype for entry in client.get_model_metadata("chain").inputs if "hidden" in entry.name]
    values = np.random.default_rng(0).normal(size=(1, POSITIONS, hidden_size)).astype(triton_to_np_dtype(datatype))
    states = grpc_client.InferInput("hidden_states", list(values.shape), datatype)
    states.set_data_from_numpy(values)
    session = grpc_client.InferInput("session_id", [1, 1], "BYTES")
    session.set_data_from_numpy(np.array([[UNKNOWN_SESSION]], np.object_))

    def send() -> None:
        try:
            client.infer("chain", [states, session])
        except InferenceServerException as error:
            if "is not open on this server" not in str(error):
                raise

    return send


def _receiver(client: grpc_client.InferenceServerClient) -> Callable[[], object]:
    ids = grpc_client.InferInput("input_ids", [1, POSITIONS], "INT64")
    ids.set_data_from_numpy(np.zeros((1, POSITIONS), np.int64))
    return lambda: client.infer("embed", [ids])
