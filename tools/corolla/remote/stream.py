"""One gRPC stream of Triton's inference protocol to another server."""

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

import grpc
from tritonclient.grpc.service_pb2 import ModelInferRequest, ModelInferResponse, ServerLiveRequest
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from corolla.remote.errors import PeerUnreachableError

CONNECT_SECONDS = 2.0
KEEPALIVE_SECONDS = 10
KEEPALIVE_TIMEOUT_SECONDS = 5
_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_SECONDS * 1000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a connection of its own, so that closing it closes it
)


class SpanStream:
    """An open stream, until it is `closed`.

    A thread of its own calls `answered` and, once, `broken`; neither is called after `close`.
    """

    def __init__(
        self,
        address: str,
        answered: Callable[[ModelInferResponse, str], None],
        broken: Callable[["SpanStream", str], None],
    ) -> None:
        """Connects within CONNECT_SECONDS; PeerUnreachableError. `answered` gets a response and its error message."""
        self._answered = answered
        self._broken = broken
        self._requests: SimpleQueue[ModelInferRequest | None] = SimpleQueue()
        self.closed = False
        self._channel = grpc.insecure_channel(address, _OPTIONS)
        stub = GRPCInferenceServiceStub(self._channel)
        try:
            stub.ServerLive(ServerLiveRequest(), timeout=CONNECT_SECONDS)
        except grpc.RpcError as error:
            self._channel.close()
            raise PeerUnreachableError(f"{address}: {error.details()}") from error
        self._responses = stub.ModelStreamInfer(iter(self._requests.get, None))
        Thread(target=self._read, name=f"stream-{address}", daemon=True).start()

    def send(self, request: ModelInferRequest) -> None:
        """Hands a request over; never blocks."""
        self._requests.put(request)

    def close(self) -> None:
        """Cancels what runs."""
        self.closed = True
        self._requests.put(None)
        self._responses.cancel()
        self._channel.close()

    def _read(self) -> None:
        reason = "the server ended the stream"
        try:
            for response in self._responses:
                if not self.closed:
                    self._answered(response.infer_response, response.error_message)
        except grpc.RpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        if not self.closed:
            self.close()
            self._broken(self, reason)
