"""Frees the cache of sessions nobody uses any more."""

import logging
from threading import Event, Thread

from corolla.kv.table import SessionTable

logger = logging.getLogger(__name__)


class Reaper:
    """A thread that frees idle sessions once a second; opening a session frees them too when it needs room."""

    def __init__(self, table: SessionTable, interval: float = 1.0) -> None:
        self._table = table
        self._interval = interval
        self._stopped = Event()
        self._thread = Thread(target=self._run, name="reaper", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            try:
                self._table.reap()
            except Exception:
                logger.exception("idle sessions could not be looked for; trying again")
