"""The generate loop: all running generations step together, new ones join and ended ones leave between steps."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock, Thread

from corolla.generate.admission import AdmissionQueue, Preparer
from corolla.generate.channel import BatchChannel
from corolla.generate.sequence import Prediction, Sequence, StepFunction
from corolla.remote.trip import SpanError

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.05
"""How often it is asked whether the clients of waiting newcomers are still there."""


@dataclass(frozen=True)
class LoopLimits:
    """How much the loop does at once.

    `max_batch_size` is rows per step, `most_prompt_tokens` prompt tokens of several newcomers that run together,
    `channel_capacity` batches of newcomers that may be ready ahead; see BatchChannel.
    """

    max_batch_size: int
    most_prompt_tokens: int = 1
    channel_capacity: int = 1


class GenerateLoop:
    """One thread that owns the model. `release` is called once for every sequence that leaves, however it ends.

    A sequence whose step failed on another server is not ended but given to `rescue`; it is no part of the loop then.

    Newcomers go through the admission queue into batches, which a second thread prepares, and through the batch
    channel into the loop. Each turn runs the prompts of at most one such batch and one step of everybody else, so
    that no prompt holds up running generations for longer than its own step.
    """

    def __init__(
        self,
        step: StepFunction,
        release: Callable[[Sequence], None],
        limits: LoopLimits,
        rescue: Callable[[Sequence, SpanError], None] | None = None,
    ) -> None:
        self._step = step
        self._release = release
        self._rescue = rescue
        self._interrupted: list[tuple[Sequence, SpanError]] = []
        self._max_batch_size = limits.max_batch_size
        self.queue = AdmissionQueue()
        self.channel: BatchChannel[list[Sequence]] = BatchChannel(limits.channel_capacity)
        self._running: list[Sequence] = []
        self._stopping = False
        self._next_poll = 0.0
        self._joining = Lock()
        self.preparer = Preparer(self.queue, self.channel, limits.most_prompt_tokens)
        self._thread = Thread(target=self._run, name="generate-loop", daemon=True)
        self._thread.start()

    def join(self, sequence: Sequence) -> None:
        """Lets a sequence with an open session take part as soon as its turn comes."""
        with self._joining:
            if not self._stopping:
                self.queue.put(sequence)
                return
        self._leave(sequence, RuntimeError("the server is stopping"))

    def stop(self) -> None:
        """Ends the loop after the step that runs; all generations fail."""
        with self._joining:
            self._stopping = True
        self.queue.close()
        self.channel.close()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping:
            batch = self.channel.take(wait=not self._running) or []
            self._drop_cancelled(batch)
            self._running += [sequence for sequence in batch if len(sequence.pending) == 1]
            if prompts := [sequence for sequence in batch if len(sequence.pending) > 1]:
                self._advance(prompts)
            for start in range(0, len(self._running), self._max_batch_size):
                self._advance(self._running[start : start + self._max_batch_size])
            self._running = [sequence for sequence in self._running if sequence.session_id]
            if self._interrupted:
                self._hand_over()
        self.preparer.join()
        left = [*self._running, *(s for batch in self.channel.drain() for s in batch), *self.queue.remove(bool)]
        for sequence in left:
            self._leave(sequence, RuntimeError("the server is stopping"))

    def _drop_cancelled(self, batch: list[Sequence]) -> None:
        if time.monotonic() >= self._next_poll:
            self.queue.each(lambda waiting: waiting.output.poll())
            self._next_poll = time.monotonic() + POLL_SECONDS
        for waiting in (self._running, batch):
            for sequence in [s for s in waiting if s.output.cancelled]:
                waiting.remove(sequence)
                self._leave(sequence)
        for sequence in self.queue.remove(lambda waiting: waiting.output.cancelled):
            self._leave(sequence)

    def _advance(self, sequences: list[Sequence]) -> None:
        try:
            results = self._step(sequences)
        except Exception as error:
            logger.exception("a step failed")
            results = [error] * len(sequences)
        for sequence, result in zip(sequences, results, strict=True):
            try:
                self._accept(sequence, result)
            except Exception as error:
                logger.exception("a token could not be chosen")
                self._leave(sequence, error)

    def _accept(self, sequence: Sequence, result: Prediction | Exception) -> None:
        joining = len(sequence.pending) > 1
        if isinstance(result, SpanError) and self._rescue is not None:
            self._interrupted.append((sequence, result))
        elif isinstance(result, Exception):
            self._leave(sequence, result)
        elif sequence.accept(result) is not None:
            self._leave(sequence)
        elif joining:
            self._running.append(sequence)

    def _hand_over(self) -> None:
        interrupted, self._interrupted = self._interrupted, []
        gone = {id(sequence) for sequence, _ in interrupted}
        self._running = [sequence for sequence in self._running if id(sequence) not in gone]
        for sequence, error in interrupted:
            assert self._rescue is not None
            self._rescue(sequence, error)

    def _leave(self, sequence: Sequence, error: Exception | None = None) -> None:
        if error is not None:
            sequence.output.fail(error)
        try:
            self._release(sequence)
        except Exception:
            logger.exception("a session could not be released")
        sequence.session_id = ""
