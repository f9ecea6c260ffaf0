"""The data types of sessions."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

DEFAULT_IDLE_TIMEOUT = 300.0


@dataclass(frozen=True)
class Session:
    """One open session as a process sees it.

    `record` is its row in the shared records, `epoch` the number that record must still show, `max_length` the
    positions it may use, `pages` int32 its pages in order, `slots` [reserved positions] int64 where in the arena
    each position lies; `contiguous` tells that these are neighbours; `adapter` is the number of its adapter.
    """

    id: str
    record: int
    epoch: int
    max_length: int
    pages: NDArray[np.int32]
    slots: NDArray[np.int64]
    contiguous: bool
    adapter: int = 0


@dataclass(frozen=True)
class OpenRequest:
    """What a caller wants reserved.

    `timeout` is how long to wait for room, in seconds; lower `priority` is served first, then earlier arrival;
    the session ends after `idle_timeout` seconds without a step. All its steps are adapted by the named `adapter`.
    """

    max_length: int
    timeout: float = 0.0
    priority: int = 0
    idle_timeout: float = DEFAULT_IDLE_TIMEOUT
    adapter: str | None = None


@dataclass(frozen=True)
class CacheStatus:
    """Tokens are positions in whole pages: `free_tokens` falls by a session's `reserved_tokens` when it opens."""

    total_tokens: int
    free_tokens: int
    open_sessions: int
    waiting: int


@dataclass(frozen=True)
class SessionStatus:
    """One session: `length` is the number of positions cached in every hosted block that was stepped."""

    id: str
    max_length: int
    reserved_tokens: int
    length: int
    idle_seconds: float
    idle_timeout: float
    adapter: str
