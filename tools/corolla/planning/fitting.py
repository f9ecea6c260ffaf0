"""How many blocks fit."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Needs:
    """Bytes that a server takes of a device: `block`, `cache` and `adapters` for each block, `ends` once.

    `reserve` is that of a number of blocks, and never falls with it.
    """

    block: int
    cache: int
    adapters: int
    ends: int
    reserve: Callable[[int], int]

    @property
    def each(self) -> int:
        """One block with all that goes with it."""
        return self.block + self.cache + self.adapters

    def total(self, blocks: int) -> int:
        """A whole server of so many blocks."""
        return blocks * self.each + self.ends + self.reserve(blocks)


@dataclass(frozen=True)
class Room:
    """Bytes that a server may take of a device, and bytes of /dev/shm for its cache; None where that is no limit."""

    usable: int
    shared: int | None = None

    def holds(self, needs: Needs, blocks: int) -> bool:
        """Whether so many blocks fit."""
        return needs.total(blocks) <= self.usable and (self.shared is None or blocks * needs.cache <= self.shared)


def blocks_that_fit(needs: Needs, room: Room, most: int) -> int:
    """The largest number of blocks up to `most` that the room holds; 0 if it holds none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if room.holds(needs, middle) else (low, middle - 1)
    return low


def shortage(needs: Needs, room: Room, blocks: int) -> int:
    """Bytes that are missing for so many blocks; 0 if none are."""
    missing = [needs.total(blocks) - room.usable]
    if room.shared is not None:
        missing.append(blocks * needs.cache - room.shared)
    return max(0, *missing)
