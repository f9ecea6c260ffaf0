"""What a run of generations side by side took."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """One session: when it was sent, when its first token came, when its last; seconds of one clock."""

    sent: float
    first: float
    last: float
    tokens: int


@dataclass(frozen=True)
class RunResult:
    """Sessions that were sent together.

    `decode` is the sum over sessions of (tokens - 1) / (last - first), in tokens per second: decoding alone.
    `whole` is all tokens over the time from the first request to the last token, prompts included.
    `first_token` is the median time to the first token, in seconds.
    """

    decode: float
    whole: float
    first_token: float

    @classmethod
    def of(cls, timings: Sequence[Timing]) -> "RunResult":
        """The figures of one run. Sessions that got everything in one response decode at no speed."""
        seconds = max(t.last for t in timings) - min(t.sent for t in timings)
        return cls(
            decode=sum((t.tokens - 1) / (t.last - t.first) for t in timings if t.last > t.first),
            whole=sum(t.tokens for t in timings) / seconds,
            first_token=statistics.median(t.first - t.sent for t in timings),
        )


def median_result(results: Sequence[RunResult]) -> RunResult:
    """The medians of repeated runs, figure by figure."""
    return RunResult(
        decode=statistics.median(r.decode for r in results),
        whole=statistics.median(r.whole for r in results),
        first_token=statistics.median(r.first_token for r in results),
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-len(ordered) * percent // 100) - 1)]
