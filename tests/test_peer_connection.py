"""A connection to another server, with one whose behaviour is up to the test: steps are answered, or fail soon."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from threading import Event

import grpc
import numpy as np
import pytest
from tritonclient.grpc.service_pb2 import (
    ModelInferRequest,
    ModelInferResponse,
    ModelStreamInferResponse,
    ServerLiveRequest,
    ServerLiveResponse,
)
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceServicer, add_GRPCInferenceServiceServicer_to_server

from corolla.remote import connection as connection_module
from corolla.remote import stream as stream_module
from corolla.remote.connection import PeerConnection
from corolla.remote.errors import PeerRefusalError, PeerUnreachableError
from corolla.wire.messages import SpanStep
from waiting import wait_until

SECONDS = 20.0
STEP = SpanStep(("a",), (0,), "step")


class Peer(GRPCInferenceServiceServicer):
    """Puts requests aside; the test answers them. Once `stopped`, it says nothing any more."""

    def __init__(self) -> None:
        self.requests: SimpleQueue[ModelInferRequest] = SimpleQueue()
        self.responses: SimpleQueue[ModelStreamInferResponse | None] = SimpleQueue()
        self.stopped = Event()
        self.go_on = Event()
        self.ended = Event()
        self._readers = ThreadPoolExecutor(4)

    def ServerLive(self, request: ServerLiveRequest, context: object) -> ServerLiveResponse:  # noqa: N802
        if self.stopped.is_set():
            self.go_on.wait(SECONDS)
        return ServerLiveResponse(live=True)

    def ModelStreamInfer(  # noqa: N802
        self, requests: Iterator[ModelInferRequest], context: grpc.ServicerContext
    ) -> Iterator[ModelStreamInferResponse]:
        self._readers.submit(self._read, requests)
        yield from iter(self.responses.get, None)

    def answer(self, request: ModelInferRequest, error: str = "") -> None:
        response = ModelInferResponse(id=request.id)
        for name, value in (
            ("pushed", np.array([True])), ("free_tokens", np.array([7])), ("seconds", np.array([0.5], np.float32)),
            ("duplicate", np.array([False])),
        ):  # fmt: skip
            response.outputs.add(name=name)
            response.raw_output_contents.append(value.tobytes())
        self.responses.put(ModelStreamInferResponse(infer_response=response, error_message=error))

    def _read(self, requests: Iterator[ModelInferRequest]) -> None:
        try:
            for request in requests:
                self.requests.put(request)
        except grpc.RpcError:
            return
        finally:
            self.ended.set()


@pytest.fixture
def peer() -> Peer:
    return Peer()


@pytest.fixture
def connection(peer: Peer) -> Iterator[PeerConnection]:
    server = grpc.server(ThreadPoolExecutor(8))
    add_GRPCInferenceServiceServicer_to_server(peer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    made = PeerConnection(f"127.0.0.1:{port}")
    yield made
    made.close()
    peer.go_on.set()
    peer.responses.put(None)
    server.stop(0).wait()


def test_answers_find_their_steps_in_any_order(peer: Peer, connection: PeerConnection) -> None:
    answers = [connection.submit(STEP) for _ in range(3)]
    for request in reversed([peer.requests.get(timeout=SECONDS) for _ in answers]):
        peer.answer(request, error="NOT_FOUND: no such session" if request.id == "2" else "")
    outputs = [answers[index].result(SECONDS) for index in (0, 2)]
    assert [(output.states, output.pushed, output.free_tokens, output.seconds) for output in outputs] == [
        (None, True, 7, 0.5)
    ] * 2
    with pytest.raises(PeerRefusalError, match="no such session") as refused:
        answers[1].result(SECONDS)
    assert refused.value.status == "NOT_FOUND"
    assert connection.outstanding == 0


def test_what_triton_says_for_a_model_that_is_away_counts_as_unavailable(
    peer: Peer, connection: PeerConnection
) -> None:
    answer = connection.submit(STEP)
    peer.answer(peer.requests.get(timeout=SECONDS), error="Request for unknown model: 'span' has no available versions")
    error = answer.exception(SECONDS)
    assert isinstance(error, PeerRefusalError)
    assert error.status == "UNAVAILABLE"


def test_a_stream_that_ends_fails_what_is_outstanding_and_is_made_again(
    peer: Peer, connection: PeerConnection
) -> None:
    answers = [connection.submit(STEP) for _ in range(2)]
    for _ in answers:
        peer.requests.get(timeout=SECONDS)
    peer.responses.put(None)
    for answer in answers:
        assert isinstance(answer.exception(SECONDS), PeerUnreachableError)
    assert connection.suspect
    again = connection.submit(STEP)
    peer.answer(peer.requests.get(timeout=SECONDS))
    assert again.result(SECONDS).free_tokens == 7
    assert not connection.suspect


def test_an_idle_connection_ends_its_stream_until_it_is_needed(
    peer: Peer, connection: PeerConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "IDLE_SECONDS", 0.05)
    first = connection.submit(STEP)
    request = peer.requests.get(timeout=SECONDS)
    assert not peer.ended.wait(0.3), "it waits for an answer"
    peer.answer(request)
    assert first.result(SECONDS).pushed
    assert peer.ended.wait(SECONDS)
    assert not connection.suspect
    peer.responses.put(None)
    again = connection.submit(STEP)
    peer.answer(peer.requests.get(timeout=SECONDS))
    assert again.result(SECONDS).pushed


def test_a_server_that_is_stopped_is_noticed(
    peer: Peer, connection: PeerConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps its connections, and the time of the step is not over yet."""
    monkeypatch.setattr(stream_module, "PROBE_AFTER_SECONDS", 0.1)
    monkeypatch.setattr(stream_module, "PROBE_SECONDS", 0.1)
    answer = connection.submit(STEP, timeout=60.0)
    peer.requests.get(timeout=SECONDS)
    wait_until(lambda: not answer.done() and connection.outstanding == 1)
    peer.stopped.set()
    with pytest.raises(PeerUnreachableError, match="it gave no sign of life"):
        answer.result(SECONDS)


def test_a_server_that_only_takes_its_time_is_waited_for(
    peer: Peer, connection: PeerConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "PROBE_AFTER_SECONDS", 0.01)
    answer = connection.submit(STEP, timeout=60.0)
    request = peer.requests.get(timeout=SECONDS)
    began = time.monotonic()
    wait_until(lambda: time.monotonic() - began > 0.4)  # several questions whether it is alive
    peer.answer(request)
    assert answer.result(SECONDS).pushed


def test_a_server_that_cannot_be_reached_costs_one_attempt_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "FIRST_BACKOFF", 60.0)
    connection = PeerConnection("127.0.0.1:9")  # nobody listens there
    assert isinstance(connection.submit(STEP).exception(SECONDS), PeerUnreachableError)
    handed: list[bool] = []
    refused = connection.submit(STEP, on_handed=handed.append)
    assert refused.done()
    assert handed == [False]
    connection.close()
    assert isinstance(connection.submit(STEP).exception(SECONDS), PeerUnreachableError)


def test_a_step_that_nobody_wants_any_more_is_forgotten(peer: Peer, connection: PeerConnection) -> None:
    first, second = connection.submit(STEP), connection.submit(STEP)
    first.cancel()
    for _ in range(2):
        peer.answer(peer.requests.get(timeout=SECONDS))
    assert second.result(SECONDS).pushed
    assert connection.outstanding == 0
