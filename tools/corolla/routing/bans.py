"""Peers that failed are left alone for a while, longer each time."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

FIRST_BAN_SECONDS = 15.0
"""Half the time in which a dead server vanishes from the registry: one that only stumbled is soon tried again."""
LONGEST_BAN_SECONDS = 480.0
"""After five doublings; a server that was repaired is found again within minutes."""


@dataclass(frozen=True)
class _Ban:
    seconds: float
    end: float


class Bans:
    """Who failed, as one asker saw it; may be used by several threads. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._bans: dict[str, _Ban] = {}

    def ban(self, peer_id: str) -> None:
        """Reports a failure. The first ban is short, each later one twice as long as the one before, up to a limit.

        Failures during a ban only start it again: many sessions notice the same accident.
        """
        with self._lock:
            now = self._clock()
            last = self._bans.get(peer_id)
            if last is None:
                seconds = FIRST_BAN_SECONDS
            elif now < last.end:
                seconds = last.seconds
            else:
                seconds = min(2 * last.seconds, LONGEST_BAN_SECONDS)
            self._bans[peer_id] = _Ban(seconds, now + seconds)

    def success(self, peer_id: str) -> None:
        """Reports that the peer works: its ban ends, and the next one will be short."""
        with self._lock:
            self._bans.pop(peer_id, None)

    def banned(self, peer_id: str) -> bool:
        """Is the peer to be left alone now?"""
        return peer_id in self.running()

    def running(self) -> dict[str, float]:
        """The banned peers, and when on the clock their bans end."""
        with self._lock:
            now = self._clock()
            return {peer_id: ban.end for peer_id, ban in self._bans.items() if now < ban.end}
