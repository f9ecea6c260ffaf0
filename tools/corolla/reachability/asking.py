"""Asking other servers to dial this one, and what their answers mean."""

import json
from collections.abc import Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from corolla.client import CorollaClient
from corolla.errors import CorollaError
from corolla.peers.record import PeerState
from corolla.peers.registry import open_registry
from corolla.reachability.address import Address

_MOST_ASKED = 3
_ANSWER_SECONDS = 20.0
"""More than dialling takes where others are dialled at the same time."""


@dataclass(frozen=True)
class Verdict:
    """Whether others can reach the address: None where that could not be found out. `detail` is a line for a user."""

    reachable: bool | None
    detail: str
    remedy: str = ""


class HealthListener(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers health checks on a port in place of a server that is not running yet, and counts them."""

    def __init__(self) -> None:
        self.calls = 0

    def ServerLive(self, request: object, context: object) -> object:  # noqa: N802 (the name in the protocol)
        """Always live."""
        self.calls += 1
        return service_pb2.ServerLiveResponse(live=True)


@contextmanager
def listening(address: Address) -> Iterator[HealthListener | None]:
    """A listener as long as the context lasts; None where the port is taken, presumably by the server itself."""
    listener = HealthListener()
    server = grpc.server(futures.ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 0)])
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(listener, server)
    try:
        server.add_insecure_port(str(address))
    except RuntimeError:
        yield None
        return
    server.start()
    try:
        yield listener
    finally:
        server.stop(0).wait()


def ask_peers(announced: Address, peers: Sequence[str], listener: HealthListener | None = None) -> Verdict:
    """The verdict of the first of the peers, HOST:PORT each, that can give one.

    With a `listener`, it is told when somebody else answers at the address.
    """
    if announced.is_loopback():
        return Verdict(
            False,
            f"{announced} means each machine itself, so that nobody else can dial it",
            "fine if all servers run on this machine; else listen on an address of the network (--host 0.0.0.0), and "
            "behind a NAT give --announce-address",
        )
    complaints = []
    for peer in peers:
        before = listener.calls if listener else 0
        try:
            with CorollaClient(peer, _ANSWER_SECONDS) as client:
                answer = json.loads(client.sessions("dial", address=str(announced))["dialled"])
        except CorollaError as error:
            complaints.append(str(error))
            continue
        if not answer["reachable"]:
            return Verdict(False, f"{peer} dialled {announced} and no server answered there", _remedy(announced))
        if listener is not None and listener.calls == before:
            return Verdict(
                False,
                f"{peer} dialled {announced} and some other server answered there, not this machine",
                "give the address of this machine with --announce-address, or have the port forwarded to it",
            )
        return Verdict(True, f"{peer} dialled {announced} and got an answer in {answer['round_trip'] * 1e3:.1f} ms")
    return Verdict(None, "; ".join(complaints) or "no other server is there to dial this one", "try again later")


def registered_peers(registry_url: str, announced: Address) -> list[str]:
    """Addresses of a few servers that are online, of any model, this one left out. RegistryAwayError."""
    registry = open_registry(registry_url)
    try:
        records = [record for model in registry.models() for record in registry.list(model)]
    finally:
        registry.close()
    online = {record.address for record in records if record.state is PeerState.ONLINE}
    return sorted(online - {str(announced)})[:_MOST_ASKED]


def _remedy(announced: Address) -> str:
    return (
        f"open port {announced.port} in the firewall; behind a NAT, forward a port of the router to it and give "
        "--announce-address ROUTER:PORT; where neither is possible, let this server host no blocks and only generate "
        "(`corolla init --blocks none --ends`), for which nobody has to reach it"
    )
