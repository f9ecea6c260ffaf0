"""What only a cluster can go through: members die, leases are lost, history is compacted."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from corolla.errors import InvalidValueError
from corolla.peers.directory import PeerDirectory
from corolla.peers.record import PeerState
from corolla.peers.registry import RegistryAwayError, open_registry, watch
from etcd_cluster import Certificates, EtcdCluster
from registries import kept_alive, record
from waiting import wait_until


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with closing(EtcdCluster(tmp_path_factory.mktemp("etcd"))) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with closing(EtcdCluster(tmp_path_factory.mktemp("etcd"), members=3)) as cluster:
        yield cluster


def test_what_did_not_change_is_not_written(single: EtcdCluster) -> None:
    with closing(open_registry(single.url, 60)) as registry:
        registry.put(record("a", model="quiet"))
        before = single.revision()
        for _ in range(3):
            registry.put(record("a", model="quiet"))
            registry.keep_alive()
        assert single.revision() == before
        registry.remove("quiet", "a")


def test_watch_lists_again_after_a_compaction(single: EtcdCluster) -> None:
    """The revision to go on from is gone when the watch comes back."""
    seen: list[object] = []
    with closing(open_registry(single.url, 60)) as registry:
        with closing(watch(registry, "compacted", seen.append)):
            wait_until(lambda: seen == [[]])
            single.kill()
            single.start()
            for start in range(3):
                registry.put(record("a", model="compacted", start=start))
            single.compact()
            wait_until(lambda: seen[-1:] == [[record("a", model="compacted", start=2)]])
        registry.remove("compacted", "a")


def test_watch_that_asks_for_compacted_history_lists_again(single: EtcdCluster) -> None:
    with closing(open_registry(single.url, 60)) as registry:
        client = registry._client  # type: ignore[attr-defined]
        original, asked = client.watch, []

        def watch_late(begin: bytes, end: bytes, revision: int) -> object:
            asked.append(revision)
            if len(asked) == 1:
                registry.put(record("a", model="late"))
                registry.put(record("a", model="late", start=1))
                single.compact()
            return original(begin, end, revision)

        client.watch = watch_late
        seen: list[object] = []
        with closing(watch(registry, "late", seen.append)):
            wait_until(lambda: seen == [[], [record("a", model="late", start=1)]])
        assert asked[1] > asked[0]
        registry.remove("late", "a")


def test_record_of_a_killed_server_is_gone_within_its_ttl(single: EtcdCluster) -> None:
    program = (
        "import sys, time\n"
        "from corolla.peers.record import PeerRecord\n"
        "from corolla.peers.registry import open_registry\n"
        "registry = open_registry(sys.argv[1], 2); registry.put(PeerRecord.from_json(sys.argv[2]))\n"
        "print('put', flush=True)\n"
        "while True: registry.keep_alive(); time.sleep(2 / 3)"
    )
    text = record("a", model="killed").to_json()
    with (
        closing(PeerDirectory(single.url, "killed", "0123abcd", ttl=2)) as directory,
        subprocess.Popen([sys.executable, "-c", program, single.url, text], stdout=subprocess.PIPE) as server,
    ):
        assert server.stdout is not None
        server.stdout.readline()
        wait_until(lambda: len(directory.peers()) == 1)
        server.kill()
        killed = time.monotonic()
        wait_until(lambda: directory.peers() == [])
        assert time.monotonic() - killed < 2 + 1.5


def test_leader_killed_is_no_death_of_servers(three: EtcdCluster) -> None:
    with (
        closing(open_registry(three.url, three.ttl)) as registry,
        closing(PeerDirectory(three.url, "org/name", "0123abcd", three.ttl)) as directory,
    ):
        registry.put(record("a"))
        wait_until(lambda: directory.peers() == [record("a")])
        with kept_alive(registry, three.ttl):
            leader = three.leader()
            three.kill(leader)
            end = time.monotonic() + 1.7 * three.ttl
            while time.monotonic() < end:
                assert directory.peers() == [record("a")]
                time.sleep(0.01)
            registry.put(record("a", state=PeerState.OFFLINE))
            wait_until(lambda: directory.peers() == [record("a", state=PeerState.OFFLINE)])
            three.start(leader)


def test_without_a_quorum_servers_are_as_last_seen(three: EtcdCluster) -> None:
    with (
        closing(open_registry(three.url, three.ttl)) as registry,
        closing(PeerDirectory(three.url, "org/name", "0123abcd", three.ttl)) as directory,
    ):
        registry.put(record("b"))
        wait_until(lambda: directory.peers()[-1:] == [record("b")])
        with kept_alive(registry, three.ttl):
            three.kill(0, 1)
            wait_until(lambda: directory.away)
            end = time.monotonic() + 1.2 * three.ttl
            while time.monotonic() < end:
                assert directory.peers()[-1:] == [record("b")]
                time.sleep(0.05)
            three.start(0, 1)
            wait_until(lambda: not directory.away)
            wait_until(lambda: registry.list("org/name") == [record("b")])
            assert directory.peers()[-1:] == [record("b")]


def test_mutual_tls(tmp_path: Path) -> None:
    ours, others = Certificates.make(tmp_path / "ours"), Certificates.make(tmp_path / "others")
    with closing(EtcdCluster(tmp_path, tls=ours)) as cluster:
        with closing(open_registry(cluster.url + ours.query)) as registry:
            registry.put(record("a"))
            assert registry.list("org/name") == [record("a")]
        for query in ("", others.query, f"?ca={ours.ca}", f"?ca={ours.ca}&cert={others.cert}&key={others.key}"):
            with closing(open_registry(cluster.url + query)) as registry, pytest.raises(RegistryAwayError):
                registry.list("org/name")


def test_certificate_that_is_not_there_is_named() -> None:
    with pytest.raises(InvalidValueError, match=r"option ca: '/missing/ca.pem' .* a PEM file \(No such file"):
        open_registry("etcd://127.0.0.1:2379?ca=/missing/ca.pem")
