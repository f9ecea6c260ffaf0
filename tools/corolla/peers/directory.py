"""The servers of one model as last seen: a copy that outlives the registry's absence."""

import logging
import threading
import time
from collections.abc import Sequence

from corolla.peers.record import PeerRecord, Peers
from corolla.peers.registry import DEFAULT_TTL, RegistryAwayError, open_registry, watch

FIRST_ANSWER_SECONDS = 5.0
"""How long the first caller waits for the registry."""

_LOG = logging.getLogger("corolla.peers")


class PeerDirectory:
    """All records of one model and revision, in any state, kept up to date by a thread.

    While the registry is away they stay as they are. When it is back, those that it does not know stay for one TTL
    more, in which servers that are alive register again.
    """

    def __init__(self, registry_url: str, model: str, revision: str, ttl: float = DEFAULT_TTL) -> None:
        """Errors as of `open_registry`; a registry that is away is none."""
        self._revision = revision
        self._ttl = ttl
        self._changed = threading.Condition()
        self._answered = False
        self._away = True
        self._listed: dict[str, PeerRecord] = {}
        self._kept: dict[str, PeerRecord] = {}
        self._keep_until = 0.0
        self._registry = open_registry(registry_url, ttl)
        self._watch = watch(self._registry, model, self._on_change, self._on_away)

    def peers(self) -> Peers:
        """A copy. Only the first call may wait, up to FIRST_ANSWER_SECONDS; empty if the registry never answered."""
        with self._changed:
            if not self._answered:
                self._changed.wait_for(lambda: self._answered, FIRST_ANSWER_SECONDS)
                self._answered = True
            return self._peers()

    def wait_for_change(self, timeout: float, seen: Sequence[PeerRecord] | None = None) -> bool:
        """Waits up to `timeout` seconds until the peers differ from those `seen`, by default those of now."""
        deadline = time.monotonic() + timeout
        with self._changed:
            before = self._peers() if seen is None else list(seen)
            while self._peers() == before:
                now = time.monotonic()
                if now >= deadline:
                    return False
                until = min(deadline, self._keep_until) if self._kept and self._keep_until > now else deadline
                self._changed.wait(until - now)
        return True

    @property
    def away(self) -> bool:
        """Whether the registry does not answer now."""
        return self._away

    def close(self) -> None:
        """Ends the thread; the peers stay as they are."""
        self._watch.close()
        self._registry.close()

    def _peers(self) -> Peers:
        if not self._away and time.monotonic() >= self._keep_until:
            self._kept = {}
        return [record for _, record in sorted((self._kept | self._listed).items())]

    def _on_change(self, peers: Peers) -> None:
        with self._changed:
            if self._away:
                self._kept = {record.peer_id: record for record in self._peers()}
                self._keep_until = time.monotonic() + self._ttl
                self._away = False
            self._listed = {record.peer_id: record for record in peers if record.revision == self._revision}
            self._kept = {peer_id: record for peer_id, record in self._kept.items() if peer_id not in self._listed}
            self._answered = True
            self._changed.notify_all()

    def _on_away(self, error: RegistryAwayError) -> None:
        if not (self._away and self._answered):
            _LOG.warning("%s; going on with the %d servers last seen", error, len(self._listed))
        with self._changed:
            self._away = True
            self._answered = True
            self._changed.notify_all()
