"""One run of tritonserver, from its start to the last trace of it."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from corolla.kv.run_directory import ENVIRONMENT_VARIABLE
from corolla.processes import ProcessIdentity
from corolla.server.endpoints import Endpoints
from corolla.server.installation import Installation
from corolla.server.log import ServerLog
from corolla.server.options import EXIT_TIMEOUT_SECONDS, ServerOptions
from corolla.server.processes import die_with_parent, kill_and_wait, zombie_exit
from corolla.server.run_directory import RunDirectory, assemble_backends
from corolla.server.stubs import StubWatch
from corolla.server.triton_http import TritonHttp
from corolla.threads import let_idle_threads_sleep

_STOP_TIMEOUT_SECONDS = EXIT_TIMEOUT_SECONDS + 5.0
_ORPHANED_SECONDS = 1.5
_POLL_SECONDS = 0.1


class TritonServer:
    """A tritonserver of this process: it dies with the thread that made it. A context manager that always ends it."""

    def __init__(
        self,
        options: ServerOptions,
        endpoints: Endpoints,
        installation: Installation,
        backends: Path,
        directory: RunDirectory,
        sink: TextIO,
        wake: int,
    ) -> None:
        """`sink` gets its output; `wake` is the eventfd of `StubWatch`."""
        self.endpoints = endpoints
        self.http = TritonHttp(endpoints.http, options.http_headers())
        self._directory = directory
        self._recorded = 0
        backend_directory, libraries = assemble_backends(directory.assembly, installation, backends)
        services = {"http": endpoints.http, "grpc": endpoints.grpc, "metrics": endpoints.metrics}
        ports = {name: endpoint.port for name, endpoint in services.items() if endpoint}
        self._process = subprocess.Popen(
            [installation.tritonserver, *options.tritonserver_flags(backend_directory, ports)],
            env=_environment(installation, libraries, directory.path),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # an interrupt from the terminal is for this process only
            preexec_fn=die_with_parent(),
        )
        assert self._process.stdout is not None
        self.log = ServerLog(self._process.stdout, sink)
        self.stubs = StubWatch(self._process.pid, wake)

    def __enter__(self) -> "TritonServer":
        return self

    def __exit__(self, *_: object) -> None:
        self._remove_traces()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ending(self) -> str | None:
        """How it ended, such as "was killed by SIGKILL"; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        return f"exited with status {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"

    def watch(self, timeout: float) -> None:
        """Waits as `StubWatch.wait` does and keeps the record of processes."""
        self.stubs.wait(timeout)
        if len(self.stubs.seen) != self._recorded:
            self._recorded = len(self.stubs.seen)
            processes = [stub.process for stub in self.stubs.live()]
            with suppress(ProcessLookupError):
                processes.append(ProcessIdentity.of(self.pid))
            self._directory.record(processes, [stub.region for stub in self.stubs.seen])

    def wait_until_started(self, stopping: threading.Event) -> bool:
        """Waits until all services answer; False if it ends or is to be stopped before."""
        while self.ending() is None and not stopping.is_set():
            metrics = self.endpoints.metrics
            if self.http.is_live() and (metrics is None or metrics.accepts()):
                return True
            self.watch(_POLL_SECONDS)
        return False

    def stop(self, hurry: threading.Event) -> None:
        """Lets it end: it answers what is in flight and ends its models. `hurry` ends the patience."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        now = time.monotonic()
        deadline, last_live = now + _STOP_TIMEOUT_SECONDS, now
        while self.ending() is None and time.monotonic() < deadline and not hurry.is_set():
            self.watch(_POLL_SECONDS)
            if self.stubs.live() or not any(zombie_exit(stub.process.pid) for stub in self.stubs.seen):
                last_live = time.monotonic()
            if time.monotonic() - last_live > _ORPHANED_SECONDS:
                return  # it waits only for requests of dead stubs, which never end

    def _remove_traces(self) -> None:
        """Ends what is left of it and removes the shared memory of its stubs."""
        self.watch(0)
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        kill_and_wait(stub.process for stub in self.stubs.seen)
        for stub in self.stubs.seen:
            stub.region.unlink(missing_ok=True)
        self.stubs.close()


def _environment(installation: Installation, libraries: Path, run_directory: Path) -> dict[str, str]:
    """This process's environment with what tritonserver and its stubs need.

    Stubs find the virtual environment through PATH, and libpython and the wheel's libraries on the library path.
    """
    environment = dict(os.environ)
    let_idle_threads_sleep(environment)
    environment.setdefault("PYTHONUNBUFFERED", "1")
    environment[ENVIRONMENT_VARIABLE] = str(run_directory)
    for variable, folders in {
        "PATH": [Path(sys.prefix) / "bin"],
        "LD_LIBRARY_PATH": [libraries, installation.wheel_libraries],
    }.items():
        present = [environment[variable]] if environment.get(variable) else []
        environment[variable] = os.pathsep.join([*map(str, folders), *present])
    return environment
