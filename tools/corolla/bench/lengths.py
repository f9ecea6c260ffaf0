"""One step merged (`chain`) against unmerged (`ranges`), over the number of its positions."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tqdm import tqdm

from corolla.bench.serving import BenchServer
from corolla.bench.stepping import SteppedSession, random_states
from corolla.model.shape import ModelShape

MERGED, UNMERGED = "chain", "ranges"


@dataclass(frozen=True)
class StepTimes:
    """Median milliseconds of one step of `positions` positions, as its client sees it."""

    positions: int
    merged: float
    unmerged: float


@dataclass(frozen=True)
class Effort:
    """At most so many repetitions and seconds per length; three repetitions at least."""

    repetitions: int
    seconds: float


def measure_lengths(server: BenchServer, most: int, effort: Effort) -> list[StepTimes]:
    """Lengths 1, 2, 4, ... up to `most` and the context. Each step starts at position 0 again."""
    lengths = powers_of_two(min(most, ModelShape.of(server.plan.config).context_length))
    with SteppedSession(server.grpc, server.plan, lengths[-1]) as session:
        return [_measure(session, server, positions, effort) for positions in tqdm(lengths, desc="lengths", unit="T")]


def crossing(times: Sequence[StepTimes], tolerance: float = 0.0) -> int | None:
    """The smallest length from which on unmerged steps take at most 1 + `tolerance` times as long; None for none."""
    found = None
    for step in sorted(times, key=lambda step: step.positions, reverse=True):
        if step.unmerged > step.merged * (1 + tolerance):
            break
        found = step.positions
    return found


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [2**exponent for exponent in range(most.bit_length())]


def _measure(session: SteppedSession, server: BenchServer, positions: int, effort: Effort) -> StepTimes:
    """The models take turns, so that what else goes on in the machine meets both."""
    hidden_states = random_states(server.plan, positions)
    taken: dict[str, list[float]] = {MERGED: [], UNMERGED: []}
    for model in taken:
        session.step(model, hidden_states, 0)
    deadline = time.monotonic() + effort.seconds
    while len(taken[UNMERGED]) < min(3, effort.repetitions) or (
        len(taken[UNMERGED]) < effort.repetitions and time.monotonic() < deadline
    ):
        for model, times in taken.items():
            times.append(milliseconds(lambda model=model: session.step(model, hidden_states, 0)))  # type: ignore[misc]
    return StepTimes(positions, statistics.median(taken[MERGED]), statistics.median(taken[UNMERGED]))


def milliseconds(act: Callable[[], object]) -> float:
    """Time of one call."""
    start = time.perf_counter()
    act()
    return (time.perf_counter() - start) * 1e3
