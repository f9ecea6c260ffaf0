"""The channel between the thread that prepares batches and the one that runs them."""

from collections import deque
from threading import Condition
from typing import Generic, TypeVar

Batch = TypeVar("Batch")


class BatchChannel(Generic[Batch]):
    """First in, first out, for one thread that puts and one that takes.

    `put` returns while at most `capacity` batches wait: with 0, when its batch was taken (rendezvous); with 1, one
    batch is ready while the next is prepared. More batches hold memory, and who is in them is decided too early.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._batches: deque[Batch] = deque()
        self._changed = Condition()
        self._closed = False

    def put(self, batch: Batch) -> None:
        """Hands over a batch, waiting as the class says; after `close`, batches stay for `drain`."""
        with self._changed:
            self._batches.append(batch)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or len(self._batches) <= self._capacity)

    def take(self, *, wait: bool) -> Batch | None:
        """The oldest batch; None if there is none, with `wait` only after `close`."""
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._closed or bool(self._batches))
            if self._closed or not self._batches:
                return None
            batch = self._batches.popleft()
            self._changed.notify_all()
            return batch

    @property
    def holds_up(self) -> bool:
        """Whether `put` waits."""
        with self._changed:
            return len(self._batches) > self._capacity

    def close(self) -> None:
        """Lets everybody who waits go on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def drain(self) -> list[Batch]:
        """What was never taken."""
        with self._changed:
            left = list(self._batches)
            self._batches.clear()
            return left
