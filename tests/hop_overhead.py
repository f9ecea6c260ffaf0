"""What a server adds to a step of one token besides the time that it reports and a bare round trip.

python tests/hop_overhead.py CHECKPOINT
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from secrets import token_hex

import torch
import tritonclient.grpc as grpc_client

from corolla.bench.serving import bench_server, make_plan
from corolla.client import CorollaClient
from corolla.model.batch_sizes import EAGER
from corolla.remote.connection import PeerConnection
from corolla.wire.messages import SpanStep
from corolla.wire.states import encode

STEPS = 300


def milliseconds(act: Callable[[], object]) -> float:
    """Median of one call."""
    taken = []
    for _ in range(STEPS):
        start = time.perf_counter()
        act()
        taken.append((time.perf_counter() - start) * 1e3)
    return statistics.median(taken)


def main() -> None:
    """Prints the median of steps, of what the server says of them, and of small calls."""
    with tempfile.TemporaryDirectory() as folder:
        registry = f"sqlite://{folder}/peers.sqlite"
        options = {"decoder": EAGER, "threads": 1, "registry": registry, "model_id": "model"}
        plan = make_plan(Path(sys.argv[1]), "float32", **options)
        with bench_server(plan) as server, CorollaClient(server.grpc) as client:
            connection = PeerConnection(server.grpc)
            session = client.sessions("open", max_length=STEPS + 8)["session_id"]
            states = encode(torch.zeros(1, 1, plan.config.hidden_size), "bfloat16")
            reported: list[float] = []
            position = iter(range(STEPS + 8))

            def step() -> None:
                one = SpanStep((session,), (next(position),), token_hex(16), states)
                reported.append(connection.submit(one).result(30.0).seconds * 1e3)

            for _ in range(8):
                step()
            whole, within = milliseconds(step), statistics.median(reported)
            with grpc_client.InferenceServerClient(server.grpc) as raw:
                bare = milliseconds(raw.is_server_live)
            connection.close()
    added = whole - within - bare
    print(f"step {whole:.2f} ms, reported {within:.2f} ms, small call {bare:.2f} ms: {added:.2f} ms are added")


if __name__ == "__main__":
    main()
