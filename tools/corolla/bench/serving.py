"""A server for a benchmark: a repository in a temporary folder, served in the background."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from corolla.checkpoint.resolution import resolve_dtype
from corolla.checkpoint.source import Source, open_checkpoint
from corolla.repository.plan import RepositoryPlan, split_evenly
from corolla.repository.writer import write_repository
from corolla.server.background import background_server
from corolla.server.options import ServerOptions


@dataclass(frozen=True)
class BenchServer:
    """Addresses `host:port`, the process of tritonserver, and what is served."""

    grpc: str
    http: str
    metrics: str
    pid: int
    plan: RepositoryPlan

    def memory(self) -> int:
        """Bytes of tritonserver and its models, pages that they share counted once (PSS)."""
        root = psutil.Process(self.pid)
        return sum(process.memory_full_info().pss for process in (root, *root.children(recursive=True)))


def make_plan(checkpoint: Source, dtype: str, range_size: int | None = None, **options: Any) -> RepositoryPlan:
    """What to serve: two ranges unless `range_size` says otherwise; `options` as of RepositoryPlan.

    Weights on the hub are fetched.
    """
    opened = open_checkpoint(checkpoint)
    opened.fetch()
    config = opened.config
    blocks = config.num_hidden_layers
    ranges = split_evenly(range(blocks), range_size or -(-blocks // 2))
    source = checkpoint.resolve() if isinstance(checkpoint, Path) else checkpoint
    options = {"quant": opened.quant} | options
    return RepositoryPlan(source, config, resolve_dtype(dtype, config, "cpu"), ranges, **options)


def local_folder(plan: RepositoryPlan) -> Path:
    """Where a plan's checkpoint lies on this machine."""
    return open_checkpoint(plan.checkpoint).path


@contextmanager
def bench_server(plan: RepositoryPlan) -> Iterator[BenchServer]:
    """Serves a plan on free ports of 127.0.0.1 while the context lasts."""
    with tempfile.TemporaryDirectory(prefix="corolla-bench-") as folder:
        repository = Path(folder) / "repository"
        write_repository(plan, repository)
        server_options = ServerOptions(repository, http_port=0, grpc_port=0, metrics_port=0)
        log = Path(folder) / "server.log"
        with log.open("w") as sink, background_server(server_options, sink) as ready:
            endpoints = ready.endpoints
            grpc, http, metrics = map(str, (endpoints.grpc, endpoints.http, endpoints.metrics))
            yield BenchServer(grpc, http, metrics, ready.pid, plan)
