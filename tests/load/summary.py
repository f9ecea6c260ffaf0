"""What a run measured, in numbers and in one line."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from timing import Timing


@dataclass
class Run:
    """The requests of a run: how many began, those that ended well, and how many failed.

    `facts` are further numbers that a load test wants to see in the summary.
    """

    began: int = 0
    finished: list[Timing] = field(default_factory=list)
    failed: int = 0
    facts: dict[str, float] = field(default_factory=dict)

    def reset(self) -> None:
        """Begins anew, in place: other modules hold this run."""
        vars(self).update(vars(Run()))

    def summary(self) -> dict[str, Any]:
        """Finished requests in numbers; times in milliseconds, None where there is nothing to tell.

        `unfinished` requests were cut off by the end of the run. Their tokens are not counted, nor those of the failed.
        """
        tokens = sum(timing.tokens for timing in self.finished)
        responses = sum(len(timing.responses) for timing in self.finished)
        seconds = self._seconds()
        return {
            "requests": len(self.finished),
            "failures": self.failed,
            "unfinished": self.began - len(self.finished) - self.failed,
            "seconds": round(seconds, 3),
            "tokens": tokens,
            "tokens_per_second": round(tokens / seconds, 2) if seconds else None,
            "tokens_per_response": round(tokens / responses, 3) if responses else None,
            "time_to_first_token_ms": _percentiles(timing.first_token for timing in self.finished),
            "inter_token_ms": _percentiles(timing.inter_token for timing in self.finished),
            "response_gap_ms": _percentiles(gap for timing in self.finished for gap in timing.gaps),
            "request_ms": _percentiles(timing.whole for timing in self.finished),
            **self.facts,
        }

    def _seconds(self) -> float:
        """From the start of the first finished request to the end of the last."""
        if not self.finished:
            return 0.0
        return max(timing.end for timing in self.finished) - min(timing.start for timing in self.finished)


def line(summary: dict[str, Any]) -> str:
    """The summary for people."""
    times = "".join(
        f", {name} p50 {summary[key]['p50']} p95 {summary[key]['p95']} ms"
        for name, key in (
            ("first token", "time_to_first_token_ms"),
            ("inter-token", "inter_token_ms"),
            ("gap between responses", "response_gap_ms"),
        )
    )
    return (
        f"{summary['requests']} requests, {summary['failures']} failed, {summary['unfinished']} cut off; "
        f"{summary['tokens_per_second']} tokens/s, {summary['tokens_per_response']} tokens a response{times}"
    )


def _percentiles(seconds: Iterable[float | None]) -> dict[str, float | None]:
    known = [value for value in seconds if value is not None]
    return {
        f"p{percent}": round(float(np.percentile(known, percent)) * 1e3, 2) if known else None for percent in (50, 95)
    }
