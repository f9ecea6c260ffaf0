"""Responses are sent from a thread of their own, so that the generate loop never waits for a client."""

import logging
import time
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

import numpy as np

from corolla.generate.sequence import Finished
from corolla.serving.adapter import FINAL, error_response, response

logger = logging.getLogger(__name__)

RESPONSES_PER_SECOND = 250
"""What all streams together may send. Each response costs processor time in this process, in tritonserver and in a
client beside them, which is taken from the step: with more streams, tokens go out together."""


class SenderThread:
    """Sends the responses of all streams.

    One thread: handing a response to Triton does not wait for its client, and several would only take the interpreter
    from each other and from the loop.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[ResponseStream] = SimpleQueue()
        self._guard = Lock()
        self._streams = 0
        Thread(target=self._run, name="sender", daemon=True).start()

    def stream(self, sender: Any, *, streaming: bool) -> "ResponseStream":
        """The output of one request."""
        return ResponseStream(self, sender, self._queue, streaming=streaming)

    @property
    def interval(self) -> float:
        """Seconds between two responses of one stream: tokens that come sooner go out together."""
        return self._streams / RESPONSES_PER_SECOND

    def count(self, change: int) -> None:
        """Tells that streams began (+1) or ended (-1)."""
        with self._guard:
            self._streams += change

    def _run(self) -> None:
        while True:
            self._queue.get().flush()


class ResponseStream:
    """One generation's responses: pieces that pile up while a response is sent go out together in the next.

    Without `streaming`, everything goes out in one response at the end.
    """

    def __init__(
        self, thread: SenderThread, sender: Any, queue: SimpleQueue["ResponseStream"], *, streaming: bool
    ) -> None:
        self._thread = thread
        self._sender = sender
        self._queue = queue
        self._streaming = streaming
        self._lock = Lock()
        self._text = ""
        self._finished: Finished | None = None
        self._error: Exception | None = None
        self._scheduled = False
        self._session_id = ""
        self._next_flush = 0.0
        self._counted = False
        self.cancelled = False

    def poll(self) -> None:
        """See corolla.generate.sequence.Output."""
        with self._lock:
            self._schedule()

    def begin(self, session_id: str) -> None:
        """See corolla.generate.sequence.Output."""
        self._session_id = session_id
        self._counted = True
        self._thread.count(1)

    def send(self, text: str, finished: Finished | None) -> None:
        """See corolla.generate.sequence.Output."""
        with self._lock:
            self._text += text
            self._finished = finished
            if finished is not None or time.monotonic() >= self._next_flush:
                self._schedule()

    def fail(self, error: Exception) -> None:
        """See corolla.generate.sequence.Output."""
        with self._lock:
            self._error = error
            self._schedule()

    def flush(self) -> None:
        """Sends what has piled up; notices that the client is gone. Called by the sender's thread alone."""
        if self.cancelled:
            return
        with self._lock:
            self._scheduled = False
            self._next_flush = time.monotonic() + self._thread.interval
            ended = self._finished is not None or self._error is not None
            text, finished, error = self._text, self._finished, self._error
            if self._streaming or ended:
                self._text = ""
        try:
            if error is not None:
                self._sender.send(error_response(error), flags=FINAL)
            elif finished is not None:
                self._sender.send(response(**self._session(), **_last(text, finished)), flags=FINAL)
            elif self._sender.is_cancelled():
                self.cancelled = True
                self._sender.send(flags=FINAL)  # without it, Triton never unloads the model
            elif self._streaming and text:
                self._sender.send(response(text_output=_bytes(text), **self._session()))
        except Exception:
            logger.exception("a response could not be sent")
            self.cancelled = True
        if self._counted and (ended or self.cancelled):
            self._counted = False
            self._thread.count(-1)

    def _session(self) -> dict[str, Any]:
        """The session's id, once: with the first response."""
        session_id, self._session_id = self._session_id, ""
        return {"session_id": _bytes(session_id)} if session_id else {}

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._queue.put(self)


def _last(text: str, finished: Finished) -> dict[str, Any]:
    return {
        "text_output": _bytes(text),
        "finish_reason": _bytes(finished.reason),
        "num_input_tokens": np.array([[finished.num_input_tokens]], np.int32),
        "num_output_tokens": np.array([[finished.num_output_tokens]], np.int32),
    }


def _bytes(text: str) -> np.ndarray:
    return np.array([[text.encode()]], dtype=object)
