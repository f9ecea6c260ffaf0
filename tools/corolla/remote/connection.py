"""A lasting connection to the `span` model of another server."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from threading import Condition, Thread, current_thread

from tritonclient.grpc.service_pb2 import ModelInferRequest, ModelInferResponse

from corolla.remote.errors import PeerRefusalError, PeerUnreachableError
from corolla.remote.stream import SpanStream
from corolla.remote.tensors import from_response, to_request
from corolla.wire.messages import SpanOutput, SpanStep

TICK = 0.05
"""Seconds between looks for steps whose time is over, and for a server that says nothing any more."""
IDLE_SECONDS = 3.0
"""After so long without steps it rests: Triton does not stop, nor unload a model, under an open stream."""
FIRST_BACKOFF, LONGEST_BACKOFF = 0.1, 5.0
"""Seconds after a failed attempt to connect for which steps fail at once; doubled each time."""


def _ignore(handed: bool) -> None:
    """For callers that only want the answer."""


@dataclass(frozen=True)
class _Pending:
    request: ModelInferRequest
    answer: Future[SpanOutput]
    since: float
    deadline: float
    on_handed: Callable[[bool], None]

    def settle(self, outcome: SpanOutput | Exception) -> None:
        """Gives the answer, unless nobody wants it any more."""
        if not self.answer.set_running_or_notify_cancel():
            return
        if isinstance(outcome, Exception):
            self.answer.set_exception(outcome)
        else:
            self.answer.set_result(outcome)


class PeerConnection:
    """Sends steps to one server, `address` host:port of its gRPC endpoint; may be used by any threads.

    It connects with the first step, and again with the first one after it broke or rested. Nothing but `close` blocks.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._changed = Condition()
        self._numbers = count(1)
        self._sent: dict[str, _Pending] = {}
        self._unsent: list[tuple[str, _Pending]] = []
        self._stream: SpanStream | None = None
        self._used = 0.0
        self._closed = False
        self._backoff = FIRST_BACKOFF
        self._retry_at = 0.0
        self._failure = ""
        self._thread = Thread(target=self._run, name=f"peer-{address}", daemon=True)
        self._thread.start()

    def submit(
        self,
        step: SpanStep,
        timeout: float | None = None,
        *,
        acknowledge: bool = False,
        on_handed: Callable[[bool], None] = _ignore,
    ) -> "Future[SpanOutput]":
        """Sends a step; its answer comes within `timeout` seconds (that of the step, if none is given), or an error.

        The future fails with PeerRefusalError, the server's own answer, or PeerUnreachableError when there is none. Its
        callbacks run in threads of the connection; cancelling it forgets the step. To `acknowledge` asks for an answer
        without hidden states. `on_handed` is called once, soon, with whether the step went out on a connection that
        worked so far.
        """
        number = str(next(self._numbers))
        now = time.monotonic()
        deadline = now + (step.timeout if timeout is None else timeout)
        request = to_request(step, number, acknowledge=acknowledge)
        pending = _Pending(request, Future(), now, deadline, on_handed)
        with self._changed:
            self._used = now
            refusal = self._refusal()
            if refusal is None and self._stream is not None:
                self._sent[number] = pending
                self._stream.send(request)
            elif refusal is None:
                self._unsent.append((number, pending))
                self._changed.notify()
                return pending.answer
        on_handed(refusal is None)
        if refusal is not None:
            pending.settle(refusal)
        return pending.answer

    @property
    def outstanding(self) -> int:
        """Steps without an answer yet."""
        return len(self._sent) + len(self._unsent)

    @property
    def suspect(self) -> bool:
        """Whether it broke, or could not be made, and has not been made again."""
        return self._stream is None and bool(self._failure)

    def close(self) -> None:
        """Ends the connection; what is outstanding fails."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if current_thread() is not self._thread:
            self._thread.join()
        self._drop("the connection was closed")

    def _refusal(self) -> PeerUnreachableError | None:
        if self._closed:
            return PeerUnreachableError(f"{self.address}: the connection was closed")
        if self._stream is None and time.monotonic() < self._retry_at:
            return PeerUnreachableError(self._failure)
        return None

    def _run(self) -> None:
        while not self._closed:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._unsent, TICK)
            if self._unsent and not self._closed:
                self._connect()
            self._look()

    def _connect(self) -> None:
        try:
            stream = SpanStream(self.address, self._answered, self._broken)
        except PeerUnreachableError as error:
            with self._changed:
                self._failure = str(error)
                self._retry_at = time.monotonic() + self._backoff
                self._backoff = min(2 * self._backoff, LONGEST_BACKOFF)
                failed, self._unsent = self._unsent, []
            for _, pending in failed:
                pending.on_handed(False)
                pending.settle(error)
            return
        with self._changed:
            self._stream = stream
            self._backoff, self._failure = FIRST_BACKOFF, ""
            waiting, self._unsent = self._unsent, []
            self._sent |= dict(waiting)
            for _, pending in waiting:
                stream.send(pending.request)
        for _, pending in waiting:
            pending.on_handed(True)
        if stream.closed:  # it broke before it was known here
            self._broken(stream, "at once")

    def _answered(self, response: ModelInferResponse, error: str) -> None:
        with self._changed:
            pending = self._sent.pop(response.id, None)
        if pending is None:
            return  # its time was over
        pending.settle(PeerRefusalError(self.address, error) if error else self._read(response))

    def _read(self, response: ModelInferResponse) -> SpanOutput | Exception:
        try:
            return from_response(response)
        except Exception as error:
            return PeerRefusalError(self.address, f"an answer that cannot be read ({error})")

    def _broken(self, stream: SpanStream, reason: str) -> None:
        with self._changed:
            if self._stream is not stream:
                return
        self._drop(f"the connection broke ({reason})")

    def _drop(self, reason: str) -> None:
        with self._changed:
            stream, self._stream = self._stream, None
            lost = [*self._sent.values(), *(pending for _, pending in self._unsent if self._closed)]
            self._sent.clear()
            self._failure = f"{self.address}: {reason}"
        if stream is not None:
            stream.close()
        for pending in lost:
            pending.settle(PeerUnreachableError(f"{self.address}: {reason}"))

    def _look(self) -> None:
        """For steps whose time is over, for a server that says nothing any more, and whether to rest."""
        now = time.monotonic()
        with self._changed:
            late = [number for number, pending in self._sent.items() if now > pending.deadline]
            expired = [self._sent.pop(number) for number in late]
            stream, waiting_since = self._stream, min((pending.since for pending in self._sent.values()), default=now)
            resting = not self.outstanding and now > self._used + IDLE_SECONDS
            if resting:
                self._stream = None
        for pending in expired:
            pending.settle(PeerUnreachableError(f"{self.address}: no answer in time"))
        if stream is not None and resting:
            stream.close()
        elif stream is not None:
            stream.check(waiting_since)
