"""A thread that follows what changes, and begins anew when it is cut off."""

import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
E = TypeVar("E", bound=Exception)

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
"""Seconds between attempts while cut off: soon at first, then ever less often."""


class Closing:
    """Tells whoever waits for the next change that nobody wants it any more."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._interrupt: Callable[[], object] = lambda: None

    def interrupt(self, call: Callable[[], object]) -> None:
        """From now on, `close` makes this call, in place of an earlier one; at once if it is closed already."""
        with self._lock:
            self._interrupt = call
            if self._event.is_set():
                call()

    def close(self) -> None:
        """Ends the waiting."""
        with self._lock:
            self._event.set()
            self._interrupt()

    def wait(self, seconds: float) -> bool:
        """Waits so long, or until it is closed; whether it is."""
        return self._event.wait(seconds)

    def __bool__(self) -> bool:
        return self._event.is_set()


class Watch(Generic[T, E]):
    """Follows `changes`, which yields the state now and then after each change, and may raise an `away` error."""

    def __init__(
        self,
        changes: Callable[[Closing], Iterator[T]],
        on_change: Callable[[T], None],
        on_away: Callable[[E], None],
        away: type[E],
    ) -> None:
        self._changes = changes
        self._on_change = on_change
        self._on_away = on_away
        self._away = away
        self._closing = Closing()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends it; no call is made after that."""
        self._closing.close()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        pause = FIRST_PAUSE
        while not self._closing:
            try:
                last: T | None = None
                for state in self._changes(self._closing):
                    pause = FIRST_PAUSE
                    if state != last:
                        self._on_change(state)
                    last = state
            except self._away as error:
                if not self._closing:
                    self._on_away(error)
                self._closing.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
