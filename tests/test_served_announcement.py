"""What a real server announces."""

from contextlib import closing

from conftest import Remote
from corolla.checkpoint.identity import ModelIdentity
from corolla.peers.directory import PeerDirectory
from corolla.peers.record import PeerState
from corolla.peers.round_trips import round_trip


def test_server_is_found_in_its_registry(remote: Remote) -> None:
    identity = ModelIdentity.of(remote.checkpoint)
    with closing(PeerDirectory(remote.registry, identity.name, identity.revision)) as directory:
        (peer,) = directory.peers()
    assert (peer.state, peer.address) == (PeerState.ONLINE, remote.server.grpc)
    assert peer.blocks == range(remote.case.ranges[-1].stop)
    assert peer.total_tokens == 8 * 1024
    assert peer.generates
    environment = [stub.process.pid for stub in remote.server.stubs()]
    for pid in environment:
        with open(f"/proc/{pid}/environ", "rb") as file:
            assert f"COROLLA_PEER_ID={peer.peer_id}".encode() in file.read().split(b"\0")
    seconds = round_trip(peer.address)
    assert seconds is not None
    assert 0 < seconds < 0.5
