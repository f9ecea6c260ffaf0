"""What every registry does, whatever its engine."""

import sys
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from corolla.errors import EnvironmentProblemError, InvalidValueError
from corolla.peers import dht
from corolla.peers.record import PeerState
from corolla.peers.registry import PeerIdTakenError, PeerRegistry, RegistryAwayError, open_registry, watch
from dht_table import DhtTable
from etcd_cluster import EtcdCluster
from registries import SqliteFile, kept_alive, record
from waiting import wait_until

ENGINES = {"sqlite": SqliteFile, "etcd": EtcdCluster, "dht": DhtTable}
Engine = SqliteFile | EtcdCluster | DhtTable


@pytest.fixture(autouse=True)
def _short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dht, "POLL_SECONDS", 0.2)


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A running registry of each engine in turn; tests have models of their own."""
    with closing(ENGINES[request.param](tmp_path_factory.mktemp(request.param))) as engine:
        yield engine


@pytest.fixture
def open_one(engine: Engine) -> Iterator["Opener"]:
    with closing(Opener(engine)) as opener:
        yield opener


class Opener:
    """Opens views of the registry and closes them at the end of the test."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._opened: list[PeerRegistry] = []

    def __call__(self) -> PeerRegistry:
        self._opened.append(open_registry(self._engine.url, self._engine.ttl))
        return self._opened[-1]

    def close(self) -> None:
        for registry in self._opened:
            registry.close()


@pytest.fixture
def model(request: pytest.FixtureRequest) -> str:
    return f"org/{request.node.originalname} ~ä"


def test_lists_what_was_put(open_one: Opener, model: str) -> None:
    first, second, reader = open_one(), open_one(), open_one()
    second.put(record("b", model=model, state=PeerState.JOINING))
    first.put(record("a", model=model))
    first.put(record("a", model=f"{model}/2"))
    assert reader.list(model) == [record("a", model=model), record("b", model=model, state=PeerState.JOINING)]
    assert reader.list(f"{model}/2") == [record("a", model=f"{model}/2")]
    assert reader.list(f"{model}/3") == []
    assert {model, f"{model}/2"} <= set(reader.models())
    assert reader.models() == sorted(reader.models())


def test_later_record_takes_the_place_of_the_earlier(open_one: Opener, model: str) -> None:
    registry, reader = open_one(), open_one()
    for state in (PeerState.JOINING, PeerState.ONLINE, PeerState.OFFLINE):
        registry.put(record("a", model=model, state=state))
        assert [found.state for found in reader.list(model)] == [state]


def test_watch_tells_every_real_change_and_no_other(engine: Engine, open_one: Opener, model: str) -> None:
    first, second = open_one(), open_one()
    seen: list[object] = []
    with closing(watch(open_one(), model, seen.append)), kept_alive(first, engine.ttl):
        wait_until(lambda: seen == [[]])
        first.put(a := record("a", model=model))
        wait_until(lambda: seen[1:] == [[a]])
        first.put(a)
        first.keep_alive()
        first.put(record("a", model=f"{model}/2"))
        second.put(b := record("b", model=model))
        wait_until(lambda: seen[2:] == [[a, b]])
        first.put(changed := record("a", model=model, free_tokens=1))
        wait_until(lambda: seen[3:] == [[changed, b]])
        first.remove(model, "a")
        wait_until(lambda: seen[4:] == [[b]])
        second.close()  # as if it were killed
        wait_until(lambda: seen[5:] == [[]])


def test_server_without_sign_of_life_is_gone_within_its_ttl(engine: Engine, open_one: Opener, model: str) -> None:
    dead, alive, reader = open_one(), open_one(), open_one()
    dead.put(record("dead", model=model))
    alive.put(record("alive", model=model))
    dead.close()
    killed = time.monotonic()
    while any(found.peer_id == "dead" for found in reader.list(model)):
        alive.keep_alive()
        assert time.monotonic() - killed < engine.ttl + engine.slack
        time.sleep(engine.ttl / 10)
    assert time.monotonic() - killed > engine.ttl * 0.6
    assert [found.peer_id for found in reader.list(model)] == ["alive"]


def test_peer_id_belongs_to_one_server(engine: Engine, open_one: Opener, model: str) -> None:
    first, second = open_one(), open_one()
    first.put(record("a", model=model))
    with pytest.raises(PeerIdTakenError, match="'a' of model"):
        second.put(record("a", model=model, start=2))
    second.remove(model, "a")
    assert second.list(model) == [record("a", model=model)]
    first.remove(model, "a")
    second.put(record("a", model=model, start=2))
    assert first.list(model) == [record("a", model=model, start=2)]


def test_signs_of_life_bring_back_what_the_registry_lost(engine: Engine, open_one: Opener, model: str) -> None:
    registry, reader = open_one(), open_one()
    registry.put(record("a", model=model))
    registry.put(record("a", model=f"{model}/2"))
    engine.forget()
    wait_until(lambda: reader.list(model) == [])
    wait_until(lambda: _succeeds(registry.keep_alive))
    assert reader.list(model) == [record("a", model=model)]
    assert reader.list(f"{model}/2") == [record("a", model=f"{model}/2")]


def test_absence_is_an_error_and_the_watch_goes_on_after_it(engine: Engine, open_one: Opener, model: str) -> None:
    registry = open_one()
    registry.put(record("a", model=model))
    seen: list[object] = []
    away: list[RegistryAwayError] = []
    with closing(watch(open_one(), model, seen.append, away.append)):
        wait_until(lambda: seen == [[record("a", model=model)]])
        engine.kill()
        wait_until(lambda: bool(away))
        for call in (registry.keep_alive, lambda: registry.put(record("a", model=model)), lambda: registry.list(model)):
            with pytest.raises(RegistryAwayError, match=f"registry .*{engine.url[:6]}"):
                call()
        engine.start()
        wait_until(lambda: _succeeds(lambda: registry.put(record("a", model=model, start=1))))
        wait_until(lambda: seen[-1:] == [[record("a", model=model, start=1)]])


def _succeeds(call: object) -> bool:
    try:
        call()  # type: ignore[operator]
    except RegistryAwayError:
        return False
    return True


@pytest.mark.parametrize(
    ("url", "wrong"),
    [
        ("", "registry: ''"),
        ("peers.sqlite", "registry: 'peers.sqlite'"),
        ("http://host", "registry: 'http://host'"),
        ("sqlite://relative/path", "registry: 'sqlite://relative/path'"),
        ("sqlite:///path?ca=1", "option ca: '1' .*none with sqlite"),
        ("etcd://", "host:port"),
        ("etcd://host:1,host", "host:port"),
        ("etcd://host:1/path", "host:port"),
        ("etcd://host:1?ca=a&color=red", "option color: 'red' .*ca, cert, key"),
        ("etcd://host:1?ca=", "option ca: ''"),
        ("etcd://host:1?ca", "name=value"),
        ("etcd://host:1?cert=a", "cert and key"),
        ("dht://", "initial peers"),
        ("dht:///ip4/127.0.0.1/tcp/1", "initial peers"),
        ("dht:///ip4/127.0.0.1/tcp/1/p2p/Qm?listen=0", "option listen: '0' .*tcp/0"),
    ],
)
def test_url_that_is_none(url: str, wrong: str) -> None:
    with pytest.raises(InvalidValueError, match=wrong):
        open_registry(url)


def test_engine_that_is_not_installed_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hivemind", None)
    with pytest.raises(EnvironmentProblemError, match=r"pip install 'corolla\[dht\]'"):
        open_registry("dht:///ip4/127.0.0.1/tcp/1/p2p/Qm")
