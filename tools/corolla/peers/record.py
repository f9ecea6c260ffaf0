"""What a server tells others about itself: one record per server, written by its announcer, read by routers."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from corolla.errors import CorollaError


class PeerState(StrEnum):
    """JOINING: its models are loading. ONLINE: it takes sessions. OFFLINE: it takes no new ones and will be gone."""

    JOINING = "JOINING"
    ONLINE = "ONLINE"
    OFFLINE = "OFFLINE"


class PeerRecordError(CorollaError):
    """A record that cannot be read, of another version or damaged."""


@dataclass(frozen=True)
class Throughput:
    """Tokens per second that one block of a server takes: see corolla.planning.throughput.

    `inference` in steps of one token, `forward` in forwards of 1024, `network` as hidden states over the wire.
    """

    inference: float
    forward: float
    network: float


@dataclass(frozen=True)
class PeerRecord:
    """One server.

    `address` is host:port of its gRPC endpoint as others reach it. `model` names the model and `revision` its weights:
    only servers where both are equal hold blocks of the same model. It hosts the blocks [start, end). `generates` tells
    that it has the ends of the model, so that text can be sent to it. `free_tokens` of its KV cache are a hint;
    replies of the server say what is true. `round_trips` are seconds to other servers by their `peer_id`. A `movable`
    one takes other blocks when the swarm is short of them.
    """

    peer_id: str
    address: str
    model: str
    revision: str
    start: int
    end: int
    state: PeerState
    throughput: Throughput
    dtype: str
    quant: str
    generates: bool
    free_tokens: int
    total_tokens: int
    adapters: tuple[str, ...] = ()
    round_trips: Mapping[str, float] = field(default_factory=dict)
    version: str = ""
    movable: bool = False

    @property
    def blocks(self) -> range:
        """The blocks it hosts."""
        return range(self.start, self.end)

    def to_json(self) -> str:
        """One line, the same for equal records."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "PeerRecord":
        """Reads what `to_json` wrote; fields that it does not know are left out. PeerRecordError for anything else."""
        try:
            content = json.loads(text)
            known = {name: content[name] for name in cls.__dataclass_fields__ if name in content}
            known["state"] = PeerState(known["state"])
            known["throughput"] = Throughput(**known["throughput"])
            known["adapters"] = tuple(known.get("adapters", ()))
            return cls(**known)
        except (ValueError, TypeError, KeyError) as error:
            raise PeerRecordError(f"not the record of a server: {text[:200]!r} ({error})") from error


Peers = list[PeerRecord]
"""Records of several servers, ordered by their `peer_id`."""
