"""Servers of one model as processes of their own, which are killed and stopped whole."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from corolla.peers.record import PeerRecord, PeerState, Throughput
from corolla.peers.registry import open_registry
from corolla.repository.writer import write_repository
from local_server import make_plan
from servers import RunningServer

MODEL, REVISION = "swarm-of-tests", "1"
CACHE_TOKENS = 16 * 1024


class SwarmServer(RunningServer):
    """One server; its processes can be ended or stopped all at once."""

    def tree(self) -> list[psutil.Process]:
        """All its processes, the first one that of `corolla serve`."""
        whole = psutil.Process(self.process.pid)
        return [whole, *whole.children(recursive=True)]

    def kill(self) -> None:
        """kill -9 of all of them; nothing is cleaned up."""
        self.signal(signal.SIGKILL)
        self.process.wait()

    def signal(self, number: int) -> None:
        for process in self.tree():
            os.kill(process.pid, number)


def announcement(peer_id: str, blocks: range, address: str) -> PeerRecord:
    """The record of a server that is as good as any."""
    speed = Throughput(inference=1000.0, forward=10000.0, network=10000.0)
    return PeerRecord(
        peer_id, address, MODEL, REVISION, blocks.start, blocks.stop, PeerState.ONLINE, speed, "float32", "none", False,
        CACHE_TOKENS, CACHE_TOKENS,
    )  # fmt: skip


def announce(registry: str, peer_id: str, blocks: range, address: str) -> None:
    """Registers a server for as long as a test takes."""
    open_registry(registry, ttl=3600.0).put(announcement(peer_id, blocks, address))


def write_server(
    folder: Path, checkpoint: Path, blocks: range, registry: str = "", *, ends: bool = False, **options: object
) -> Path:
    """A repository for some blocks of a model, which are one range; with a registry for the one with the `ends`."""
    plan = make_plan(
        checkpoint, [blocks] if blocks else [], blocks=blocks, ends=ends, span=not ends, registry=registry,
        model_id=MODEL, revision=REVISION, attn_cache_tokens=CACHE_TOKENS, **options,
    )  # fmt: skip
    write_repository(plan, folder)
    return folder


@contextmanager
def started(repository: Path, cache: Path, run_directory: Path) -> Iterator[SwarmServer]:
    """A server on one thread, in a run directory that is gone with the test."""
    flags = ("--run-dir", str(run_directory))
    with SwarmServer(repository, *flags, env={"COROLLA_CACHE": str(cache)}) as server:
        yield server
