"""What every step reads and writes about sessions: small arrays in shared memory, no SQL."""

import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from corolla.kv.layout import KVLayout
from corolla.kv.shared_memory import create_reserved

CLOSED = 0


class SessionRecords:
    """One record per session that can exist (as many as pages), the same memory in every process.

    - `epochs` [records] int64: CLOSED, or the number of the session that holds the record now; numbers are
      never used twice, so a process that remembers one notices when the session has ended.
    - `used` [records] int64: nanoseconds on CLOCK_BOOTTIME at the last step.
    - `lengths` [records, blocks] int32: cached positions, per block.
    """

    def __init__(self, directory: Path, layout: KVLayout) -> None:
        self.epochs: NDArray[np.int64] = _map(directory / "epochs", (layout.pages,), np.dtype(np.int64))
        self.used: NDArray[np.int64] = _map(directory / "used", (layout.pages,), np.dtype(np.int64))
        self.lengths: NDArray[np.int32] = _map(
            directory / "lengths", (layout.pages, layout.blocks), np.dtype(np.int32)
        )


def now_ns() -> int:
    """Nanoseconds since boot, the same clock in every process."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def _map(file: Path, shape: tuple[int, ...], dtype: np.dtype) -> NDArray:
    create_reserved(file, int(np.prod(shape)) * dtype.itemsize)
    return np.memmap(file, dtype=dtype, mode="r+", shape=shape).view(np.ndarray)
