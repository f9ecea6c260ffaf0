"""What a server tells about itself while it lives."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from checkpoints import GROUPED
from corolla.cli.peers import command as peers_command
from corolla.errors import InvalidValueError
from corolla.peers.announcer import Announcer, is_as_good
from corolla.peers.membership import Membership, MembershipOptions, membership
from corolla.peers.record import PeerRecord, PeerState, Throughput
from corolla.peers.registry import PeerRegistry, open_registry, watch
from corolla.peers.round_trips import likely_next
from corolla.repository.writer import write_repository
from corolla.server.endpoints import Endpoint, Endpoints
from corolla.server.options import ServerOptions
from corolla.server.supervisor import ReadyServer
from local_server import LocalServer, make_plan
from registries import SqliteFile, record
from waiting import wait_until


class CountedRegistry:
    """Passes everything on."""

    def __init__(self, inner: PeerRegistry) -> None:
        self._inner = inner
        self.puts = self.signs_of_life = 0

    def put(self, record: PeerRecord) -> None:
        self.puts += 1
        self._inner.put(record)

    def keep_alive(self) -> None:
        self.signs_of_life += 1
        self._inner.keep_alive()

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


@pytest.fixture
def engine(tmp_path: Path) -> SqliteFile:
    return SqliteFile(tmp_path)


@pytest.fixture
def reader(engine: SqliteFile) -> Iterator[PeerRegistry]:
    with closing(open_registry(engine.url, engine.ttl)) as registry:
        yield registry


def test_gives_signs_of_life_and_writes_only_what_changed(engine: SqliteFile, reader: PeerRegistry) -> None:
    counted = CountedRegistry(open_registry(engine.url, engine.ttl))
    free = [4096]
    with closing(Announcer(counted, record("a"), engine.ttl, lambda r: replace(r, free_tokens=free[0]))) as announcer:  # type: ignore[arg-type]
        wait_until(lambda: reader.list("org/name") == [record("a")])
        wait_until(lambda: counted.signs_of_life >= 4)
        assert counted.puts == 1
        free[0] = 100
        wait_until(lambda: reader.list("org/name") == [record("a", free_tokens=100)])
        assert announcer.update(state=PeerState.OFFLINE), "the caller knows that others can know"
        assert reader.list("org/name")[0].state == PeerState.OFFLINE
        assert counted.puts == 3
    assert reader.list("org/name") == []


def test_registers_again_when_the_registry_is_back(
    engine: SqliteFile, reader: PeerRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("corolla.peers.announcer.ANNOUNCED_WITHIN_SECONDS", 0.3)
    with closing(Announcer(open_registry(engine.url, engine.ttl), record("a"), engine.ttl, lambda r: r)) as announcer:
        wait_until(lambda: reader.list("org/name") == [record("a")])
        engine.kill()
        assert not announcer.update(state=PeerState.OFFLINE)
        engine.start()
        wait_until(lambda: reader.list("org/name") == [record("a", state=PeerState.OFFLINE)])


@pytest.mark.parametrize(
    ("changes", "good"),
    [
        ({"free_tokens": 4096 + 1023}, True),
        ({"free_tokens": 4096 + 1024}, False),
        ({"round_trips": {"b": 0.0025, "c": 0.025}}, True),
        ({"round_trips": {"b": 0.001, "c": 0.031}}, False),
        ({"round_trips": {"b": 0.001}}, False),
        ({"adapters": ("french",)}, False),
        ({"state": PeerState.OFFLINE}, False),
        ({"throughput": Throughput(1.0, 1.0, 1.0)}, False),
    ],
)
def test_change_that_matters(changes: dict[str, object], good: bool) -> None:
    assert is_as_good(record("a"), record("a", **changes)) == good


def test_likely_next_are_those_that_go_on_where_the_server_ends() -> None:
    peers = [
        record("me", start=0, end=4),
        record("inside", start=2, end=6),
        record("begins", start=4, end=8),
        record("before", start=0, end=4),
        record("joining", start=4, end=8, state=PeerState.JOINING),
    ]
    assert [peer.peer_id for peer in likely_next(peers, "me", 4)] == ["begins", "inside"]
    assert likely_next(peers, "me", 8) == []


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("announced") / "tiny"
    GROUPED.write(folder)
    return folder


def _states(seen: list[list[PeerRecord]]) -> list[PeerState]:
    """Of a server, each once, in the order in which a watch was told."""
    return list(dict.fromkeys(peers[0].state for peers in seen if peers))


def test_server_is_announced_from_its_start_to_its_end(
    engine: SqliteFile, reader: PeerRegistry, checkpoint: Path, tmp_path: Path, suite_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("COROLLA_PEER_ID", raising=False)
    plan = make_plan(checkpoint, GROUPED.ranges, attn_cache_tokens=2048)
    local = LocalServer(plan, tmp_path / "local", suite_cache)
    seen: list[list[PeerRecord]] = []
    options = MembershipOptions(engine.url, throughput=Throughput(7.0, 70.0, 700.0), ttl=engine.ttl)
    server = ServerOptions(local.repository, grpc_port=0)
    with closing(watch(reader, "tiny", seen.append)):
        with membership(server, options) as joined:
            assert isinstance(joined, Membership)
            wait_until(lambda: len(joined.directory.peers()) == 1 and _states(seen) == [PeerState.JOINING])
            (joining,) = joined.directory.peers()
            endpoints = Endpoints(Endpoint("127.0.0.1", 1), Endpoint("127.0.0.1", 2), None)
            joined.ready(ReadyServer(endpoints, 0, local.run_directory))
            wait_until(lambda: joined.directory.peers()[0].state == PeerState.ONLINE)
            (online,) = joined.directory.peers()
            session = local.open(512)
            wait_until(lambda: joined.directory.peers()[0].free_tokens == 1536)
            local.table.close(session)
            wait_until(lambda: _states(seen)[-1] == PeerState.ONLINE)
            joined.down(stopping=True)
            wait_until(lambda: joined.directory.peers()[0].state == PeerState.OFFLINE == _states(seen)[-1])
        wait_until(lambda: seen[-1] == [])
    assert (joining.state, joining.address, joining.total_tokens) == (PeerState.JOINING, "", 0)
    assert (online.address, online.blocks) == ("127.0.0.1:2", plan.hosted)
    assert (online.free_tokens, online.total_tokens) == (2048, 2048)
    assert (online.dtype, online.quant, online.generates) == (plan.dtype.name, "none", True)
    assert online.throughput == Throughput(7.0, 70.0, 700.0)
    assert _states(seen) == [PeerState.JOINING, PeerState.ONLINE, PeerState.OFFLINE]


def test_server_without_a_registry_is_not_announced(checkpoint: Path, tmp_path: Path) -> None:
    write_repository(make_plan(checkpoint, GROUPED.ranges), tmp_path)
    with membership(ServerOptions(tmp_path), MembershipOptions()) as joined:
        assert joined is None


def test_server_that_others_cannot_use_is_refused(engine: SqliteFile, checkpoint: Path, tmp_path: Path) -> None:
    options = MembershipOptions(engine.url)
    with pytest.raises(InvalidValueError, match=r"--registry: .*corolla init"), membership(
        ServerOptions(tmp_path), options
    ):
        pass
    write_repository(make_plan(checkpoint, GROUPED.ranges), tmp_path)
    with pytest.raises(InvalidValueError, match="--allow-grpc"), membership(
        ServerOptions(tmp_path, flags=("--allow-grpc=false",)), options
    ):
        pass


def test_peers_are_listed(engine: SqliteFile, reader: PeerRegistry) -> None:
    for peer in (record("b", start=4, end=8, state=PeerState.JOINING), record("a"), record("c", model="other")):
        reader.put(peer)
    result = CliRunner().invoke(peers_command, ["--registry", engine.url])
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0] == "org/name 0123abcd: 2 servers"
    assert lines[2].split()[:4] == ["a", "ONLINE", "0:4", "10.0.0.1:8001"]
    assert lines[3].split()[:3] == ["b", "JOINING", "4:8"]
    assert "other 0123abcd: 1 server" in lines
    listed = CliRunner().invoke(peers_command, ["--model", "other", "--json"], env={"COROLLA_REGISTRY": engine.url})
    assert '"peer_id": "c"' in listed.output
    assert '"peer_id": "a"' not in listed.output


def test_peers_are_watched(engine: SqliteFile, reader: PeerRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Callable[[], object]] = [lambda: None, lambda: reader.put(record("a")), engine.kill]

    def pause(seconds: float) -> None:
        if not events:
            raise KeyboardInterrupt
        events.pop(0)()

    monkeypatch.setattr("corolla.cli.peers.sleep", pause)
    result = CliRunner().invoke(peers_command, ["--registry", engine.url, "--watch", "--json"])
    first, second, third, *_ = result.output.splitlines()
    assert first == "[]"
    assert '"peer_id": "a"' in second
    assert "is away" in third
