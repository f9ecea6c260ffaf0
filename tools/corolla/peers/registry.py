"""Where servers write their records and others find them; three engines, chosen by URL."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from corolla.errors import CorollaError
from corolla.peers.location import DHT, ETCD, RegistryLocation
from corolla.peers.record import PeerRecord, PeerRecordError, Peers
from corolla.peers.watch import Closing, Watch

DEFAULT_TTL = 30.0
"""Seconds after which the records of a server that gives no sign of life are gone."""

_LOG = logging.getLogger("corolla.peers")


class RegistryAwayError(CorollaError):
    """The registry does not answer now."""

    def __init__(self, url: str, reason: object) -> None:
        super().__init__(f"registry {url} is away: {reason}")


class PeerIdTakenError(CorollaError):
    """Another server has registered under the same peer id."""

    def __init__(self, model: str, peer_id: str) -> None:
        super().__init__(
            f"peer id {peer_id!r} of model {model!r} belongs to another server that is alive; stop that one, or start "
            "this one with another id"
        )


class PeerRegistry(Protocol):
    """One server's, or one reader's, view of the registry. Opening it does not touch the registry.

    All records put through one object live and die together: they are gone a TTL after its last `put` or `keep_alive`.
    Every method raises RegistryAwayError, within seconds, when the registry does not answer.
    """

    def put(self, record: PeerRecord) -> None:
        """Creates or changes a record; if it is equal to what is there, nothing is written.

        PeerIdTakenError when another object has put the same id of the same model and is alive.
        """

    def keep_alive(self) -> None:
        """A sign of life, to be given every third of the TTL; puts the records again that are not there any more."""

    def remove(self, model: str, peer_id: str) -> None:
        """Takes back what this object has put; nothing happens if it has not."""

    def list(self, model: str) -> Peers:
        """The records of a model."""

    def models(self) -> Sequence[str]:
        """The models that have records, in order."""

    def changes(self, model: str, closing: Closing) -> Iterator[Peers]:
        """The records of a model now, and again whenever they may have changed, until it is closing.

        RegistryAwayError ends it, also when the registry has been replaced by another.
        """

    def close(self) -> None:
        """Stops giving signs of life; records that were not removed are gone a TTL later."""


def watch(
    registry: PeerRegistry,
    model: str,
    on_change: Callable[[Peers], None],
    on_away: Callable[[RegistryAwayError], None] = lambda error: None,
) -> Watch:
    """Calls `on_change` with all records of a model: now, at each real change, and when the registry is back.

    Both are called from one thread, until the watch is closed.
    """
    return Watch(lambda closing: registry.changes(model, closing), on_change, on_away, RegistryAwayError)


def open_registry(url: str, ttl: float = DEFAULT_TTL) -> PeerRegistry:
    """The registry at a URL; InvalidValueError for one that is none, EnvironmentProblemError without its engine."""
    location = RegistryLocation.parse(url)
    if location.engine == ETCD:
        from corolla.peers.etcd import EtcdRegistry

        return EtcdRegistry(location, ttl)
    if location.engine == DHT:
        from corolla.peers.dht import DhtRegistry

        return DhtRegistry(location, ttl)
    from corolla.peers.sqlite import SqliteRegistry

    return SqliteRegistry(location, ttl)


def read_records(texts: Iterable[str]) -> Peers:
    """Those of the texts that are records."""
    records = []
    for text in texts:
        try:
            records.append(PeerRecord.from_json(text))
        except PeerRecordError as error:
            _LOG.warning("%s", error)
    return sorted(records, key=lambda record: record.peer_id)
