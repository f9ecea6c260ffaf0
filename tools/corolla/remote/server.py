"""Another server as routes use it: its sessions, and steps through its blocks."""

from collections.abc import Collection
from concurrent.futures import Future
from threading import Lock

import tritonclient.grpc as grpc_client
from tritonclient.utils import InferenceServerException

from corolla.client import flat_input
from corolla.errors import OverloadedError
from corolla.remote.connection import PeerConnection
from corolla.remote.errors import PeerRefusalError, PeerUnreachableError
from corolla.wire.messages import SpanOutput, SpanStep

CALL_SECONDS = 5.0
"""Within which a server that works answers a call about sessions."""
_REFUSALS = ("INVALID_ARGUMENT", "NOT_FOUND")
_FULL = ("no room for max_length", "requests wait already")
"""What servers without room say. UNAVAILABLE alone may come from the connection as well."""


class RemoteServer:
    """`address` is host:port of its gRPC endpoint. It is connected to when it is first needed."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._client = grpc_client.InferenceServerClient(address)
        self._connection = PeerConnection(address)

    def open(self, max_length: int, adapter: str, timeout: float, idle_timeout: float) -> str:
        """See Peer."""
        inputs = [
            flat_input("operation", "BYTES", "open"),
            flat_input("max_length", "INT32", max_length),
            flat_input("timeout", "FP32", timeout),
            flat_input("idle_timeout", "FP32", idle_timeout),
        ]
        if adapter:
            inputs.append(flat_input("adapter", "BYTES", adapter))
        reply = self._call(inputs, timeout + CALL_SECONDS)
        session_id: str = reply.as_numpy("session_id")[0].decode()
        return session_id

    def close_session(self, session_id: str) -> None:
        """See Peer."""
        inputs = [flat_input("operation", "BYTES", "close"), flat_input("session_id", "BYTES", session_id)]
        self._call(inputs, CALL_SECONDS)

    def submit(self, step: SpanStep, timeout: float) -> "Future[SpanOutput]":
        """See Peer."""
        return self._connection.submit(step, timeout)

    @property
    def is_idle(self) -> bool:
        """Whether no step is under way."""
        return not self._connection.outstanding

    def close(self) -> None:
        """Ends the connection."""
        self._connection.close()
        self._client.close()

    def _call(self, inputs: list[grpc_client.InferInput], timeout: float) -> grpc_client.InferResult:
        try:
            return self._client.infer("sessions", inputs, client_timeout=timeout)
        except InferenceServerException as error:
            status = str(error.status()).removeprefix("StatusCode.")
            message = f"{self._address}: {error.message()}"
            if status in _REFUSALS:
                raise PeerRefusalError(self._address, f"{status}: {error.message()}") from error
            if any(text in error.message() for text in _FULL):
                raise OverloadedError(message) from error
            raise PeerUnreachableError(message) from error


class RemoteServers:
    """See Peers."""

    def __init__(self) -> None:
        self._guard = Lock()
        self._servers: dict[str, RemoteServer] = {}

    def connect(self, address: str) -> RemoteServer:
        """See Peers."""
        with self._guard:
            if address not in self._servers:
                self._servers[address] = RemoteServer(address)
            return self._servers[address]

    def keep(self, addresses: Collection[str]) -> None:
        """See Peers."""
        with self._guard:
            unused = [at for at, server in self._servers.items() if at not in addresses and server.is_idle]
            servers = [self._servers.pop(address) for address in unused]
        for server in servers:
            server.close()

    def close(self) -> None:
        """See Peers."""
        with self._guard:
            servers = list(self._servers.values())
            self._servers.clear()
        for server in servers:
            server.close()
