"""One gRPC stream of Triton's inference protocol to another server."""

import time
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any

import grpc
from tritonclient.grpc.service_pb2 import ModelInferRequest, ModelInferResponse, ServerLiveRequest
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from corolla.remote.errors import PeerUnreachableError

CONNECT_SECONDS = 2.0
PROBE_AFTER_SECONDS = 2.0
"""A server that owes an answer and has been silent for so long is asked whether it is alive,"""
PROBE_SECONDS = 5.0
"""and has so long to say so."""
_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # a connection of its own, so that closing it closes it
)


class SpanStream:
    """An open stream, until it is `closed`.

    A thread of its own calls `answered`; it or `check` calls `broken`, once. Neither is called after `close`.
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
        self._stub = GRPCInferenceServiceStub(self._channel)
        self._heard = time.monotonic()
        self._probe: Any = None
        try:
            self._stub.ServerLive(ServerLiveRequest(), timeout=CONNECT_SECONDS)
        except grpc.RpcError as error:
            self._channel.close()
            raise PeerUnreachableError(f"{address}: {error.details()}") from error
        self._responses = self._stub.ModelStreamInfer(iter(self._requests.get, None))
        Thread(target=self._read, name=f"stream-{address}", daemon=True).start()

    def send(self, request: ModelInferRequest) -> None:
        """Hands a request over; never blocks."""
        self._requests.put(request)

    def check(self, waiting_since: float) -> None:
        """To be called now and then, with when the oldest step was sent that has no answer; never blocks.

        A server that is stopped keeps its connections and says nothing: then the stream breaks.
        """
        if self._probe is None and time.monotonic() - max(self._heard, waiting_since) > PROBE_AFTER_SECONDS:
            self._probe = self._stub.ServerLive.future(ServerLiveRequest(), timeout=PROBE_SECONDS)
        elif self._probe is not None and self._probe.done():
            failure = self._probe.exception()
            self._probe = None
            self._heard = time.monotonic()
            if failure is not None:
                self._break(f"{failure.code().name}: it gave no sign of life")

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
                self._heard = time.monotonic()
                if not self.closed:
                    self._answered(response.infer_response, response.error_message)
        except grpc.RpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        self._break(reason)

    def _break(self, reason: str) -> None:
        if not self.closed:
            self.close()
            self._broken(self, reason)
