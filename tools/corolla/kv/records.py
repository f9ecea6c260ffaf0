"""What every step reads and writes about sessions: small arrays in shared memory, no SQL."""

import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from corolla.kv.layout import KVLayout
from corolla.kv.run_directory import USED
from corolla.kv.shared_memory import map_array

CLOSED = 0


class SessionRecords:
    """One record per session that can exist (as many as pages), the same memory in every process.

    - `epochs` [records] int64: CLOSED, or the number of the session that holds the record now; numbers are
      never used twice, so a process that remembers one notices when the session has ended.
    - `used` [records] int64: nanoseconds on CLOCK_BOOTTIME at the last step.
    - `lengths` [records, blocks] int32: cached positions, per block.
    - `marks` [records, blocks, 2] int64: who made the last step of a block (a number drawn by each process)
      and the signature of its reordering, 0 for a step without one.
    """

    def __init__(self, directory: Path, layout: KVLayout) -> None:
        records, blocks = layout.pages, layout.blocks
        self.epochs: NDArray[np.int64] = map_array(directory / "epochs", (records,), np.dtype(np.int64))
        self.used: NDArray[np.int64] = map_array(directory / USED, (records,), np.dtype(np.int64))
        self.lengths: NDArray[np.int32] = map_array(directory / "lengths", (records, blocks), np.dtype(np.int32))
        self.marks: NDArray[np.int64] = map_array(directory / "marks", (records, blocks, 2), np.dtype(np.int64))


def now_ns() -> int:
    """Nanoseconds since boot, the same clock in every process."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)
