"""Dialling the address of another server on its behalf.

Whoever may call a server may have it dial, so that dialling must not become a way into its network: nothing is sent
but Triton's health check over gRPC, the answer is whether a live server of Triton gave it and nothing of what was
said, addresses that mean the dialling machine or its own link are refused, and a server dials one address at a time.
"""

import threading
import time
from dataclasses import dataclass

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from corolla.errors import InvalidValueError
from corolla.reachability.address import Address

TIMEOUT_SECONDS = 3.0

_OPTIONS = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
"""The very address, and without what earlier attempts have left behind."""
_PATIENCE_SECONDS = 10.0
_one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class Dialled:
    """Whether a live server of Triton answers at the address, and how long an answer takes, in seconds; else 0."""

    reachable: bool
    round_trip: float


def dial(text: str) -> Dialled:
    """Dials HOST:PORT; takes up to 2 TIMEOUT_SECONDS.

    InvalidValueError for what is no such address, or one that other machines could not dial either.
    """
    address = Address.parse("address", text)
    found = address.resolve()
    if not found:
        raise InvalidValueError("address", text, "a host whose name is known here")
    for ip in found:
        if ip.is_loopback or ip.is_link_local or ip.is_multicast or ip.is_unspecified or ip.is_reserved:
            raise InvalidValueError("address", text, f"one that means the same to every machine, which {ip} does not")
    if not _one_at_a_time.acquire(timeout=_PATIENCE_SECONDS):
        raise InvalidValueError("address", text, "one at a time; others are being dialled, try again")
    try:
        return check_health(Address(str(found[0]), address.port))
    finally:
        _one_at_a_time.release()


def check_health(address: Address) -> Dialled:
    """Two health checks, of which the second one is timed: it does not wait for the connection."""
    with grpc.insecure_channel(str(address), options=_OPTIONS) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        started = 0.0
        for _ in range(2):
            started = time.monotonic()
            try:
                live = stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=TIMEOUT_SECONDS).live
            except grpc.RpcError:
                live = False
            if not live:
                return Dialled(False, 0.0)
        return Dialled(True, time.monotonic() - started)
