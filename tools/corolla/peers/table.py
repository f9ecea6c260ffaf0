"""Servers as people read them."""

from collections.abc import Sequence
from itertools import groupby

from corolla.peers.record import PeerRecord

_COLUMNS = ("server", "state", "blocks", "address", "weights", "tok/s", "free tokens", "text", "adapters", "version")


def peer_table(peers: Sequence[PeerRecord]) -> str:
    """One table per model and revision, nothing without servers; tok/s are those of single steps through one block."""

    def model(peer: PeerRecord) -> tuple[str, str]:
        return peer.model, peer.revision

    tables = [_table(*key, list(group)) for key, group in groupby(sorted(peers, key=model), model)]
    return "\n\n".join(tables)


def _table(model: str, revision: str, peers: list[PeerRecord]) -> str:
    rows = [_COLUMNS, *map(_row, sorted(peers, key=lambda peer: (peer.start, peer.end, peer.peer_id)))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([f"{model} {revision}: {len(peers)} server{'s' if len(peers) != 1 else ''}", *lines])


def _row(peer: PeerRecord) -> tuple[str, ...]:
    return (
        peer.peer_id,
        peer.state,
        f"{peer.start}:{peer.end}" if peer.blocks else "none",
        peer.address or "-",
        peer.dtype if peer.quant == "none" else f"{peer.quant} and {peer.dtype}",
        f"{peer.throughput.inference:.0f}",
        f"{peer.free_tokens} of {peer.total_tokens}",
        "yes" if peer.generates else "no",
        ", ".join(peer.adapters) or "-",
        peer.version or "-",
    )
