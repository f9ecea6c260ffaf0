"""Calls of etcd's API over gRPC, at whichever of its members answers."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc

from corolla.errors import InvalidValueError
from corolla.peers import etcd_messages as etcd
from corolla.peers.registry import RegistryAwayError

CALL_SECONDS = 3.0
"""How long one member may take; the election of a new leader takes half of it."""

_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.keepalive_time_ms", 10_000),  # etcd allows one every 5 s
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.http2.max_pings_without_data", 0),
]
_RANGE = "/etcdserverpb.KV/Range", etcd.RangeResponse
_TXN = "/etcdserverpb.KV/Txn", etcd.TxnResponse
_LEASE_GRANT = "/etcdserverpb.Lease/LeaseGrant", etcd.LeaseGrantResponse
_LEASE_KEEP_ALIVE = "/etcdserverpb.Lease/LeaseKeepAlive", etcd.LeaseKeepAliveResponse
_WATCH = "/etcdserverpb.Watch/Watch", etcd.WatchResponse


class LeaseLostError(Exception):
    """The lease is over, and with it all keys that were put under it."""


class EtcdClient:
    """One channel per member. A call goes to the member that answered last, then to the others in turn.

    All calls raise RegistryAwayError when none of them answers.
    """

    def __init__(self, url: str, hosts: Sequence[str], tls: Mapping[str, str]) -> None:
        """`tls` names files by ca, cert and key; without any, nothing is encrypted. InvalidValueError for bad ones."""
        self._url = url
        self._channels = [_channel(host, tls) for host in hosts]
        self._current = 0

    def range(self, request: Any) -> Any:
        """RangeRequest to RangeResponse, as of the latest write."""
        return self._at_some_member(lambda channel: self._unary(channel, _RANGE, request))

    def txn(self, request: Any) -> Any:
        """TxnRequest to TxnResponse; LeaseLostError when it puts a key under a lease that is over."""
        return self._at_some_member(lambda channel: self._unary(channel, _TXN, request))

    def grant_lease(self, seconds: int) -> int:
        """A new lease."""
        request = etcd.LeaseGrantRequest(TTL=seconds)
        lease: int = self._at_some_member(lambda channel: self._unary(channel, _LEASE_GRANT, request)).ID
        return lease

    def renew_lease(self, lease: int) -> bool:
        """Whether the lease was still there."""
        request = etcd.LeaseKeepAliveRequest(ID=lease)

        def renew(channel: grpc.Channel) -> bool:
            return bool(next(self._stream(channel, _LEASE_KEEP_ALIVE, request, timeout=CALL_SECONDS)).TTL > 0)

        return self._at_some_member(renew)

    def watch(self, key: bytes, range_end: bytes, start_revision: int) -> Any:
        """A stream of WatchResponse that ends, by an error, when the member dies or has no leader."""
        create = etcd.WatchCreateRequest(key=key, range_end=range_end, start_revision=start_revision)
        request = etcd.WatchRequest(create_request=create)
        return self._stream(self._channels[self._current], _WATCH, request, metadata=(("hasleader", "true"),))

    def close(self) -> None:
        """Ends all calls."""
        for channel in self._channels:
            channel.close()

    def _at_some_member(self, call: Callable[[grpc.Channel], Any]) -> Any:
        reasons = []
        for _ in self._channels:
            try:
                return call(self._channels[self._current])
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.NOT_FOUND:
                    raise LeaseLostError from error
                reasons.append(error.details())
                self._current = (self._current + 1) % len(self._channels)
        raise RegistryAwayError(self._url, "; ".join(dict.fromkeys(reasons)))

    def _unary(self, channel: grpc.Channel, method: tuple[str, Any], request: Any) -> Any:
        path, response = method
        return channel.unary_unary(path, type(request).SerializeToString, response.FromString)(
            request, timeout=CALL_SECONDS
        )

    def _stream(self, channel: grpc.Channel, method: tuple[str, Any], request: Any, **options: Any) -> Any:
        path, response = method
        return channel.stream_stream(path, type(request).SerializeToString, response.FromString)(
            iter([request]), **options
        )


def _channel(host: str, tls: Mapping[str, str]) -> grpc.Channel:
    if not tls:
        return grpc.insecure_channel(host, _OPTIONS)
    if ("cert" in tls) != ("key" in tls):
        raise InvalidValueError("registry: options", ", ".join(tls), "cert and key, both or neither, beside ca")
    ca, cert, key = (_read(name, tls[name]) if name in tls else None for name in ("ca", "cert", "key"))
    return grpc.secure_channel(host, grpc.ssl_channel_credentials(ca, key, cert), _OPTIONS)


def _read(option: str, file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise InvalidValueError(f"registry: option {option}", file, f"a PEM file ({error.strerror})") from error
