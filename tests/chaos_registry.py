"""Registries that die under a swarm: is any server ever taken for gone that is not? And when are those that are?

python tests/chaos_registry.py --seconds 60
"""

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from corolla.peers.announcer import Announcer
from corolla.peers.directory import PeerDirectory
from corolla.peers.record import PeerState
from corolla.peers.registry import open_registry
from dht_table import DhtTable
from etcd_cluster import EtcdCluster
from registries import SqliteFile, record
from waiting import wait_until

SERVERS = 4
TTL = 6.0
Engine = SqliteFile | EtcdCluster | DhtTable
ENGINES: dict[str, Callable[[Path], Engine]] = {"sqlite": SqliteFile, "etcd": EtcdCluster, "dht": DhtTable}


def main() -> None:
    """Two lines per engine, and one for leaders of etcd."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="How long a registry is away; 0 for never.")
    parser.add_argument("--killed", type=int, default=3, help="How many servers are killed.")
    parser.add_argument("--leaders", type=int, default=5, help="How many leaders of etcd are killed.")
    parser.add_argument("--engines", default=",".join(ENGINES), help="Those that are killed.")
    options = parser.parse_args()
    for name in filter(None, options.engines.split(",")):
        with tempfile.TemporaryDirectory() as folder, closing(ENGINES[name](Path(folder))) as engine:
            if options.seconds:
                print(f"{name}: {absence(engine, options.seconds)}", flush=True)
            if options.killed:
                print(f"{name}: {dead_servers(engine, options.killed)}", flush=True)
    if options.leaders:
        with tempfile.TemporaryDirectory() as folder, closing(EtcdCluster(Path(folder), members=3)) as cluster:
            print(f"etcd, leaders: {dead_leaders(cluster, options.leaders)}", flush=True)


def absence(engine: Engine, seconds: float) -> str:
    """Kills the registry of a swarm for a time."""
    with swarm(engine) as (announcers, directory):
        engine.kill()
        looks, missing, slowest = watched(directory, seconds)
        engine.start()
        more, more_missing, slower = watched(directory, 2 * TTL)
        written = time.monotonic()
        announcers[0].update(state=PeerState.OFFLINE)
        wait_until(lambda: directory.peers()[0].state == PeerState.OFFLINE, timeout=60)
        return (
            f"away {seconds:.0f} s, {looks + more} looks, servers missing in {missing + more_missing}, slowest look "
            f"{max(slowest, slower) * 1e3:.2f} ms; news came {time.monotonic() - written:.2f} s after they were written"
        )


def dead_servers(engine: Engine, count: int) -> str:
    """Kills announcers with kill -9, each at another time after a sign of life."""
    spawn, seconds = multiprocessing.get_context("spawn"), []
    with closing(PeerDirectory(engine.url, "org/name", "0123abcd", TTL)) as directory:
        for number in range(count):
            announcer = spawn.Process(target=announce, args=(engine.url, f"dead{number}"), daemon=True)
            announcer.start()
            wait_until(lambda: len(directory.peers()) == 1, timeout=60)
            time.sleep(TTL + number * TTL / 3 / count)
            assert len(directory.peers()) == 1
            announcer.kill()
            announcer.join()
            killed = time.monotonic()
            wait_until(lambda: not directory.peers(), timeout=60)
            seconds.append(time.monotonic() - killed)
    return f"{count} servers killed, gone after {min(seconds):.1f} to {max(seconds):.1f} s, with a TTL of {TTL:.0f} s"


def announce(url: str, peer_id: str) -> None:
    """A server that is announced until it is killed."""
    Announcer(open_registry(url, TTL), record(peer_id), TTL, lambda found: found)
    while True:
        time.sleep(TTL)


def dead_leaders(cluster: EtcdCluster, count: int) -> str:
    """Kills one leader after the other, each coming back after two TTLs."""
    looks = missing = 0
    with swarm(cluster) as (_, directory):
        for _ in range(count):
            leader = cluster.leader()
            cluster.kill(leader)
            more, more_missing, _ = watched(directory, 2 * TTL)
            looks, missing = looks + more, missing + more_missing
            cluster.start(leader)
    return f"{count} killed, {looks} looks, servers missing in {missing}"


@contextmanager
def swarm(engine: Engine) -> Iterator[tuple[list[Announcer], PeerDirectory]]:
    """Announced servers, all of them known to a directory."""
    with ExitStack() as stack:
        announcers = [
            stack.enter_context(
                closing(Announcer(open_registry(engine.url, TTL), record(str(number)), TTL, lambda found: found))
            )
            for number in range(SERVERS)
        ]
        directory = stack.enter_context(closing(PeerDirectory(engine.url, "org/name", "0123abcd", TTL)))
        wait_until(lambda: len(directory.peers()) == SERVERS, timeout=60)
        yield announcers, directory


def watched(directory: PeerDirectory, seconds: float) -> tuple[int, int, float]:
    """How often it was looked at, how often a server was missing or not ONLINE, seconds of the slowest look."""
    looks, missing, slowest = 0, 0, 0.0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.perf_counter()
        peers = directory.peers()
        slowest = max(slowest, time.perf_counter() - began)
        looks += 1
        missing += len(peers) != SERVERS or any(peer.state is not PeerState.ONLINE for peer in peers)
        time.sleep(0.01)
    return looks, missing, slowest


if __name__ == "__main__":
    main()
