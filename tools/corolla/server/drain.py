"""The end of a server, up to the moment when it may be stopped."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from corolla.kv.draining import begin_draining, sessions_in_use

_LOG = logging.getLogger("corolla.server")


class Drain:
    """Of the server with a run directory: no new sessions, and some time for those in use. `clock` gives seconds."""

    def __init__(self, directory: Path, timeout: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._timeout = timeout
        self._clock = clock
        self._deadline = clock() + timeout
        begin_draining(directory)
        self._in_use = sessions_in_use(directory)
        if self._in_use:
            _LOG.info("waiting up to %g s for %d sessions in use", timeout, self._in_use)

    def over(self) -> bool:
        """Have all sessions ended, or have they had their time?"""
        if self._in_use:
            self._in_use = sessions_in_use(self._directory)
            if self._in_use and self._clock() >= self._deadline:
                _LOG.warning("giving up %d sessions that are still in use after %g s", self._in_use, self._timeout)
                return True
        return not self._in_use
