"""What the `span` model does: steps of this server's sessions, for clients and for the servers before it."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count
from threading import Event, Thread

import torch

from corolla.kv.table import SessionTable, UnknownSessionError
from corolla.serving.span_book import IsCancelled, Respond, StepBook
from corolla.serving.span_loop import Blocks, RunRanges, SpanJob, SpanLoop
from corolla.serving.span_push import Connection, Pushes
from corolla.wire.messages import SpanOutput, SpanStep
from corolla.wire.states import decode, encode

logger = logging.getLogger(__name__)

ANSWER_THREADS = 4
TICK = 0.1
"""Seconds between looks for steps that did not come in time, and for sessions that have ended."""


ASK_TICKS = 10
"""So many of them between questions whether anybody waits."""


@dataclass(frozen=True)
class SpanCounts:
    """What was done so far; docs/protocol.md, Metrics."""

    steps: int
    rows: int
    batched_rows: int
    pushes_sent: int
    pushes_received: int
    pushes_failed: int
    duplicates: int


class SpanService:
    """Computes each step once, answers all who ask for it, and pushes its output on.

    Outputs are encoded and answered in a few threads of their own, so that the loop goes on meanwhile.
    """

    def __init__(
        self,
        blocks: Blocks,
        table: SessionTable,
        run_ranges: RunRanges,
        max_short_tokens: int,
        connect: Callable[[str], Connection] | None = None,
    ) -> None:
        self._blocks = blocks
        self._table = table
        self._dtype = table.layout.torch_dtype
        self.book = StepBook()
        self._loop = SpanLoop(blocks, run_ranges, max_short_tokens)
        self._pushes = Pushes(connect) if connect else Pushes()
        self._received = 0
        self._answers = ThreadPoolExecutor(ANSWER_THREADS, thread_name_prefix="span-answer")
        self._stopping = Event()
        self._watch = Thread(target=self._watch_time, name="span-watch", daemon=True)
        self._watch.start()

    def start(
        self,
        step: SpanStep,
        respond: Respond,
        *,
        pushed: bool = False,
        is_cancelled: IsCancelled = lambda: False,
    ) -> None:
        """Takes a request, `pushed` by the server before or not; the answer goes to `respond`, from any thread.

        The bytes of its states are not used any more when this returns. Errors as of StepBook.
        """
        began = time.monotonic()
        if step.states is None:
            self.book.wait(step, respond, began + step.timeout, is_cancelled)
            return
        self._received += pushed
        if not self.book.arrive(step, respond):
            return
        encoding, hidden_states = step.states.encoding, decode(step.states, self._dtype)
        step = replace(step, states=None)
        assert step.blocks is not None

        def done(output: torch.Tensor | Exception) -> None:
            self._answers.submit(self._answer, step, encoding, output, time.monotonic() - began)

        self._loop.put(SpanJob(list(step.session_ids), list(step.starts), step.blocks, hidden_states, done))

    def stop(self) -> None:
        """Ends everything; steps that are left fail."""
        self._stopping.set()
        self._watch.join()
        self._loop.stop()
        self._answers.shutdown()
        self._pushes.close()

    def counts(self) -> SpanCounts:
        """See SpanCounts."""
        loop, pushes = self._loop, self._pushes
        return SpanCounts(
            loop.steps, loop.rows, loop.batched_rows, pushes.sent, self._received, pushes.failed, self.book.duplicates
        )

    def _answer(self, step: SpanStep, encoding: str, output: torch.Tensor | Exception, seconds: float) -> None:
        try:
            if isinstance(output, Exception):
                raise output
            states = encode(output, encoding)
            free_tokens = self._table.status().free_tokens

            def finish(pushed: bool) -> None:
                self.book.finish(step, SpanOutput(states, pushed, free_tokens, seconds, duplicate=False))

            if step.next:
                self._pushes.push(step, states, finish)
            else:
                finish(False)
        except Exception as error:
            self.book.finish(step, error)

    def _watch_time(self) -> None:
        for tick in count(1):
            if self._stopping.wait(TICK):
                return
            try:
                self.book.expire(time.monotonic(), ask=tick % ASK_TICKS == 0)
                self.book.forget(self._ended(self.book.sessions()))
            except Exception:
                logger.exception("steps could not be looked after; trying again")

    def _ended(self, session_ids: set[str]) -> list[str]:
        steps = self._blocks.current.steps
        ended = []
        for session_id in session_ids:
            try:
                steps.length(session_id)
            except UnknownSessionError:
                ended.append(session_id)
        return ended
