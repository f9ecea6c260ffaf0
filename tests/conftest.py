"""Checkpoints, made once per run of the suite, and what is built on them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from checkpoints import CASES, GROUPED, SERVED, Case
from corolla.repository.writer import write_repository
from local_server import LocalServer, make_plan
from reference import Reference
from servers import RunningServer
from wire import GrpcWire, HttpWire, Sessions, Wire

torch.set_num_threads(1)


@dataclass(frozen=True)
class Served:
    """A checkpoint, the models of a server for it, and what transformers makes of it."""

    case: Case
    checkpoint: Path
    server: LocalServer
    reference: Reference


def _serve(case: Case, folder: Path) -> Served:
    checkpoint = folder / "checkpoint"
    case.write(checkpoint)
    plan = make_plan(checkpoint, case.ranges, attn_cache_tokens=2048, max_short_tokens=16)
    return Served(case, checkpoint, LocalServer(plan, folder), Reference(checkpoint))


@pytest.fixture(scope="session", params=CASES, ids=lambda case: case.name)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Each checkpoint in turn, in this process. Tests close the sessions they open."""
    served = _serve(request.param, tmp_path_factory.mktemp(request.param.name))
    yield served
    assert served.server.table.status().open_sessions == 0


@pytest.fixture(scope="session")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """The checkpoint with grouped attention, in this process, for tests that need only one."""
    return _serve(GROUPED, tmp_path_factory.mktemp("grouped"))


@dataclass(frozen=True)
class Remote:
    """A running `corolla serve` for a checkpoint, and what transformers makes of it."""

    case: Case
    server: RunningServer
    reference: Reference

    @property
    def http(self) -> HttpWire:
        return HttpWire(self.server.http)

    @property
    def grpc(self) -> GrpcWire:
        return GrpcWire(self.server.grpc)

    @property
    def sessions(self) -> Sessions:
        return Sessions(self.grpc)


@contextmanager
def serve(case: Case, folder: Path, dtype: str, attn_cache_tokens: int) -> Iterator[Remote]:
    """Starts a server in `folder`."""
    checkpoint = folder / "checkpoint"
    case.write(checkpoint)
    plan = make_plan(checkpoint, case.ranges, dtype, attn_cache_tokens=attn_cache_tokens)
    write_repository(plan, folder / "repository")
    with RunningServer(folder / "repository", env={"COROLLA_CACHE": str(folder / "cache")}) as server:
        yield Remote(case, server, Reference(checkpoint, plan.dtype.torch))
        assert server.stop() == 0
        assert "Exit timeout expired" not in server.log, "a model could not be unloaded"


@pytest.fixture(scope="session")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    """The one server of nearly all end-to-end tests: float32, 8 rows per batch, 8 sessions of full length."""
    with serve(SERVED, tmp_path_factory.mktemp("served"), "float32", attn_cache_tokens=8 * 1024) as remote:
        yield remote


@pytest.fixture(params=["http", "grpc"])
def wire(request: pytest.FixtureRequest, remote: Remote) -> Wire:
    """Both protocols in turn."""
    chosen: Wire = getattr(remote, request.param)
    return chosen
