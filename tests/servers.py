"""Real servers for tests: `corolla serve` as a process of its own, always ended."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

import psutil

from corolla.server.processes import die_with_parent
from corolla.server.stubs import Stub

START_SECONDS = 180.0
STOP_SECONDS = 40.0


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


class RunningServer:
    """`corolla serve` for a repository on free ports of 127.0.0.1; a context manager.

    `flags` are further flags of `corolla serve` and of tritonserver. Raises AssertionError with the log when it does
    not get ready.
    """

    def __init__(self, repository: Path, *flags: str, backends: Path | None = None, env: dict[str, str] | None = None):
        self._folder = tempfile.TemporaryDirectory(prefix="corolla-test-")
        self._log_path = Path(self._folder.name) / "server.log"
        self._ready_path = Path(self._folder.name) / "ready.json"
        command = [Path(sys.prefix) / "bin" / "corolla", "serve", repository]
        command += ["--http-port=0", "--grpc-port=0", "--metrics-port=0", f"--ready-file={self._ready_path}"]
        command += [f"--backends={backends}"] if backends else []
        with self._log_path.open("w") as log:
            self.process = subprocess.Popen(
                [*map(str, command), *flags],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                preexec_fn=die_with_parent(),
            )
        try:
            self.wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> "RunningServer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            print(self.log)  # pytest shows it with the failure
        self.stop()

    def wait_until_ready(self, other_than: int | None = None, timeout: float = START_SECONDS) -> None:
        """Waits until a tritonserver serves, one with another process id than `other_than`."""
        deadline = time.monotonic() + timeout
        while not self._ready_path.exists() or self.pid == other_than:
            assert self.process.poll() is None, f"corolla serve ended with {self.process.returncode}:\n{self.log}"
            assert time.monotonic() < deadline, f"not ready after {timeout} s:\n{self.log}"
            time.sleep(0.02)

    @property
    def http(self) -> str:
        """host:port"""
        return str(self._ready["http"])

    @property
    def grpc(self) -> str:
        """host:port"""
        return str(self._ready["grpc"])

    @property
    def metrics(self) -> str:
        """host:port"""
        return str(self._ready["metrics"])

    @property
    def pid(self) -> int:
        """Process id of the tritonserver that serves now."""
        return int(self._ready["pid"])

    @property
    def run_directory(self) -> Path:
        return Path(self._ready["run_directory"])

    @property
    def log(self) -> str:
        """All output so far."""
        return self._log_path.read_text() if self._log_path.exists() else self._final_log

    def stubs(self) -> list[Stub]:
        """The running stubs of all models."""
        found = [Stub.of(child.pid) for child in psutil.Process(self.pid).children()]
        return [stub for stub in found if stub is not None]

    def stub_pids(self, model: str) -> list[int]:
        """Process ids of the model's running stubs."""
        return [stub.process.pid for stub in self.stubs() if stub.model == model]

    def wait_for_log(self, text: str, timeout: float = 20.0, count: int = 1) -> None:
        """Waits until `text` has come `count` times."""
        deadline = time.monotonic() + timeout
        while self.log.count(text) < count:
            assert time.monotonic() < deadline, f"{text!r} does not come {count} times:\n{self.log}"
            time.sleep(0.02)

    def stop(self) -> int:
        """Ends the server and returns the exit status of `corolla serve`."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
        status = self.process.wait()
        if self._log_path.exists():
            self._final_log = self.log
            self._folder.cleanup()
        return status

    @property
    def _ready(self) -> dict[str, object]:
        content: dict[str, object] = json.loads(self._ready_path.read_text())
        return content
