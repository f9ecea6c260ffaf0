"""Sequences on their way into the generate loop."""

from bisect import insort
from collections.abc import Callable
from threading import Condition, Thread

from corolla.generate.channel import BatchChannel
from corolla.generate.sequence import Sequence


class AdmissionQueue:
    """Sequences with open sessions that no batch was prepared for yet: the more urgent first, then the earlier."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, Sequence]] = []
        self._arrivals = 0
        self._unprepared = 0
        self._changed = Condition()
        self._closed = False

    def put(self, sequence: Sequence) -> None:
        """Adds a sequence behind those of its `priority`."""
        with self._changed:
            insort(self._waiting, (sequence.request.priority, self._arrivals, sequence))
            self._arrivals += 1
            self._unprepared += 1
            self._changed.notify_all()

    def take(self, most_tokens: int) -> list[Sequence]:
        """The first sequence, waiting for it, and those after it as long as all prompts have `most_tokens` tokens.

        Nothing after `close`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or bool(self._waiting))
            if self._closed:
                return []
            batch = [self._waiting.pop(0)[2]]
            tokens = len(batch[0].pending)
            while self._waiting and tokens + len(self._waiting[0][2].pending) <= most_tokens:
                batch.append(self._waiting.pop(0)[2])
                tokens += len(batch[-1].pending)
            return batch

    def each(self, call: Callable[[Sequence], None]) -> None:
        """Calls a function that does not block for every waiting sequence."""
        with self._changed:
            for _, _, sequence in self._waiting:
                call(sequence)

    def remove(self, unwanted: Callable[[Sequence], bool]) -> list[Sequence]:
        """Takes out and returns sequences that nobody wants any more."""
        with self._changed:
            gone = [entry for entry in self._waiting if unwanted(entry[2])]
            for entry in gone:
                self._waiting.remove(entry)
            self._unprepared -= len(gone)
            return [sequence for _, _, sequence in gone]

    def prepared(self, sequences: int) -> None:
        """Tells that so many sequences more are in the channel."""
        with self._changed:
            self._unprepared -= sequences

    @property
    def unprepared(self) -> int:
        """Sequences that are not in the channel yet."""
        with self._changed:
            return self._unprepared

    def close(self) -> None:
        """Lets `take` go on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Preparer:
    """A thread that forms batches of newcomers while the loop runs the one before, and puts them into the channel."""

    def __init__(self, queue: AdmissionQueue, channel: BatchChannel[list[Sequence]], most_tokens: int) -> None:
        self._queue = queue
        self._channel = channel
        self._most_tokens = most_tokens
        self._thread = Thread(target=self._run, name="prepare", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Waits for its end, after queue and channel were closed."""
        self._thread.join()

    @property
    def settled(self) -> bool:
        """Whether it has nothing to do, or waits for the channel."""
        return self._channel.holds_up or self._queue.unprepared == 0

    def _run(self) -> None:
        while batch := self._queue.take(self._most_tokens):
            sequences = len(batch)
            self._channel.put(batch)
            del batch  # nobody is to keep a sequence, which holds its session, while waiting for the next one
            self._queue.prepared(sequences)
