"""Servers of one model as processes of their own, which are killed and stopped whole."""

import os
import signal
from contextlib import suppress
from pathlib import Path

import psutil

from corolla.peers.directory import PeerDirectory
from corolla.peers.record import PeerState
from corolla.repository.writer import write_repository
from corolla.server.run_directory import bury
from local_server import make_plan
from servers import RunningServer

MODEL, REVISION = "swarm-of-tests", "1"
CACHE_TOKENS = 16 * 1024


class SwarmServer(RunningServer):
    """One server of a repository, in a run directory of its own; its processes can be ended or stopped all at once."""

    def __init__(self, repository: Path, run_directory: Path, cache: Path) -> None:
        self._directory = run_directory
        super().__init__(repository, "--run-dir", str(run_directory), env={"COROLLA_CACHE": str(cache)})

    def kill(self) -> None:
        """kill -9 of all of them; what they leave in shared memory is removed, as the next server there would do."""
        self.signal(signal.SIGKILL)
        self.process.wait()
        bury(self._directory)

    def signal(self, number: int) -> None:
        """To the process of `corolla serve` first, so that it starts none again."""
        for process in self._processes():
            with suppress(ProcessLookupError):  # where one has ended with another
                os.kill(process.pid, number)

    def give_way(self) -> None:
        """Lets other processes of the machine go first, such as servers that start."""
        for process in self._processes():
            process.nice(15)

    def _processes(self) -> list[psutil.Process]:
        whole = psutil.Process(self.process.pid)
        return [whole, *whole.children(recursive=True)]


class Announced:
    """What is in the registry of the servers."""

    def __init__(self, registry: str) -> None:
        self._directory = PeerDirectory(registry, MODEL, REVISION)

    def online(self, *servers: SwarmServer) -> bool:
        """Whether all of them take sessions."""
        addresses = {peer.address for peer in self._directory.peers() if peer.state is PeerState.ONLINE}
        return all(server.grpc in addresses for server in servers)

    def close(self) -> None:
        self._directory.close()


def write_server(folder: Path, checkpoint: Path, blocks: range, registry: str, **options: object) -> Path:
    """A repository for some blocks of a model, which are one range."""
    plan = make_plan(
        checkpoint, [blocks] if blocks else [], blocks=blocks, registry=registry, model_id=MODEL, revision=REVISION,
        attn_cache_tokens=CACHE_TOKENS, **({"ends": False} | options),
    )  # fmt: skip
    write_repository(plan, folder)
    return folder
