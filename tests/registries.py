"""Registries for tests, of every engine: they can be killed, brought back, and made to forget."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import apsw

from corolla.peers.record import PeerRecord, PeerState, Throughput
from corolla.peers.registry import PeerRegistry, RegistryAwayError


def record(peer_id: str, **changes: object) -> PeerRecord:
    """A server with something in every field."""
    fields: dict[str, object] = {
        "peer_id": peer_id,
        "address": "10.0.0.1:8001",
        "model": "org/name",
        "revision": "0123abcd",
        "start": 0,
        "end": 4,
        "state": PeerState.ONLINE,
        "throughput": Throughput(10.0, 1000.0, 2000.0),
        "dtype": "bfloat16",
        "quant": "nf4",
        "generates": True,
        "free_tokens": 4096,
        "total_tokens": 16384,
        "adapters": ("french", "spanish"),
        "round_trips": {"b": 0.001, "c": 0.02},
        "version": "0.1.0",
    }
    return PeerRecord(**fields | changes)  # type: ignore[arg-type]


def idle_server(name: str, blocks: range, **changes: object) -> PeerRecord:
    """A server with an empty cache, and nothing else that routes depend on."""
    plain = {"address": f"{name}:8001", "start": blocks.start, "end": blocks.stop}
    cache = {"free_tokens": 1000, "total_tokens": 1000}
    return record(name, **{**plain, **cache, "adapters": (), "round_trips": {}} | changes)


@contextmanager
def kept_alive(registry: PeerRegistry, ttl: float) -> Iterator[None]:
    """As an announcer does."""
    stopping = threading.Event()

    def keep() -> None:
        pause = ttl / 3
        while not stopping.wait(pause):
            try:
                registry.keep_alive()
                pause = ttl / 3
            except RegistryAwayError:
                pause = 0.1

    thread = threading.Thread(target=keep)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()


class SqliteFile:
    """The default engine; its folder can be moved away."""

    ttl = 1.0
    slack = 0.3

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "here"
        self._folder.mkdir()
        self._elsewhere = folder / "elsewhere"
        self.url = f"sqlite://{self._folder}/peers.sqlite"

    def kill(self) -> None:
        self._folder.rename(self._elsewhere)

    def start(self) -> None:
        self._elsewhere.rename(self._folder)

    def forget(self) -> None:
        """Loses all records."""
        connection = apsw.Connection(f"{self._folder}/peers.sqlite")
        connection.execute("DELETE FROM owners; DELETE FROM peers")
        connection.close()

    def close(self) -> None:
        with suppress(FileNotFoundError):
            self.start()
