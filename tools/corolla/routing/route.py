"""Which servers run which blocks, one after the other."""

from dataclasses import dataclass

LOCAL = ""
"""The `peer_id` of a span that the asking process runs itself."""


@dataclass(frozen=True)
class Span:
    """Blocks [start, end) on one server; `address` is host:port of its gRPC endpoint, empty for LOCAL."""

    peer_id: str
    address: str
    start: int
    end: int

    @property
    def blocks(self) -> range:
        """The blocks of the span."""
        return range(self.start, self.end)


Route = tuple[Span, ...]
"""Spans that follow each other and cover the blocks asked for."""
