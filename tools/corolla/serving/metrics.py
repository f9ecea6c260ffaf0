"""What a model did, as metrics of Triton."""

import os
from collections.abc import Callable, Mapping
from threading import Event, Thread
from typing import Protocol

from corolla.model.decoders import Decoders

INTERVAL = 1.0
"""Seconds between two reports: an update costs some 20 microseconds, too much for every step."""
DECODER_FAMILIES = {
    "corolla_decoder_rows_total": "Rows that ran on compiled decoders, by batch size",
    "corolla_decoder_padding_total": "Rows that were padded on compiled decoders, by batch size",
}


class Counter(Protocol):
    """A counter of Triton."""

    def increment(self, value: float) -> None: ...


MakeCounter = Callable[[str, str, dict[str, str]], Counter]
"""From a family's name, its description and labels."""
Key = tuple[str, int]
"""A family and, where it has one, a batch size."""


class Reports:
    """Reports counts from a thread of its own until it is stopped, or tritonserver is gone.

    A report that nobody takes would never end, and would keep the process from ending as well.
    """

    def __init__(self, counters: Mapping[Key, Counter], read: Callable[[], Mapping[Key, int]]) -> None:
        """`read` gives the counts so far."""
        self._counters = counters
        self._read = read
        self._reported = dict.fromkeys(counters, 0)
        self._server = os.getppid()
        self._stopping = Event()
        self._thread = Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after a last report."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(INTERVAL):
            self._report()
        self._report()

    def _report(self) -> None:
        for key, count in self._read().items():
            if os.getppid() != self._server:
                return
            if (new := count - self._reported[key]) > 0:
                self._counters[key].increment(new)
                self._reported[key] += new


def report_decoders(model: str, decoders: Decoders, make_counter: MakeCounter) -> Reports:
    """Rows and padding of one model's decoders, per compiled batch size."""
    counters = {
        (family, size): make_counter(family, text, {"model": model, "size": str(size)})
        for family, text in DECODER_FAMILIES.items()
        for size in decoders.sizes
    }

    def read() -> dict[Key, int]:
        counts = zip(DECODER_FAMILIES, (decoders.rows, decoders.padding), strict=True)
        return {(family, size): by_size[size] for family, by_size in counts for size in decoders.sizes}

    return Reports(counters, read)
