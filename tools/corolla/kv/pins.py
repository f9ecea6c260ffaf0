"""Pins: who is using a session's pages right now, told by the kernel, so that a dead process holds none."""

import fcntl
import os
import struct
from collections import defaultdict
from pathlib import Path
from threading import Lock

_FLOCK = struct.Struct("hhqqi")  # struct flock: l_type, l_whence, l_start, l_len, l_pid


class RecordPins:
    """Shared or exclusive locks on single records, one byte of a file each (open file description locks).

    A step holds its records shared. Whoever frees pages needs the record exclusively for a moment, so pages
    are never given to another session while a step that began before the end of the old one still runs.
    """

    def __init__(self, file: Path) -> None:
        self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._holders: defaultdict[int, int] = defaultdict(int)
        self._guard = Lock()

    def acquire(self, record: int) -> None:
        """Takes one shared pin; waits while another process frees the record, which takes microseconds."""
        with self._guard:
            if not self._holders[record]:
                self._lock(fcntl.F_OFD_SETLKW, fcntl.F_RDLCK, record)
            self._holders[record] += 1

    def release(self, record: int) -> None:
        """Gives one shared pin back."""
        with self._guard:
            self._holders[record] -= 1
            if not self._holders[record]:
                del self._holders[record]
                self._lock(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, record)

    def is_free(self, record: int) -> bool:
        """Whether no step of any process holds the record; later pins find the session closed."""
        with self._guard:
            if record in self._holders:
                return False
            try:
                self._lock(fcntl.F_OFD_SETLK, fcntl.F_WRLCK, record)
            except BlockingIOError:
                return False
            self._lock(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, record)
            return True

    def close(self) -> None:
        """Gives all pins back; the object is of no use any more."""
        os.close(self._descriptor)

    def _lock(self, command: int, kind: int, record: int) -> None:
        fcntl.fcntl(self._descriptor, command, _FLOCK.pack(kind, os.SEEK_SET, record, 1, 0))
