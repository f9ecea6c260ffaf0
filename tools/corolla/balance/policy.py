"""When a server looks at the swarm, and how sure it must be before it moves."""

import random
from collections.abc import Mapping

LOOK_SECONDS = 60.0
"""Between looks, on average: some as long as a server takes to load its blocks."""
HESITATION = 1 / 6
"""A look that says move is followed by another, after up to this share of the time between looks: longer than news
takes through the registry."""
NOTICE = 1 / 20
"""The share from the announcement that a server leaves to the last question whether it may: by then, others that wanted
to leave at the same moment know of each other."""


class MovePolicy:
    """Of one server. Times are drawn from `chance`, so that servers do not act together."""

    def __init__(self, peer_id: str, chance: random.Random, period: float = LOOK_SECONDS) -> None:
        """`period` seconds lie between looks, on average."""
        self.notice = NOTICE * period
        self._period = period
        self._peer_id = peer_id
        self._chance = chance
        self._hesitating = False

    def pause(self) -> float:
        """Seconds until the next look."""
        if self._hesitating:
            return self._chance.uniform(0.0, HESITATION * self._period)
        return self._chance.uniform(0.5, 1.5) * self._period

    def look(self, moves: Mapping[str, range]) -> range | None:
        """The blocks to move to at once, if this look, at what `moves_now` says, and the last one agree on a move."""
        target = moves.get(self._peer_id)
        sure = self._hesitating and target is not None
        self._hesitating = target is not None and not sure
        return target if sure else None
