"""Whether others reach a server is found out by having one of them dial it, and by nothing that can be misused."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from conftest import Remote
from corolla.client import CorollaClient
from corolla.errors import CorollaError, InvalidValueError
from corolla.peers.record import PeerRecord, PeerState, Throughput
from corolla.peers.registry import open_registry
from corolla.reachability import asking, dialing
from corolla.reachability.address import Address
from corolla.reachability.announced import announced_address
from corolla.reachability.asking import HealthListener, Verdict, ask_peers, listening, registered_peers
from corolla.reachability.dialing import check_health, dial
from corolla.reachability.report import report_reachability
from servers import free_port


@pytest.fixture
def here() -> Address:
    """An address of this machine with a free port."""
    return Address("127.0.0.1", free_port())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10.0.0.7:9", ("10.0.0.7", 9)),
        ("10.0.0.7", ("10.0.0.7", 8001)),
        ("gpu7.example.com:9", ("gpu7.example.com", 9)),
        ("[fd00::2]:9", ("fd00::2", 9)),
        ("[fd00::2]", ("fd00::2", 8001)),
        ("fd00::2", ("fd00::2", 8001)),
    ],
)
def test_an_address_is_a_host_and_maybe_a_port(text: str, expected: tuple[str, int]) -> None:
    address = Address.parse("field", text, default_port=8001)
    assert (address.host, address.port) == expected
    assert Address.parse("field", str(address)) == address


@pytest.mark.parametrize("text", ["", ":9", "host:", "host:0", "host:65536", "host:-1", "http://host:9", "a b:9"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidValueError, match=r"^field: .* such as 10\.0\.0\.7:8001"):
        Address.parse("field", text)


@pytest.mark.parametrize(
    ("wanted", "host", "expected", "warned"),
    [
        (None, "127.0.0.1", "127.0.0.1:9", True),
        (None, "10.0.0.7", "10.0.0.7:9", False),
        ("203.0.113.5", "0.0.0.0", "203.0.113.5:9", False),
        ("203.0.113.5:80", "127.0.0.1", "203.0.113.5:80", False),
        ("localhost", "0.0.0.0", "localhost:9", True),
    ],
)
def test_announced_is_what_was_asked_for_or_where_it_listens(
    wanted: str | None, host: str, expected: str, warned: bool
) -> None:
    announced = announced_address(wanted, host, 9)
    assert (str(announced.address), announced.warning is not None) == (expected, warned)


def test_listening_on_all_addresses_announces_one_of_them() -> None:
    announced = announced_address(None, "0.0.0.0", 9)
    with socket.create_server((announced.address.host, 0)):
        assert announced.address.port == 9
    with pytest.raises(InvalidValueError, match=r"--announce-address: '0\.0\.0\.0' "):
        announced_address("0.0.0.0", "0.0.0.0", 9)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "[::1]", "0.0.0.0", "169.254.169.254", "224.0.0.1", "[fe80::1]", "no-such.invalid"],
)
def test_addresses_that_mean_the_dialling_machine_are_not_dialled(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialing, "check_health", pytest.fail)
    with pytest.raises(InvalidValueError, match=r"^address: "):
        dial(f"{host}:8001")


def test_a_server_answers_and_nothing_else_does(here: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialing, "TIMEOUT_SECONDS", 0.3)
    assert not check_health(here).reachable
    with socket.create_server((here.host, here.port)):
        assert not check_health(here).reachable, "it accepts and says nothing"
    with listening(here) as listener:
        assert listener is not None
        dialled = check_health(here)
        assert dialled.reachable
        assert 0 < dialled.round_trip < 0.3
        assert listener.calls == 2
        with listening(here) as second:
            assert second is None


class TestVerdict:
    @pytest.fixture(autouse=True)
    def peer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A server `peer` that dials addresses of this machine too, and one `away` that does not answer."""

        class Client:
            def __init__(self, address: str, deadline: float) -> None:
                self.address = address

            def __enter__(self) -> "Client":
                return self

            def __exit__(self, *_: object) -> None:
                pass

            def sessions(self, operation: str, address: str) -> dict[str, Any]:
                if self.address == "away":
                    raise CorollaError("away: no answer")
                dialled = check_health(Address.parse("address", address))
                return {"dialled": json.dumps({"reachable": dialled.reachable, "round_trip": dialled.round_trip})}

        monkeypatch.setattr(asking, "CorollaClient", Client)
        monkeypatch.setattr(Address, "is_loopback", lambda self: False)

    def test_reachable(self, here: Address) -> None:
        with listening(here) as listener:
            verdict = ask_peers(here, ["away", "peer"], listener)
        assert verdict.reachable
        assert f"peer dialled {here} and got an answer in " in verdict.detail

    def test_not_reachable_tells_what_to_do(self, here: Address) -> None:
        verdict = ask_peers(here, ["peer"])
        assert verdict.reachable is False
        for words in (f"open port {here.port}", "--announce-address ROUTER:PORT", "--blocks none --ends"):
            assert words in verdict.remedy

    def test_another_server_at_the_address_is_noticed(self, here: Address) -> None:
        with listening(here):
            verdict = ask_peers(here, ["peer"], HealthListener())
        assert verdict.reachable is False
        assert "some other server" in verdict.detail

    @pytest.mark.parametrize(("peers", "detail"), [([], "no other server"), (["away"], "away: no answer")])
    def test_nobody_to_ask_is_no_verdict(self, here: Address, peers: list[str], detail: str) -> None:
        verdict = ask_peers(here, peers)
        assert verdict.reachable is None
        assert detail in verdict.detail


@pytest.mark.parametrize(
    ("verdict", "level", "words"),
    [
        (Verdict(True, "it answered"), "INFO", "reachable for other servers: it answered"),
        (Verdict(None, "nobody", "later"), "INFO", "reachability of 10.0.0.7:9 is not known: nobody; later"),
        (Verdict(False, "no answer", "open it"), "ERROR", "NOT REACHABLE for other servers: no answer; open it"),
    ],
)
def test_a_server_says_at_its_start_what_was_found(
    verdict: Verdict, level: str, words: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(asking, "ask_peers", lambda announced, peers: verdict)
    monkeypatch.setattr(asking, "registered_peers", lambda registry, announced: [])
    with caplog.at_level("INFO"):
        report_reachability("sqlite:///peers.db", announced_address("10.0.0.7", "0.0.0.0", 9))
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [(level, words)]


def test_a_loopback_address_and_a_registry_that_is_away_are_warnings(caplog: pytest.LogCaptureFixture) -> None:
    report_reachability("sqlite:///peers.db", announced_address(None, "127.0.0.1", 9))
    report_reachability("etcd://127.0.0.1:1", announced_address(None, "10.0.0.7", 9))
    first, second = (record.getMessage() for record in caplog.records if record.name == "corolla.server")
    assert first.startswith("announcing 127.0.0.1:9, which only servers on this machine can reach")
    assert second.startswith("reachability of 10.0.0.7:9 is not known: registry etcd://127.0.0.1:1 is away")


def test_loopback_needs_no_dialling(here: Address) -> None:
    verdict = ask_peers(here, ["nobody"])
    assert verdict.reachable is False
    assert "means each machine itself" in verdict.detail


def test_servers_to_ask_are_those_of_the_registry_that_are_online(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'peers.db'}"
    with_registry = open_registry(url)
    for number, state in enumerate([PeerState.ONLINE, PeerState.OFFLINE, PeerState.ONLINE]):
        record = PeerRecord(
            peer_id=f"peer{number}", address=f"10.0.0.{number}:8001", model=f"model{number}", revision="r", start=0,
            end=1, state=state, throughput=Throughput(1.0, 1.0, 1.0), dtype="float32", quant="none", generates=False,
            free_tokens=0, total_tokens=0,
        )  # fmt: skip
        with_registry.put(record)
    assert registered_peers(url, Address("10.0.0.2", 8001)) == ["10.0.0.0:8001"]
    with_registry.close()


def test_a_running_server_dials(remote: Remote) -> None:
    own = announced_address(None, "0.0.0.0", free_port()).address
    with CorollaClient(remote.server.grpc) as client:
        assert json.loads(client.sessions("dial", address=str(own))["dialled"])["reachable"] is False
        with listening(own) as listener:
            verdict = ask_peers(own, [remote.server.grpc], listener)
        assert verdict.reachable
        for address, message in (("127.0.0.1:8001", "address: .127.0.0.1:8001. "), (None, "address: None ")):
            with pytest.raises(CorollaError, match=message):
                client.sessions("dial", address=address)
        assert client.sessions("stat")["dialled"] == ""
