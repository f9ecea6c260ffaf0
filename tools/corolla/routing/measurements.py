"""What an asker has seen of peers: how far they are and how fast they compute."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock

ROUND_TRIPS_KEPT = 16
"""Of these the shortest counts: whatever disturbs a measurement makes it longer."""
STEP_WEIGHT = 0.2
"""Of the newest step in the moving average: it follows a change within some ten steps, and not a single slow one."""
HALF_LIFE_SECONDS = 60.0
"""After this time without a step, what was seen and what the peer announces count the same. So a peer that was avoided
because it was busy is tried again."""


@dataclass
class _Seen:
    round_trips: deque[float] = field(default_factory=lambda: deque(maxlen=ROUND_TRIPS_KEPT))
    block_seconds: float | None = None
    last_step: float = 0.0


class Measurements:
    """May be used by several threads. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._seen: dict[str, _Seen] = {}

    def saw_round_trip(self, peer_id: str, seconds: float) -> None:
        """Reports how long a small call took, or a step without what the server says it needed for it."""
        with self._lock:
            self._seen.setdefault(peer_id, _Seen()).round_trips.append(seconds)

    def saw_step(self, peer_id: str, blocks: int, seconds: float) -> None:
        """Reports that a step of one token through so many blocks took `seconds` there, the wait for others included.

        `peer_id` LOCAL stands for the asking process.
        """
        with self._lock:
            seen = self._seen.setdefault(peer_id, _Seen())
            each = seconds / blocks
            weight = 1.0 if seen.block_seconds is None else STEP_WEIGHT
            seen.block_seconds = weight * each + (1 - weight) * (seen.block_seconds or 0.0)
            seen.last_step = self._clock()

    def round_trip(self, peer_id: str) -> float | None:
        """Seconds to a peer and back; None if that was never measured."""
        with self._lock:
            seen = self._seen.get(peer_id)
            return min(seen.round_trips) if seen is not None and seen.round_trips else None

    def block_seconds(self, peer_id: str, announced: float) -> float:
        """Expected seconds of a step of one token per block; `announced` is what the peer itself leads to expect."""
        with self._lock:
            seen = self._seen.get(peer_id)
            if seen is None or seen.block_seconds is None:
                return announced
            trust = 0.5 ** ((self._clock() - seen.last_step) / HALF_LIFE_SECONDS)
            return trust * seen.block_seconds + (1 - trust) * announced
