"""Tells the registry about this server for as long as it lives."""

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

from corolla.peers.record import PeerRecord
from corolla.peers.registry import PeerIdTakenError, PeerRegistry, RegistryAwayError

RETRY_SECONDS = 1.0
"""Pause after an attempt that the registry did not answer."""
ANNOUNCED_WITHIN_SECONDS = 3.0
"""How long a change of state is waited for."""
FREE_TOKENS_SHARE = 1 / 16
"""Of all tokens: by so much the free ones must have changed to be written."""
ROUND_TRIP_FACTOR = 1.5
"""By so much a round trip must have changed to be written, if it did by ROUND_TRIP_SECONDS as well."""
ROUND_TRIP_SECONDS = 0.002

_LOG = logging.getLogger("corolla.peers")


class Announcer:
    """A thread that gives signs of life every third of the TTL and writes what has changed by something that matters.

    It owns the registry. While that is away it goes on trying.
    """

    def __init__(
        self, registry: PeerRegistry, record: PeerRecord, ttl: float, observe: Callable[[PeerRecord], PeerRecord]
    ) -> None:
        """`observe` brings a record up to date, in this thread."""
        self._registry = registry
        self._record = record
        self._observe = observe
        self._pause = ttl / 3
        self._announced: PeerRecord | None = None
        self._changed = threading.Condition()
        self._wanted, self._done = 1, 0
        self._closing = False
        self._away = False
        self._thread = threading.Thread(target=self._run, name="announcer", daemon=True)
        self._thread.start()

    @property
    def record(self) -> PeerRecord:
        """What is announced, or will be as soon as the registry answers."""
        return self._record

    def update(self, **changes: object) -> bool:
        """Changes fields of the record; whether that was announced within ANNOUNCED_WITHIN_SECONDS."""
        with self._changed:
            self._record = replace(self._record, **changes)  # type: ignore[arg-type]
            self._wanted += 1
            wanted = self._wanted
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._done >= wanted, ANNOUNCED_WITHIN_SECONDS)

    def close(self) -> None:
        """Takes the record back and ends the thread; if the registry is away, the record lives on for one TTL."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        with suppress(RegistryAwayError):
            self._registry.remove(self._record.model, self._record.peer_id)
        self._registry.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closing:
                    return
                wanted, record = self._wanted, self._record
            pause = self._pause if self._announce(record, wanted) else min(RETRY_SECONDS, self._pause)
            with self._changed:
                if self._wanted == wanted and not self._closing:
                    self._changed.wait(pause)

    def _announce(self, record: PeerRecord, number: int) -> bool:
        observed = self._observe(record)
        try:
            if self._announced is not None and is_as_good(self._announced, observed):
                self._registry.keep_alive()
            else:
                self._registry.put(observed)
                self._announced = observed
        except (RegistryAwayError, PeerIdTakenError) as error:
            if not self._away:
                _LOG.warning("%s; trying again", error)
            self._away = True
            return False
        if self._away:
            _LOG.info("registered again as %s", record.peer_id)
        self._away = False
        with self._changed:
            self._done = number
            self._changed.notify_all()
        return True


def is_as_good(announced: PeerRecord, observed: PeerRecord) -> bool:
    """Whether nothing has changed by so much that others should know it."""
    share = abs(announced.free_tokens - observed.free_tokens) / max(observed.total_tokens, 1)
    unchanging = {"free_tokens": 0, "round_trips": {}}
    return (
        share < FREE_TOKENS_SHARE
        and _are_close(announced.round_trips, observed.round_trips)
        and replace(announced, **unchanging) == replace(observed, **unchanging)  # type: ignore[arg-type]
    )


def _are_close(announced: Mapping[str, float], observed: Mapping[str, float]) -> bool:
    if announced.keys() != observed.keys():
        return False
    for peer_id, seconds in observed.items():
        low, high = sorted((announced[peer_id], seconds))
        if high > low * ROUND_TRIP_FACTOR and high - low > ROUND_TRIP_SECONDS:
            return False
    return True
