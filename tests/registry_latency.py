"""How long the registries take, each engine on loopback: `python tests/registry_latency.py`."""

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue

from corolla.peers import dht, sqlite
from corolla.peers.record import Peers
from corolla.peers.registry import open_registry, watch
from dht_table import DhtTable
from etcd_cluster import EtcdCluster
from registries import SqliteFile, record

SERVERS = 50
ROUNDS = 50
TTL = 60.0


def main() -> None:
    engines: dict[str, Callable[[Path], SqliteFile | EtcdCluster | DhtTable]] = {
        "sqlite": SqliteFile,
        "etcd, 1 member": EtcdCluster,
        "etcd, 3 members": lambda folder: EtcdCluster(folder, members=3),
        "dht": DhtTable,
    }
    print(f"medians of {ROUNDS} in milliseconds, {SERVERS} servers in the registry")
    print(f"a watch on sqlite looks every {sqlite.POLL_SECONDS} s, on dht every {dht.POLL_SECONDS} s")
    for name, start in engines.items():
        with tempfile.TemporaryDirectory() as folder, closing(start(Path(folder))) as engine:
            print(f"{name:16}", "  ".join(f"{what} {value:7.2f}" for what, value in measure(engine.url).items()))


def measure(url: str) -> dict[str, float]:
    with closing(open_registry(url, TTL)) as registry, closing(open_registry(url, TTL)) as reader:
        for number in range(SERVERS):
            registry.put(record(f"filler {number}"))
        with closing(open_registry(url, TTL)) as own:
            own.put(record("own"))
            changed: SimpleQueue[float] = SimpleQueue()
            changes = iter(range(10**6))
            times = {
                "change": _median(lambda: own.put(record("own", free_tokens=next(changes)))),
                "sign of life": _median(own.keep_alive),
                "list": _median(lambda: reader.list("org/name")),
            }

            def on_change(peers: Peers) -> None:
                changed.put(time.perf_counter())

            with closing(watch(reader, "org/name", on_change)):
                changed.get()
                delays = []
                for _ in range(ROUNDS // 2):
                    began = time.perf_counter()
                    own.put(record("own", free_tokens=next(changes)))
                    delays.append(changed.get() - began)
            return times | {"put to watch": statistics.median(delays) * 1e3}


def _median(call: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


if __name__ == "__main__":
    main()
