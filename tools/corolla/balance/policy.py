"""When a server looks at the swarm, and how sure it must be before it moves."""

import random
from collections.abc import Mapping

LOOK_SECONDS = 60.0
"""Between looks, on average: some as long as a server takes to load its blocks."""
HESITATION_SECONDS = 10.0
"""A look that says move is followed by another, up to so much later: longer than news takes through the registry."""
NOTICE_SECONDS = 3.0
"""From the announcement that a server leaves to the last question whether it may: by then, others that wanted to leave
at the same moment know of each other."""


class MovePolicy:
    """Of one server. Times are drawn from `chance`, so that servers do not act together."""

    def __init__(self, peer_id: str, chance: random.Random) -> None:
        self._peer_id = peer_id
        self._chance = chance
        self._hesitating = False

    def pause(self) -> float:
        """Seconds until the next look."""
        if self._hesitating:
            return self._chance.uniform(0.0, HESITATION_SECONDS)
        return self._chance.uniform(0.5, 1.5) * LOOK_SECONDS

    def look(self, moves: Mapping[str, range]) -> range | None:
        """The blocks to move to at once, if this look, at what `moves_now` says, and the last one agree on a move."""
        target = moves.get(self._peer_id)
        sure = self._hesitating and target is not None
        self._hesitating = target is not None and not sure
        return target if sure else None
