"""Checkpoints, made once per run of the suite, and what is built on them."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from checkpoints import CASES, GROUPED, SERVED, Case, random_prompt, text_of
from corolla.client import CorollaClient
from corolla.kernels.build import load_kernels
from corolla.repository.writer import write_repository
from local_server import LocalServer, make_plan
from reference import Reference
from servers import RunningServer
from wire import GrpcWire, HttpWire, Sessions, Wire

torch.set_num_threads(1)

LONGEST = (
    "remote", "test_bench", "test_decoders", "test_chaos", "test_served_balance", "test_launcher",
    "test_family_decoders", "test_served_adapters", "test_served_swarm", "test_served_families", "test_quantization",
    "test_served_bfloat16", "test_served_tensor_parallel", "test_served_span", "test_tensor_parallel", "test_kernels",
    "test_compact",
)  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For `--dist=loadgroup`: tests with the same server run in one worker, else those of a module; longest first."""
    for item in items:
        served = "remote" in getattr(item, "fixturenames", ())
        item.add_marker(pytest.mark.xdist_group("remote" if served else item.path.stem))
    items.sort(key=_rank)


def _rank(item: pytest.Item) -> int:
    """Modules whose fixtures take long come first, so that no worker is left with one at the end."""
    (group,) = item.get_closest_marker("xdist_group").args
    return LONGEST.index(group) if group in LONGEST else len(LONGEST)



@dataclass(frozen=True)
class Served:
    """A checkpoint, the models of a server for it, and what transformers makes of it."""

    case: Case
    checkpoint: Path
    server: LocalServer
    reference: Reference


@pytest.fixture(scope="session")
def suite_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The disk cache of all tests that do not test the cache, in all workers: what is compiled is compiled once."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "suite-cache"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def kernels(suite_cache: Path) -> None:
    """The CPU kernels, loaded into this process."""
    with mock.patch.dict(os.environ, COROLLA_CACHE=str(suite_cache)):
        load_kernels()


def serve_locally(case: Case, folder: Path, cache: Path, **options: Any) -> Served:
    """All models of a case in this process, with the eager decoder unless `options` say otherwise."""
    checkpoint = folder / "checkpoint"
    case.write(checkpoint)
    plan = make_plan(checkpoint, case.ranges, attn_cache_tokens=2048, max_short_tokens=16, **options)
    return Served(case, checkpoint, LocalServer(plan, folder, cache), Reference(checkpoint))


@pytest.fixture(scope="session", params=CASES, ids=lambda case: case.name)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, suite_cache: Path
) -> Iterator[Served]:
    """Each checkpoint in turn, in this process. Tests close the sessions they open."""
    served = serve_locally(request.param, tmp_path_factory.mktemp(request.param.name), suite_cache)
    yield served
    assert served.server.table.status().open_sessions == 0


@pytest.fixture(scope="session")
def grouped(tmp_path_factory: pytest.TempPathFactory, suite_cache: Path) -> Served:
    """The checkpoint with grouped attention, in this process, for tests that need only one."""
    return serve_locally(GROUPED, tmp_path_factory.mktemp("grouped"), suite_cache)


@dataclass(frozen=True)
class Remote:
    """A running `corolla serve` for a checkpoint, and what transformers makes of it."""

    case: Case
    checkpoint: Path
    server: RunningServer
    reference: Reference
    registry: str

    @property
    def http(self) -> HttpWire:
        return HttpWire(self.server.http)

    @property
    def grpc(self) -> GrpcWire:
        return GrpcWire(self.server.grpc)

    @property
    def sessions(self) -> Sessions:
        return Sessions(self.grpc)

    def assert_greedy_text(self, length: int, max_tokens: int) -> None:
        """What `generate` streams after a random prompt of `length` tokens is the text of transformers."""
        prompt = random_prompt(length, seed=length)
        expected = self.reference.generate(prompt, max_new_tokens=max_tokens)
        assert self.reference.lead(prompt, expected) > 1e-4, "tokens this close could differ by rounding alone"
        with CorollaClient(self.server.grpc) as client:
            text = "".join(chunk.text for chunk in client.generate(text_of(prompt), max_tokens=max_tokens))
        assert text == self.reference.text(prompt, expected)


@contextmanager
def serve(case: Case, folder: Path, cache: Path, dtype: str, attn_cache_tokens: int, **more: Any) -> Iterator[Remote]:
    """Starts a server in `folder`, with decoders compiled for 8, 4 and 1 rows unless `more` options say otherwise."""
    checkpoint = folder / "checkpoint"
    case.write(checkpoint)
    options = {"decoder": "compiled", "max_batch_size": 8, "attn_cache_tokens": attn_cache_tokens}
    plan = make_plan(checkpoint, case.ranges, dtype, **(options | more))
    write_repository(plan, folder / "repository")
    registry = f"sqlite://{folder}/peers.sqlite"
    with RunningServer(folder / "repository", f"--registry={registry}", env={"COROLLA_CACHE": str(cache)}) as server:
        yield Remote(case, checkpoint, server, Reference(checkpoint, plan.dtype.torch), registry)
        assert server.stop() == 0
        assert "Exit timeout expired" not in server.log, "a model could not be unloaded"


@pytest.fixture(scope="session")
def remote(tmp_path_factory: pytest.TempPathFactory, suite_cache: Path) -> Iterator[Remote]:
    """The one server of nearly all end-to-end tests: float32, 8 rows per batch, 8 sessions of full length."""
    folder = tmp_path_factory.mktemp("served")
    with serve(SERVED, folder, suite_cache, "float32", attn_cache_tokens=8 * 1024) as remote:
        yield remote


@pytest.fixture(params=["http", "grpc"])
def wire(request: pytest.FixtureRequest, remote: Remote) -> Wire:
    """Both protocols in turn."""
    chosen: Wire = getattr(remote, request.param)
    return chosen


@dataclass(frozen=True)
class PartServers:
    """Two running servers of one checkpoint, the first of the blocks 0:3, the second of 2:5, and a whole one here."""

    first: RunningServer
    second: RunningServer
    whole: LocalServer

    @property
    def both(self) -> tuple[RunningServer, RunningServer]:
        return self.first, self.second


@pytest.fixture(scope="session")
def part_servers(tmp_path_factory: pytest.TempPathFactory, suite_cache: Path) -> Iterator[PartServers]:
    """Float32 and the eager decoder; steps of more than 16 positions are long."""
    folder = tmp_path_factory.mktemp("parts")
    SERVED.write(folder / "checkpoint")
    options = {"attn_cache_tokens": 4096, "max_short_tokens": 16}
    whole = LocalServer(make_plan(folder / "checkpoint", SERVED.ranges, **options), folder / "whole", suite_cache)
    for name, blocks in (("first", range(0, 3)), ("second", range(2, 5))):
        plan = make_plan(folder / "checkpoint", [blocks], blocks=blocks, ends=False, span=True, **options)
        write_repository(plan, folder / name)
    start = partial(RunningServer, env={"COROLLA_CACHE": str(suite_cache)})
    with ThreadPoolExecutor(2) as pool, ExitStack() as stack:
        starting = [pool.submit(start, folder / name) for name in ("first", "second")]
        servers = [stack.enter_context(server.result()) for server in starting]
        yield PartServers(servers[0], servers[1], whole)
        for stopping in [pool.submit(server.stop) for server in servers]:
            assert stopping.result() == 0
        for server in servers:
            assert "Exit timeout expired" not in server.log, "a model could not be unloaded"
