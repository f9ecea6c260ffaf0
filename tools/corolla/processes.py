"""Processes that can be told apart even when their numbers are used again."""

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class ProcessIdentity:
    """A process id with its start time in clock ticks since boot, as /proc/<pid>/stat gives it."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> "ProcessIdentity":
        """The process that has this id now; ProcessLookupError if there is none."""
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError) as error:
            raise ProcessLookupError(pid) from error
        if fields[0] == "Z":
            raise ProcessLookupError(pid)
        return cls(pid, int(fields[19]))

    @classmethod
    @cache
    def _of_current(cls, pid: int) -> "ProcessIdentity":
        return cls.of(pid)

    @classmethod
    def current(cls) -> "ProcessIdentity":
        """This process."""
        return cls._of_current(os.getpid())

    @classmethod
    def parse(cls, text: str) -> "ProcessIdentity":
        """The inverse of str()."""
        pid, started = text.split("-")
        return cls(int(pid), int(started))

    def is_alive(self) -> bool:
        """Whether this very process still runs."""
        try:
            return ProcessIdentity.of(self.pid) == self
        except ProcessLookupError:
            return False

    def __str__(self) -> str:
        return f"{self.pid}-{self.started}"
