"""How far it is to other servers, measured now and then by a thread."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from corolla.peers.record import PeerRecord, PeerState

PERIOD_SECONDS = 30.0
CALLS = 3
"""The shortest of so many counts."""
TIMEOUT_SECONDS = 1.0
MOST_PEERS = 16


class RoundTrips:
    """Seconds to those of the `peers` that are likely to come after the blocks that end at `end`, which may change."""

    def __init__(self, peers: Callable[[], Sequence[PeerRecord]], peer_id: str, end: int) -> None:
        self._peers = peers
        self._peer_id = peer_id
        self.end = end
        self._seconds: dict[str, float] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="round-trips", daemon=True)
        self._thread.start()

    def seconds(self) -> Mapping[str, float]:
        """As last measured, by peer id."""
        return self._seconds

    def close(self) -> None:
        """Ends the thread."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            measured: dict[str, float] = {}
            for peer in likely_next(self._peers(), self._peer_id, self.end):
                if self._stopping.is_set():
                    return
                seconds = round_trip(peer.address)
                if seconds is not None:
                    measured[peer.peer_id] = seconds
            self._seconds = measured
            self._stopping.wait(PERIOD_SECONDS if measured else PERIOD_SECONDS / 10)


def likely_next(peers: Sequence[PeerRecord], peer_id: str, end: int) -> list[PeerRecord]:
    """Others that take sessions and host block `end`, up to MOST_PEERS: those that begin there come first."""
    others = [
        peer
        for peer in peers
        if peer.peer_id != peer_id and peer.state is PeerState.ONLINE and end in peer.blocks and peer.address
    ]
    return sorted(others, key=lambda peer: (peer.start != end, peer.peer_id))[:MOST_PEERS]


def round_trip(address: str) -> float | None:
    """Seconds of a gRPC call that does nothing, on a connection that is open; None when there is no answer."""
    with InferenceServerClient(address) as client:
        try:
            client.is_server_live(client_timeout=TIMEOUT_SECONDS)
            return min(_timed(client) for _ in range(CALLS))
        except InferenceServerException:
            return None


def _timed(client: InferenceServerClient) -> float:
    began = time.perf_counter()
    client.is_server_live(client_timeout=TIMEOUT_SECONDS)
    return time.perf_counter() - began
