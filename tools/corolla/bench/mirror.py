"""Single-position steps of many clients, batched by Triton with preferred batch sizes and without."""

import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from threading import Barrier
from typing import Any

import tritonclient.grpc as grpc_client
from tqdm import tqdm

from corolla.bench.lengths import MERGED, milliseconds
from corolla.bench.serving import BenchServer
from corolla.bench.stepping import SteppedSession, random_states
from corolla.bench.tables import markdown
from corolla.bench.timing import percentile

POSITIONS = 64
"""After so many steps, a client goes back to the beginning of its session."""
WARM_UP_STEPS = 5


@dataclass(frozen=True)
class MirrorResult:
    """`clients` in closed loops: all steps per second, latencies in milliseconds, rows per executed batch."""

    mirror: bool
    clients: int
    steps_per_second: float
    median: float
    p95: float
    rows_per_batch: float


def measure_mirror(server: BenchServer, clients: Sequence[int], seconds: float) -> list[MirrorResult]:
    """One server, whose plan says with or without; `seconds` for each number of clients."""
    name = "mirror" if server.plan.mirror else "no mirror"
    return [_measure(server, count, seconds) for count in tqdm(clients, desc=name, unit="run")]


def _measure(server: BenchServer, clients: int, seconds: float) -> MirrorResult:
    with ExitStack() as stack:
        sessions = [stack.enter_context(SteppedSession(server.grpc, server.plan, POSITIONS)) for _ in range(clients)]
        client = stack.enter_context(grpc_client.InferenceServerClient(server.grpc))
        pool = stack.enter_context(ThreadPoolExecutor(clients))
        for session in sessions:
            for position in range(WARM_UP_STEPS):
                session.step(MERGED, random_states(server.plan, 1), position)
        barrier = Barrier(clients)
        before = _rows_and_batches(client)
        start = time.perf_counter()
        loops = pool.map(lambda session: _closed_loop(session, server, barrier, start + seconds), sessions)
        latencies = [latency for loop in loops for latency in loop]
        taken = time.perf_counter() - start
        rows, batches = (now - then for now, then in zip(_rows_and_batches(client), before, strict=True))
    return MirrorResult(
        mirror=server.plan.mirror,
        clients=clients,
        steps_per_second=len(latencies) / taken,
        median=statistics.median(latencies),
        p95=percentile(latencies, 95),
        rows_per_batch=rows / batches,
    )


def _closed_loop(session: SteppedSession, server: BenchServer, barrier: Barrier, deadline: float) -> list[float]:
    """Milliseconds of each step; at least one step."""
    hidden_states = random_states(server.plan, 1)
    latencies: list[float] = []
    barrier.wait()
    while not latencies or time.perf_counter() < deadline:
        position = len(latencies) % POSITIONS
        latencies.append(milliseconds(lambda at=position: session.step(MERGED, hidden_states, at)))  # type: ignore[misc]
    return latencies


def _rows_and_batches(client: grpc_client.InferenceServerClient) -> tuple[int, int]:
    """What the chain has computed since the server started."""
    (statistics_of_chain,) = client.get_inference_statistics(MERGED).model_stats
    return statistics_of_chain.inference_count, statistics_of_chain.execution_count


def to_json(results: Sequence[MirrorResult]) -> dict[str, Any]:
    """For --json."""
    return {"results": [asdict(result) for result in results]}


def table(results: Sequence[MirrorResult]) -> str:
    """The results as Markdown, those of equally many clients together."""
    return markdown(
        ["clients", "preferred sizes", "steps/s", "median, ms", "p95, ms", "rows per batch"],
        (
            [
                str(r.clients), "mirrored" if r.mirror else "none", f"{r.steps_per_second:.1f}",
                f"{r.median:.2f}", f"{r.p95:.2f}", f"{r.rows_per_batch:.2f}",
            ]
            for r in sorted(results, key=lambda r: r.clients)
        ),
    )  # fmt: skip
