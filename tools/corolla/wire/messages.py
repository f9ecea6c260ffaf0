"""What servers say to the `span` model of each other; docs/protocol.md has the tensors."""

import json
from dataclasses import dataclass

from corolla.errors import InvalidValueError
from corolla.wire.states import WireStates


@dataclass(frozen=True)
class Hop:
    """A later span of a step's route: the server at `address`, its sessions, the blocks that run there."""

    address: str
    blocks: range
    session_ids: tuple[str, ...]


@dataclass(frozen=True)
class SpanStep:
    """One step of n sessions of a server: n rows of T new positions, from `starts` on.

    `blocks` None are all that the server hosts. `step_id` is unguessable; whoever sends the same step again, to the
    same server, sends the same one. Without `states` it waits for up to `timeout` seconds until they come from the
    server before. The output goes on to the first of `next`.
    """

    session_ids: tuple[str, ...]
    starts: tuple[int, ...]
    step_id: str
    states: WireStates | None = None
    blocks: range | None = None
    next: tuple[Hop, ...] = ()
    timeout: float = 10.0


@dataclass(frozen=True)
class SpanOutput:
    """The output of a span for a step.

    `pushed` tells that it was handed to the next hop, `free_tokens` the room in the server's KV cache, `seconds` how
    long the step waited and was computed, `duplicate` that somebody else had sent it before. Where only an
    acknowledgement was asked for, `states` is None.
    """

    states: WireStates | None
    pushed: bool
    free_tokens: int
    seconds: float
    duplicate: bool


def hops_to_json(hops: tuple[Hop, ...]) -> str:
    """For the input `next`."""
    return json.dumps(
        [
            {"address": hop.address, "blocks": [hop.blocks.start, hop.blocks.stop], "session_ids": hop.session_ids}
            for hop in hops
        ]
    )


def hops_from_json(text: str) -> tuple[Hop, ...]:
    """The inverse of `hops_to_json`; InvalidValueError for anything else."""
    try:
        entries = json.loads(text)
        if not isinstance(entries, list):
            raise TypeError
        return tuple(map(_hop, entries))
    except (ValueError, TypeError, KeyError) as error:
        allowed = 'a JSON list of {"address": "host:port", "blocks": [start, end], "session_ids": [...]}'
        raise InvalidValueError("next", text, allowed) from error


def _hop(entry: dict[str, object]) -> Hop:
    address, blocks, session_ids = entry["address"], entry["blocks"], entry["session_ids"]
    if not (isinstance(address, str) and isinstance(blocks, list) and isinstance(session_ids, list)):
        raise TypeError
    start, end = blocks
    if not (isinstance(start, int) and isinstance(end, int) and 0 <= start < end):
        raise ValueError
    if not all(isinstance(session_id, str) for session_id in session_ids):
        raise TypeError
    return Hop(address, range(start, end), tuple(session_ids))
