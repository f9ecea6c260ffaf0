"""The generate loop: all running generations step together, new ones join and ended ones leave between steps."""

import logging
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Thread

import torch

from corolla.generate.sequence import Sequence, StepFunction

logger = logging.getLogger(__name__)


class GenerateLoop:
    """One thread that owns the model. `release` is called once for every sequence that leaves, however it ends.

    Each turn runs the prompts of at most one newcomer and one step of everybody else, so that no prompt holds
    up running generations for longer than its own step.
    """

    def __init__(self, step: StepFunction, release: Callable[[Sequence], None], max_batch_size: int) -> None:
        self._step = step
        self._release = release
        self._max_batch_size = max_batch_size
        self._arrived: SimpleQueue[Sequence | None] = SimpleQueue()
        self._newcomers: list[Sequence] = []
        self._running: list[Sequence] = []
        self._stopping = False
        self._thread = Thread(target=self._run, name="generate-loop", daemon=True)
        self._thread.start()

    def join(self, sequence: Sequence) -> None:
        """Lets a sequence with an open session take part from the next turn on."""
        self._arrived.put(sequence)

    def stop(self) -> None:
        """Ends the loop; running generations fail."""
        self._arrived.put(None)
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping:
            self._welcome()
            self._drop_cancelled()
            if self._newcomers:
                self._advance([self._newcomers.pop(0)])
            for start in range(0, len(self._running), self._max_batch_size):
                self._advance(self._running[start : start + self._max_batch_size])
            self._running = [sequence for sequence in self._running if sequence.session_id]
        for sequence in [*self._running, *self._newcomers]:
            self._leave(sequence, RuntimeError("the server is stopping"))

    def _welcome(self) -> None:
        """Takes what has arrived; waits for something when there is nothing to do."""
        idle = not (self._running or self._newcomers)
        try:
            while True:
                arrived = self._arrived.get(block=idle)
                idle = False
                if arrived is None:
                    self._stopping = True
                elif len(arrived.pending) == 1:
                    self._running.append(arrived)
                else:
                    self._newcomers.append(arrived)
        except Empty:
            return

    def _drop_cancelled(self) -> None:
        for waiting in (self._running, self._newcomers):
            for sequence in [s for s in waiting if s.output.cancelled]:
                waiting.remove(sequence)
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

    def _accept(self, sequence: Sequence, result: torch.Tensor | Exception) -> None:
        joining = len(sequence.pending) > 1
        if isinstance(result, Exception):
            self._leave(sequence, result)
        elif sequence.accept(result) is not None:
            self._leave(sequence)
        elif joining:
            self._running.append(sequence)

    def _leave(self, sequence: Sequence, error: Exception | None = None) -> None:
        if error is not None:
            sequence.output.fail(error)
        try:
            self._release(sequence)
        except Exception:
            logger.exception("a session could not be released")
        sequence.session_id = ""
