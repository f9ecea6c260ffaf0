"""What takes long to make and is not needed at once."""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

Made = TypeVar("Made")


class Later(Generic[Made]):
    """Something that a thread makes once it is asked for. Used by one thread at a time."""

    def __init__(self, make: Callable[[], Made], failure: str) -> None:
        """`failure` is what the log says when it cannot be made."""
        self._make = make
        self._failure = failure
        self._future: Future[Made] | None = None

    def get(self) -> Made | None:
        """What was made; None as long as it is not ready, or when it could not be made."""
        future = self._begin()
        return future.result() if future.done() and future.exception() is None else None

    def wait(self) -> Made:
        """What was made, waiting for it; raises what `make` raised."""
        return self._begin().result()

    def _begin(self) -> "Future[Made]":
        if self._future is None:
            self._future = Future()
            Thread(target=self._run, args=(self._future,), name="later", daemon=True).start()
        return self._future

    def _run(self, future: "Future[Made]") -> None:
        try:
            future.set_result(self._make())
        except Exception as error:
            logger.exception(self._failure)
            future.set_exception(error)
