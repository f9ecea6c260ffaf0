"""The registry without a server: a distributed hash table of hivemind, as Petals has it."""

import re
import time
from collections.abc import Iterator, Sequence

from corolla.errors import InvalidValueError
from corolla.peers.dht_node import DhtNode
from corolla.peers.location import RegistryLocation
from corolla.peers.record import PeerRecord, Peers
from corolla.peers.registry import PeerIdTakenError, read_records
from corolla.peers.watch import Closing

POLL_SECONDS = 1.0
"""How often a watch asks, as a table tells nobody of changes."""
REMOVED = ""
"""What takes the place of a removed record until it would have expired: nothing is ever deleted from the table."""
MODELS = "corolla/models"
"""The key of the models' names."""

_PEER = re.compile(r"/(?:ip4|ip6|dns|dns4|dns6)/[^/]+/(?:tcp|udp)/\d+(?:/[\w-]+)*/p2p/\w+")
_LISTEN = re.compile(r"/(?:ip4|ip6)/[^/]+/(?:tcp|udp)/\d+(?:/[\w-]+)*")


class DhtRegistry:
    """One key per model, one subkey per server: its peer id and the public key that its record is signed with."""

    def __init__(self, location: RegistryLocation, ttl: float) -> None:
        """EnvironmentProblemError without hivemind."""
        peers = location.path.split(",")
        listen = location.options.get("listen")
        if location.host or not all(map(_PEER.fullmatch, peers)):
            raise InvalidValueError(
                "registry", location.text, "dht:// and initial peers such as /ip4/10.0.0.1/tcp/31337/p2p/Qm..., with , "
                "between them"
            )
        if listen and not _LISTEN.fullmatch(listen):
            raise InvalidValueError("registry: option listen", listen, "an address such as /ip4/0.0.0.0/tcp/0")
        self._node = DhtNode(location.text, peers, listen)
        self._lifetime = max(ttl - POLL_SECONDS, ttl / 2)  # so that a watch knows within the TTL
        self._mine: dict[tuple[str, str], str] = {}
        self._latest = 0.0

    def put(self, record: PeerRecord) -> None:
        key = record.model, record.peer_id
        self._check_owner(*key)
        self._store(self._mine | {key: record.to_json()})

    def keep_alive(self) -> None:
        for model, peer_id in self._mine:
            self._check_owner(model, peer_id)
        self._store(self._mine)

    def remove(self, model: str, peer_id: str) -> None:
        if self._mine.pop((model, peer_id), None) is not None:
            self._node.store([(_key(model), self._subkey(peer_id), REMOVED)], self._expiration())

    def list(self, model: str) -> Peers:
        records = read_records(self._signed(_key(model)).values())
        return [record for record in records if record.model == model]

    def models(self) -> Sequence[str]:
        return sorted({model for model, _ in self._signed(MODELS)})

    def changes(self, model: str, closing: Closing) -> Iterator[Peers]:
        yield self.list(model)
        while not closing.wait(POLL_SECONDS):
            yield self.list(model)

    def close(self) -> None:
        self._node.close()

    def _store(self, wanted: dict[tuple[str, str], str]) -> None:
        """Stores all of it, as a table forgets what is not stored again."""
        entries = [(_key(model), self._subkey(peer_id), record) for (model, peer_id), record in wanted.items()]
        names = [(MODELS, self._subkey(model), model) for model in sorted({model for model, _ in wanted})]
        if entries:
            self._node.store(entries + names, self._expiration())
        self._mine = wanted

    def _expiration(self) -> float:
        """Later than all before, as a table keeps what expires last."""
        self._latest = max(time.time() + self._lifetime, self._latest + 0.001)
        return self._latest

    def _check_owner(self, model: str, peer_id: str) -> None:
        owners = {owner for found, owner in self._signed(_key(model)) if found == peer_id}
        if owners - {self._node.owner}:
            raise PeerIdTakenError(model, peer_id)

    def _subkey(self, name: str) -> str:
        return name + self._node.owner

    def _signed(self, key: str) -> dict[tuple[str, str], str]:
        """The values under a key by the two parts of their subkeys; those that anybody could have written are not."""
        found = {}
        for subkey, value in self._node.get(key).items():
            name, bracket, owner = subkey.rpartition("[owner:")
            if bracket and value != REMOVED:
                found[name, bracket + owner] = value
        return found


def _key(model: str) -> str:
    return f"corolla/peers/{model}"
