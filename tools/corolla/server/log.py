"""The output of tritonserver and its models: passed on, and searched for the reason of a failure."""

import re
import threading
from collections import deque
from typing import IO, TextIO

_FAILURES = (
    re.compile(r"failed to load '(?P<model>[^']+)' version \d+: (?P<reason>.*?)\"?$"),
    re.compile(r"Poll failed for model directory '(?P<model>[^']+)': (?P<reason>.*?)\"?$"),
    re.compile(r"^E\d{4} .*?(?P<reason>(?:ensemble|failed to start) .*?)\"?$"),
    re.compile(r"\[libprotobuf ERROR.*?\] (?P<reason>.*)$"),
    re.compile(r"^(?:Error: (?!Failed to initialize NVML)|\S*tritonserver: )(?P<reason>.*)$"),
)
_LAST_LINES = 15


class ServerLog:
    """Copies what is read from `pipe` to `sink`, line by line, in a thread of its own."""

    def __init__(self, pipe: IO[bytes], sink: TextIO) -> None:
        self._pipe = pipe
        self._sink = sink
        self._last: deque[str] = deque(maxlen=_LAST_LINES)
        self._failures: dict[str, str] = {}
        self._thread = threading.Thread(target=self._copy, name="server log", daemon=True)
        self._thread.start()

    def failures(self) -> list[str]:
        """The first error of every model, or the last lines where none is known; call when the server has ended."""
        self._thread.join(timeout=2)
        return list(self._failures.values()) or list(self._last)

    def _copy(self) -> None:
        for raw in self._pipe:
            line = raw.decode(errors="replace")
            self._last.append(line.rstrip())
            self._note_failure(line.rstrip())
            try:
                self._sink.write(line)
                self._sink.flush()
            except (OSError, ValueError):  # the sink is gone; the server must not stand still for it
                continue

    def _note_failure(self, line: str) -> None:
        for pattern in _FAILURES:
            match = pattern.search(line)
            if match:
                model = match.groupdict().get("model")
                reason = match["reason"].replace("\\n", "\n    ").rstrip()
                self._failures.setdefault(model or reason, f"{model}: {reason}" if model else reason)
                return
