"""What a route is asked for."""

from dataclasses import dataclass

from corolla.routing.route import LOCAL


@dataclass(frozen=True)
class RouteQuery:
    """One session that looks for a way through the blocks.

    `max_length` token positions are to be cached on every server of the route, which must have `adapter` unless that is
    empty. `local` blocks can be run by the asking process, whose own server is `peer_id` if it is announced. Other
    servers must be in `allowed`, unless that is None, and not in `blocked`. The input lies at `before` and the output
    is wanted at `after`: LOCAL, or the `peer_id` of a neighbour when a part of a route is replaced.
    """

    max_length: int
    adapter: str = ""
    local: range = range(0)
    peer_id: str = LOCAL
    allowed: frozenset[str] | None = None
    blocked: frozenset[str] = frozenset()
    before: str = LOCAL
    after: str = LOCAL
