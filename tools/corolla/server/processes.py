"""Small things about processes that the standard library lacks."""

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from corolla.processes import ProcessIdentity

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


def die_with_parent(death_signal: signal.Signals = signal.SIGKILL) -> Callable[[], None]:
    """A `preexec_fn` that has the kernel send the signal to the child when the thread that starts it ends.

    The kernel watches the thread and not its process: start the child from a thread that outlives it.
    """
    parent = os.getpid()

    def arrange() -> None:
        if _LIBC.prctl(_PR_SET_PDEATHSIG, death_signal) != 0 or os.getppid() != parent:
            os._exit(1)

    return arrange


def zombie_exit(pid: int) -> str | None:
    """How a process ended that its parent has not waited for, such as "was killed by SIGKILL"; None if no zombie."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[0] == "Z":
            code = os.waitstatus_to_exitcode(int(fields[49]))
            return f"exited with status {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
    return None


def kill_and_wait(processes: Iterable[ProcessIdentity], timeout: float = 10.0) -> None:
    """Kills those that still run and waits until they are gone."""
    left = [process for process in processes if process.is_alive()]
    for process in left:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + timeout
    while any(process.is_alive() for process in left) and time.monotonic() < deadline:
        time.sleep(0.02)
