"""The copy of the registry that routes are found in."""

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from corolla.peers.directory import PeerDirectory
from corolla.peers.record import PeerState
from corolla.peers.registry import PeerRegistry, open_registry
from registries import SqliteFile, record
from waiting import wait_until


@pytest.fixture
def engine(tmp_path: Path) -> SqliteFile:
    return SqliteFile(tmp_path)


@pytest.fixture
def server(engine: SqliteFile) -> Iterator[PeerRegistry]:
    with closing(open_registry(engine.url, engine.ttl)) as registry:
        yield registry


@pytest.fixture
def directory(engine: SqliteFile) -> Iterator[PeerDirectory]:
    with closing(PeerDirectory(engine.url, "org/name", "0123abcd", engine.ttl)) as directory:
        yield directory


def test_knows_the_servers_of_one_revision_in_any_state(server: PeerRegistry, directory: PeerDirectory) -> None:
    records = [record("a", state=PeerState.OFFLINE), record("b", state=PeerState.JOINING), record("c")]
    for peer in (*records, record("d", revision="other"), record("e", model="other")):
        server.put(peer)
    wait_until(lambda: directory.peers() == records)


def test_first_look_waits_for_the_registry(engine: SqliteFile, server: PeerRegistry) -> None:
    server.put(record("a"))
    with closing(PeerDirectory(engine.url, "org/name", "0123abcd", engine.ttl)) as directory:
        assert directory.peers() == [record("a")]


def test_tells_of_changes(server: PeerRegistry, directory: PeerDirectory) -> None:
    seen = directory.peers()
    assert not directory.wait_for_change(0.05)
    server.put(record("a"))
    assert directory.wait_for_change(20)
    assert directory.wait_for_change(20, seen), "a change since then is not waited for"


def test_keeps_the_last_known_while_the_registry_is_away(
    engine: SqliteFile, server: PeerRegistry, directory: PeerDirectory
) -> None:
    server.put(record("a"))
    wait_until(lambda: directory.peers() == [record("a")])
    engine.kill()
    wait_until(lambda: directory.away)
    time.sleep(1.5 * engine.ttl)
    began = time.perf_counter()
    assert directory.peers() == [record("a")]
    assert time.perf_counter() - began < 0.1, "it does not ask the registry"
    engine.start()
    server.keep_alive()
    wait_until(lambda: not directory.away)
    assert directory.peers() == [record("a")]
    time.sleep(0.7 * engine.ttl)
    server.keep_alive()
    time.sleep(0.7 * engine.ttl)
    assert directory.peers() == [record("a")]


def test_drops_those_that_do_not_register_again(
    engine: SqliteFile, server: PeerRegistry, directory: PeerDirectory
) -> None:
    dead = open_registry(engine.url, engine.ttl)
    dead.put(record("dead"))
    server.put(record("alive"))
    wait_until(lambda: len(directory.peers()) == 2)
    dead.close()
    engine.kill()
    wait_until(lambda: directory.away)
    engine.start()
    engine.forget()
    wait_until(lambda: not directory.away)
    assert [peer.peer_id for peer in directory.peers()] == ["alive", "dead"], "they may still come"
    server.put(record("alive", state=PeerState.OFFLINE))
    wait_until(lambda: directory.peers()[0].state == PeerState.OFFLINE)
    server.remove("org/name", "alive")
    wait_until(lambda: [peer.peer_id for peer in directory.peers()] == ["dead"])
    assert directory.wait_for_change(2 * engine.ttl, directory.peers())
    assert directory.peers() == []


def test_begins_without_a_registry(engine: SqliteFile, server: PeerRegistry) -> None:
    engine.kill()
    with closing(PeerDirectory(engine.url, "org/name", "0123abcd", engine.ttl)) as directory:
        assert directory.peers() == []
        engine.start()
        server.put(record("a"))
        wait_until(lambda: directory.peers() == [record("a")])
