"""Keeps a server running: restarts tritonserver when it dies and reloads models whose stubs die."""

import logging
import os
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from corolla.errors import CorollaError
from corolla.server.checks import require_checks
from corolla.server.drain import Drain
from corolla.server.endpoints import Endpoints, choose_endpoints
from corolla.server.installation import Installation, find_backends
from corolla.server.options import ServerOptions
from corolla.server.recovery import Recovery
from corolla.server.run_directory import RunDirectory, remove_stale_run_directories
from corolla.server.stubs import Death
from corolla.server.triton_server import TritonServer
from corolla.server.undertaker import watch_over

MAX_RESTARTS = 5
"""So often may tritonserver be started again within RESTART_WINDOW_SECONDS."""
RESTART_WINDOW_SECONDS = 60.0

_IDLE_POLL_SECONDS = 0.25
_BUSY_POLL_SECONDS = 0.05
_PATIENT_DEATHS = 10
_MAX_RELOAD_DELAY_SECONDS = 30.0

_LOG = logging.getLogger("corolla.server")


class ServerFailedError(CorollaError):
    """The server could not be started or kept running; the message holds what its log says."""


@dataclass(frozen=True)
class ReadyServer:
    """A server that answers."""

    endpoints: Endpoints
    pid: int
    """Process id of tritonserver."""
    run_directory: Path


class Supervisor:
    """One supervised server. `run` serves until another thread or a signal handler calls `stop`."""

    def __init__(
        self,
        options: ServerOptions,
        on_ready: Callable[[ReadyServer], None] = lambda ready: None,
        sink: TextIO = sys.stderr,
        on_down: Callable[[bool], None] = lambda stopping: None,
    ) -> None:
        """`on_ready` is called at each start, `sink` gets the output of tritonserver and its models.

        `on_down` is called after each start: with True when it is to stop, before sessions are waited for, with False
        when it died.
        """
        self._options = options
        self._on_ready = on_ready
        self._on_down = on_down
        self._sink = sink
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._change: Callable[[], Path] | None = None
        self._leaving = threading.Event()
        self._ending = threading.Event()
        self._hurry = threading.Event()
        self._drain: Drain | None = None
        self._served = False

    @property
    def repository(self) -> Path:
        """What is served."""
        return self._options.repository

    def stop(self) -> None:
        """Ends `run` when the sessions in use have ended or have had their time; called again, at once."""
        if self._ending.is_set():
            self._hurry.set()
        self._ending.set()
        self._leave()

    def change(self, write: Callable[[], Path]) -> None:
        """Lets sessions end as `stop` does, and serves the repository that `write` gives when nothing is served."""
        self._change = write
        self._leave()

    def _leave(self) -> None:
        self._leaving.set()
        os.eventfd_write(self._wake, 1)

    def run(self) -> None:
        """Serves until stopped, and leaves nothing behind.

        EnvironmentProblemError when the machine is not fit for it, ServerFailedError when the server does not start or
        does not stay up.
        """
        require_checks(self._options.min_shm_bytes)
        installation = Installation.find()
        backends = self._options.backends or find_backends()
        for path in remove_stale_run_directories():
            _LOG.info("removed %s, left behind by a server that was killed", path)
        endpoints = choose_endpoints(self._options)
        directory = RunDirectory(self._options.run_directory)
        watch_over(directory.path)
        restarts: deque[float] = deque(maxlen=MAX_RESTARTS)
        try:
            while True:
                with TritonServer(
                    self._options, endpoints, installation, backends, directory, self._sink, self._wake
                ) as server:
                    reason = self._serve(server, directory)
                if self._ending.is_set():
                    return
                if reason is None:
                    self._make_change(directory)
                    continue
                now = time.monotonic()
                if len(restarts) == MAX_RESTARTS and now - restarts[0] < RESTART_WINDOW_SECONDS:
                    raise ServerFailedError(
                        f"tritonserver {reason}; not starting it again, as that was done {MAX_RESTARTS} times within "
                        f"{RESTART_WINDOW_SECONDS:.0f} s"
                    )
                restarts.append(now)
                _LOG.error("tritonserver %s; starting it again", reason)
                directory.clear()
        finally:
            directory.remove()

    def _make_change(self, directory: RunDirectory) -> None:
        """Between two tritonservers; what was served before is served again when it fails."""
        directory.clear()
        change, self._change, self._drain = self._change, None, None
        self._leaving.clear()
        if self._ending.is_set():
            self._leaving.set()
        elif change is not None:
            try:
                self._options = replace(self._options, repository=change())
            except (CorollaError, OSError) as error:
                _LOG.error("going on with %s: %s", self._options.repository, error)

    def _serve(self, server: TritonServer, directory: RunDirectory) -> str | None:
        """Serves with one tritonserver; returns why another is needed, or None when it has been left."""
        started = server.wait_until_started(self._leaving)
        if started:
            if not server.http.is_ready():
                unavailable = [name for name, state in server.http.model_states().items() if state != "READY"]
                _LOG.warning("these models are not available: %s", ", ".join(sorted(unavailable)))
            self._served = True
            self._on_ready(ReadyServer(server.endpoints, server.pid, directory.path))
            reason = _Watch(server, self._wake, self._hurry, lambda: self._is_drained(directory)).run()
            if reason is not None:
                self._on_down(False)
        if self._leaving.is_set():
            if started:
                server.stop(self._hurry)
            return None
        if not started:
            reason = f"{server.ending()} before it was ready:\n  " + "\n  ".join(server.log.failures())
            if not self._served:
                raise ServerFailedError(f"tritonserver {reason}")
        return reason

    def _is_drained(self, directory: RunDirectory) -> bool:
        """Is tritonserver to be stopped now?"""
        if not self._leaving.is_set():
            return False
        if self._drain is None:
            self._on_down(True)
            self._drain = Drain(directory.path, self._options.drain_timeout)
        return self._drain.over()


class _Watch:
    """Watches one tritonserver that answers, and recovers its models."""

    def __init__(
        self, server: TritonServer, wake: int, hurry: threading.Event, is_drained: Callable[[], bool]
    ) -> None:
        """Ends at once with `hurry`, and when the server `is_drained`."""
        self._server = server
        self._wake = wake
        self._hurry = hurry
        self._is_drained = is_drained
        self._over = threading.Event()
        endpoints = server.endpoints
        self._client_ports = [endpoint.port for endpoint in (endpoints.http, endpoints.grpc) if endpoint]
        self._deaths: list[Death] = []
        self._history: defaultdict[str, deque[float]] = defaultdict(deque)
        self._recovering: set[str] = set()
        self._failure: str | None = None

    def run(self) -> str | None:
        """Returns why tritonserver must be started again, or None when it is to be stopped."""
        try:
            while not self._hurry.is_set() and not self._is_drained():
                reason = self._turn()
                if reason is not None:
                    return reason
            return None
        finally:
            self._over.set()

    def _turn(self) -> str | None:
        busy = self._deaths or self._recovering or self._server.stubs.unsettled()
        self._server.watch(_BUSY_POLL_SECONDS if busy else _IDLE_POLL_SECONDS)
        ending = self._server.ending()
        if ending or self._failure:
            return ending or f"has to be restarted: {self._failure}"
        for death in self._server.stubs.deaths():
            stub = death.stub
            named = f"model {stub.model} ({stub.instance}, process {stub.process.pid})"
            _LOG.error("the stub of %s %s", named, death.cause)
            self._deaths.append(death)
        if self._deaths:
            self._recover_models()
        return None

    def _recover_models(self) -> None:
        try:
            states = self._server.http.model_states()
        except (OSError, CorollaError):
            return  # tritonserver is ending, or asked again in a moment
        waiting = []
        for death in self._deaths:
            model = death.stub.model
            if model in self._recovering or states.get(model) in ("LOADING", "UNLOADING"):
                waiting.append(death)
            elif states.get(model) == "READY" and not self._server.stubs.serves(death.stub):
                self._recovering.add(model)
                threading.Thread(target=self._recover, args=(death,), daemon=True).start()
        self._deaths = waiting

    def _recover(self, death: Death) -> None:
        with self._restart_if_impossible():
            recovery = Recovery(self._server.http, self._server.pid, self._client_ports, death)
            recovery.unload()
            threading.Thread(target=self._end_hanging_streams, args=(recovery,), daemon=True).start()
            self._over.wait(self._delay(death.stub.model))
            recovery.load(self._over)
        self._recovering.discard(death.stub.model)

    def _end_hanging_streams(self, recovery: Recovery) -> None:
        with self._restart_if_impossible():
            recovery.end_hanging_streams(self._over)

    @contextmanager
    def _restart_if_impossible(self) -> Iterator[None]:
        try:
            yield
        except (CorollaError, OSError) as error:
            self._failure = str(error)
            os.eventfd_write(self._wake, 1)

    def _delay(self, model: str) -> float:
        """Seconds to wait before the model is loaded again: none, unless it keeps dying."""
        now = time.monotonic()
        history = self._history[model]
        history.append(now)
        while history[0] < now - RESTART_WINDOW_SECONDS:
            history.popleft()
        excess = len(history) - _PATIENT_DEATHS
        return min(2.0 ** (excess - 1), _MAX_RELOAD_DELAY_SECONDS) if excess > 0 else 0.0
