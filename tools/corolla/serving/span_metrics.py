"""What a span did, as metrics of Triton."""

from collections.abc import Callable
from dataclasses import asdict

from corolla.serving.metrics import Key, MakeCounter, Reports
from corolla.serving.span import SpanCounts

FAMILIES = {
    "steps": "Steps that ran on the span",
    "rows": "Rows of steps that ran on the span",
    "batched_rows": "Rows that ran together with those of other steps",
    "pushes_sent": "Outputs that were handed to the next server",
    "pushes_received": "Steps that the server before sent",
    "pushes_failed": "Outputs that could not be handed to the next server",
    "duplicates": "Steps that came again and were not computed again",
}


def report_span(read_counts: Callable[[], SpanCounts], make_counter: MakeCounter) -> Reports:
    """The families corolla_span_<name>_total."""
    counters = {
        (name, 0): make_counter(f"corolla_span_{name}_total", text, {"model": "span"})
        for name, text in FAMILIES.items()
    }

    def read() -> dict[Key, int]:
        return {(name, 0): count for name, count in asdict(read_counts()).items()}

    return Reports(counters, read)
