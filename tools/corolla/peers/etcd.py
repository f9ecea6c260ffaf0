"""The registry of a cluster: etcd, version 3.4 or later."""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote, unquote

import grpc

from corolla.errors import InvalidValueError
from corolla.peers import etcd_messages as etcd
from corolla.peers.etcd_client import EtcdClient, LeaseLostError
from corolla.peers.location import RegistryLocation
from corolla.peers.record import PeerRecord, Peers
from corolla.peers.registry import PeerIdTakenError, RegistryAwayError, read_records
from corolla.peers.watch import Closing

PREFIX = "/corolla/peers/"
"""Keys are the prefix, the model and the peer id, with / between them and %2F for / inside them."""
ATTEMPTS = 3
"""So often is a lease that was lost while it was used replaced by another."""
RELIST_SECONDS = 0.1
"""Pause before everything is listed again after a watch was cut off."""

_HOST = re.compile(r"[^\s:/@]+:\d+|\[[0-9a-fA-F:]+\]:\d+")


class EtcdRegistry:
    """All keys of one object are under one lease."""

    def __init__(self, location: RegistryLocation, ttl: float) -> None:
        hosts = location.host.split(",")
        if not all(map(_HOST.fullmatch, hosts)) or location.path not in ("", "/"):
            raise InvalidValueError("registry", location.text, "etcd://host:port,host:port?ca=...&cert=...&key=...")
        self._url = location.text
        self._ttl = math.ceil(ttl)
        self._client = EtcdClient(location.text, hosts, location.options)
        self._lease = 0
        self._mine: dict[tuple[str, str], bytes] = {}

    def put(self, record: PeerRecord) -> None:
        self._register(self._mine | {(record.model, record.peer_id): record.to_json().encode()})

    def keep_alive(self) -> None:
        self._register(self._mine)

    def remove(self, model: str, peer_id: str) -> None:
        self._mine.pop((model, peer_id), None)
        key = _key(model, peer_id)
        if self._lease:
            delete = etcd.RequestOp(request_delete_range=etcd.DeleteRangeRequest(key=key))
            self._client.txn(etcd.TxnRequest(compare=[self._is_mine(key)], success=[delete]))

    def list(self, model: str) -> Peers:
        return read_records(_texts(self._range(*_keys_of(model)).kvs))

    def models(self) -> Sequence[str]:
        prefix = PREFIX.encode()
        found = self._range(prefix, _after(prefix), keys_only=True).kvs
        return sorted({unquote(kv.key.decode().removeprefix(PREFIX).partition("/")[0]) for kv in found})

    def changes(self, model: str, closing: Closing) -> Iterator[Peers]:
        begin, end = _keys_of(model)
        cluster: int | None = None
        while not closing:
            listed = self._range(begin, end)
            if cluster not in (None, listed.header.cluster_id):
                raise RegistryAwayError(self._url, "another cluster has taken its place")
            cluster = listed.header.cluster_id
            values = {kv.key: kv for kv in listed.kvs}
            yield read_records(_texts(values.values()))
            stream = self._client.watch(begin, end, listed.header.revision + 1)
            closing.interrupt(stream.cancel)
            for events in _until_cut_off(stream):
                for event in events:
                    if event.type == etcd.DELETED:
                        values.pop(event.kv.key, None)
                    else:
                        values[event.kv.key] = event.kv
                yield read_records(_texts(values.values()))
            closing.wait(RELIST_SECONDS)

    def close(self) -> None:
        self._client.close()

    def _register(self, wanted: dict[tuple[str, str], bytes]) -> None:
        """Writes what is not there as it is wanted, under a lease that is alive."""
        for _ in range(ATTEMPTS):
            if not (self._lease and self._client.renew_lease(self._lease)):
                self._lease = self._client.grant_lease(self._ttl)
            try:
                for (model, peer_id), value in wanted.items():
                    found = self._range(_key(model, peer_id)).kvs
                    if not found or (found[0].value, found[0].lease) != (value, self._lease):
                        self._put(model, peer_id, value)
                self._mine = wanted
                return
            except LeaseLostError:
                continue
        raise RegistryAwayError(self._url, "leases are lost as soon as they are granted")

    def _put(self, model: str, peer_id: str, value: bytes) -> None:
        """Writes a key that is this object's, or nobody's."""
        key = _key(model, peer_id)
        put = etcd.RequestOp(request_put=etcd.PutRequest(key=key, value=value, lease=self._lease))
        is_free = etcd.Compare(result=etcd.EQUAL, target=etcd.VERSION, key=key, version=0)
        create = etcd.RequestOp(request_txn=etcd.TxnRequest(compare=[is_free], success=[put]))
        answer = self._client.txn(etcd.TxnRequest(compare=[self._is_mine(key)], success=[put], failure=[create]))
        if not answer.succeeded and not answer.responses[0].response_txn.succeeded:
            raise PeerIdTakenError(model, peer_id)

    def _is_mine(self, key: bytes) -> Any:
        return etcd.Compare(result=etcd.EQUAL, target=etcd.LEASE, key=key, lease=self._lease)

    def _range(self, key: bytes, range_end: bytes = b"", keys_only: bool = False) -> Any:
        return self._client.range(etcd.RangeRequest(key=key, range_end=range_end, keys_only=keys_only))


def _until_cut_off(stream: Any) -> Iterator[Any]:
    """The events of each response, until the stream breaks or etcd cancels it, as after a compaction."""
    try:
        for response in stream:
            if response.canceled:
                return
            if response.events:
                yield response.events
    except grpc.RpcError:
        return
    finally:
        stream.cancel()


def _key(model: str, peer_id: str) -> bytes:
    return f"{PREFIX}{quote(model, safe='')}/{quote(peer_id, safe='')}".encode()


def _keys_of(model: str) -> tuple[bytes, bytes]:
    prefix = _key(model, "")
    return prefix, _after(prefix)


def _after(prefix: bytes) -> bytes:
    """The first key behind all that begin with the prefix."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def _texts(kvs: Any) -> Iterator[str]:
    return (kv.value.decode(errors="replace") for kv in kvs)
