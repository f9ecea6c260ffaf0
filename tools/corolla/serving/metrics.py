"""What the decoders did, as metrics of Triton: rows and padding per compiled batch size."""

from collections.abc import Callable
from threading import Event, Thread
from typing import Protocol

from corolla.model.decoders import Decoders

INTERVAL = 1.0
"""Seconds between two reports: an update costs some 20 microseconds, too much for every step."""
FAMILIES = {
    "corolla_decoder_rows_total": "Rows that ran on compiled decoders, by batch size",
    "corolla_decoder_padding_total": "Rows that were padded on compiled decoders, by batch size",
}


class Counter(Protocol):
    """A counter of Triton."""

    def increment(self, value: float) -> None: ...


MakeCounter = Callable[[str, str, dict[str, str]], Counter]
"""From a family's name, its description and labels."""


class DecoderMetrics:
    """Reports the counts of one model's decoders from a thread of its own until it is stopped."""

    def __init__(self, model: str, decoders: Decoders, make_counter: MakeCounter) -> None:
        self._decoders = decoders
        self._counters = {
            (family, size): make_counter(family, text, {"model": model, "size": str(size)})
            for family, text in FAMILIES.items()
            for size in decoders.sizes
        }
        self._reported = dict.fromkeys(self._counters, 0)
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
        counts = zip(FAMILIES, (self._decoders.rows, self._decoders.padding), strict=True)
        for family, by_size in counts:
            for size in self._decoders.sizes:
                new = by_size[size] - self._reported[family, size]
                if new > 0:
                    self._counters[family, size].increment(new)
                    self._reported[family, size] += new
