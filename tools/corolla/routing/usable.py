"""Which peers may run which blocks of a route, and what to say when some blocks are left over."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from corolla.errors import OverloadedError
from corolla.peers.record import PeerRecord, PeerState
from corolla.routing.query import RouteQuery
from corolla.routing.shortest_path import HOME


class NoRouteError(OverloadedError):
    """Some blocks can be run by nobody now; `missing` are their numbers, ascending."""

    def __init__(self, missing: list[int], reasons: Counter[str]) -> None:
        held = "; ".join(f"{count} {reason}" for reason, count in sorted(reasons.items())) or "nobody announces them"
        super().__init__(
            f"no server can be used for blocks {written_ranges(missing)} ({held}); start a server for them, or try "
            "again when one has come back"
        )
        self.missing = missing


def usable_blocks(
    peers: Sequence[PeerRecord], blocks: range, query: RouteQuery, banned: Mapping[str, float]
) -> np.ndarray:
    """bool [P + 1, B]: may that peer run that block? The first row is the asker's own.

    Where all who could run a block are banned, the one whose ban ends first may; `banned` tells when bans end. Raises
    NoRouteError if nobody may run some block.
    """
    usable = np.zeros((1 + len(peers), len(blocks)), bool)
    usable[HOME, _columns(query.local, blocks)] = True
    refused: list[tuple[PeerRecord, str]] = []
    last_resort: list[tuple[float, int]] = []
    for index, peer in enumerate(peers, HOME + 1):
        if reason := _refusal(peer, query):
            refused.append((peer, reason))
        elif peer.peer_id in banned:
            last_resort.append((banned[peer.peer_id], index))
        else:
            usable[index, _columns(peer.blocks, blocks)] = True
    free = usable.any(axis=0)
    for _, index in sorted(last_resort):
        columns = _columns(peers[index - 1].blocks, blocks)
        usable[index, columns] = ~free[columns]
        free[columns] = True
    if not free.all():
        missing = [block for block, is_free in zip(blocks, free, strict=True) if not is_free]
        raise NoRouteError(missing, Counter(why for peer, why in refused if any(b in peer.blocks for b in missing)))
    return usable


def written_ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as ranges whose ends are not part of them: 4:8, 12:13."""
    ends = [i for i in range(len(numbers)) if i + 1 == len(numbers) or numbers[i + 1] != numbers[i] + 1]
    starts = [0, *(end + 1 for end in ends[:-1])]
    return ", ".join(f"{numbers[start]}:{numbers[end] + 1}" for start, end in zip(starts, ends, strict=True))


def _refusal(peer: PeerRecord, query: RouteQuery) -> str | None:
    if peer.peer_id in query.blocked or (query.allowed is not None and peer.peer_id not in query.allowed):
        return "not allowed by the request"
    if peer.peer_id == query.peer_id:
        return "is the asking server itself"
    if peer.state is not PeerState.ONLINE:
        return f"announced as {peer.state}"
    speed = peer.throughput
    if not (speed.inference > 0 and speed.forward > 0 and speed.network > 0):
        return "without a throughput"
    if query.adapter and query.adapter not in peer.adapters:
        return f"without the adapter {query.adapter!r}"
    if peer.total_tokens < query.max_length:
        return f"with a KV cache of less than {query.max_length} tokens"
    return None


def _columns(some: range, blocks: range) -> slice:
    """Where `some` blocks lie in arrays over `blocks`."""
    start = min(max(some.start, blocks.start), blocks.stop)
    return slice(start - blocks.start, max(start, min(some.stop, blocks.stop)) - blocks.start)
