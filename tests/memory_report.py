"""How much memory the processes of a server share: proportional set sizes beside weights and KV arena.

corolla make-checkpoint --shape M --out /tmp/llama-m
corolla init /tmp/llama-m --out /tmp/repository-m
python tests/memory_report.py /tmp/repository-m
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import psutil

from corolla.checkpoint.source import open_checkpoint
from corolla.client import CorollaClient
from corolla.repository.reading import checkpoint_of
from servers import RunningServer

SHARED_FACTOR = 1.25
PROCESS_BYTES = 350 * 2**20
"""What a process may have for itself: Python, torch and transformers take some 260 MiB of it."""


@dataclass(frozen=True)
class MemoryReport:
    """Bytes: the stored weights, the arena, and the proportional set size of each model's processes."""

    weights: int
    arena: int
    pss: dict[str, int]

    @property
    def limit(self) -> float:
        """What the sum of all processes may be."""
        return SHARED_FACTOR * (self.weights + self.arena) + PROCESS_BYTES * len(self.pss)

    @property
    def total(self) -> int:
        """The sum of all processes."""
        return sum(self.pss.values())


def measure(server: RunningServer, repository: Path) -> MemoryReport:
    """Reads the memory of a server after a long prompt, which touches all weights and part of the arena."""
    with CorollaClient(server.grpc) as client:
        for _ in client.generate("a long prompt, " * 40, max_tokens=8):
            pass
    pss: dict[str, int] = {}
    for stub in server.stubs():
        pss[stub.model] = pss.get(stub.model, 0) + psutil.Process(stub.process.pid).memory_full_info().pss
    arena = sum(file.stat().st_size for file in (server.run_directory / "kv").iterdir())
    return MemoryReport(_weights(repository), arena, pss)


def _weights(repository: Path) -> int:
    folder = open_checkpoint(checkpoint_of(repository)).path
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def main() -> None:
    """Starts a server and prints its memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", type=Path)
    repository = parser.parse_args().repository
    with RunningServer(repository) as server:
        report = measure(server, repository)
    for model, pss in sorted(report.pss.items()):
        print(f"{model:<16} {pss / 2**20:8.0f} MiB")
    print(f"{'sum':<16} {report.total / 2**20:8.0f} MiB, of at most {report.limit / 2**20:.0f} MiB")
    print(f"weights {report.weights / 2**20:.0f} MiB, arena {report.arena / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
