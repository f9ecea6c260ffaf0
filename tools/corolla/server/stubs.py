"""The stubs of a tritonserver: the processes that its Python models run in, one per model instance."""

import os
import selectors
import time
from dataclasses import dataclass
from pathlib import Path

from corolla.processes import ProcessIdentity
from corolla.server.checks import SHARED_MEMORY
from corolla.server.processes import zombie_exit

_PROGRAM = "triton_python_backend_stub"
_GRACE_SECONDS = 0.1
"""How long tritonserver may take to wait for a stub that it has told to end."""


@dataclass(frozen=True)
class Stub:
    """One stub, as its command line tells."""

    process: ProcessIdentity
    model: str
    instance: str
    region: Path
    """The file in /dev/shm over which it talks with tritonserver."""

    @classmethod
    def of(cls, pid: int) -> "Stub | None":
        """The stub with this process id, or None if the process is none, or not yet."""
        try:
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if len(words) < 9 or Path(words[0]).name != _PROGRAM:
                return None
            model = Path(words[1]).parents[1].name  # <repository>/<model>/<version>/model.py
            return cls(ProcessIdentity.of(pid), model, words[8], SHARED_MEMORY / words[2])
        except (OSError, IndexError):
            return None


@dataclass(frozen=True)
class Death:
    """A stub that died while its tritonserver goes on as if it lived; `cause` as in "was killed by SIGKILL"."""

    stub: Stub
    cause: str
    time: float
    """As time.monotonic() tells it."""


class StubWatch:
    """Follows the stubs of one tritonserver; for use by one thread, but for `wake`."""

    def __init__(self, server_pid: int, wake: int) -> None:
        """`wake`: an eventfd that ends `wait` early when written to."""
        self._server_pid = server_pid
        self._wake = wake
        self._selector = selectors.DefaultSelector()
        self._selector.register(wake, selectors.EVENT_READ)
        self._server = os.pidfd_open(server_pid)
        self._selector.register(self._server, selectors.EVENT_READ)
        self._others: set[int] = set()
        self._live: dict[int, tuple[int, Stub]] = {}
        self._ended: list[tuple[Stub, float]] = []
        self.seen: list[Stub] = []
        """Every stub there ever was, in the order of their appearance."""

    def close(self) -> None:
        for descriptor, _ in self._live.values():
            os.close(descriptor)
        os.close(self._server)
        self._selector.close()

    def wait(self, timeout: float) -> None:
        """Returns when a stub or tritonserver ends, when woken, or after `timeout` seconds; then looks around."""
        for key, _ in self._selector.select(timeout):
            if key.fd == self._wake:
                os.eventfd_read(self._wake)
            elif key.fd == self._server:
                self._selector.unregister(self._server)
            else:
                self._forget(key.data)
        self._discover()

    def live(self) -> list[Stub]:
        """The stubs that run."""
        return [stub for _, stub in self._live.values()]

    def serves(self, stub: Stub) -> bool:
        """Whether a stub runs for the same instance of the same model."""
        return any((other.model, other.instance) == (stub.model, stub.instance) for other in self.live())

    def unsettled(self) -> bool:
        """Whether a stub has just ended and it is not yet clear why."""
        return bool(self._ended)

    def deaths(self) -> list[Death]:
        """The stubs that ended unbidden since the last call: zombies, as tritonserver waits only for those it ended."""
        now = time.monotonic()
        settled = [(stub, ended) for stub, ended in self._ended if now - ended >= _GRACE_SECONDS]
        self._ended = [(stub, ended) for stub, ended in self._ended if now - ended < _GRACE_SECONDS]
        causes = [(stub, zombie_exit(stub.process.pid), ended) for stub, ended in settled]
        return [Death(stub, cause, ended) for stub, cause, ended in causes if cause is not None]

    def _forget(self, pid: int) -> None:
        descriptor, stub = self._live.pop(pid)
        self._selector.unregister(descriptor)
        os.close(descriptor)
        self._ended.append((stub, time.monotonic()))

    def _discover(self) -> None:
        pids = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        self._others &= pids
        for pid in pids - self._others - self._live.keys():
            if _parent(pid) != self._server_pid:
                self._others.add(pid)
                continue
            stub = Stub.of(pid)
            if stub is None:  # about to become one, or a zombie
                continue
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            self._live[pid] = (descriptor, stub)
            self.seen.append(stub)
            self._selector.register(descriptor, selectors.EVENT_READ, pid)


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None
