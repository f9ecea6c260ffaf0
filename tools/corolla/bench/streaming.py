"""Single-token steps one after the other, merged against unmerged."""

import statistics
from dataclasses import dataclass

from corolla.bench.lengths import MERGED, UNMERGED, milliseconds
from corolla.bench.stepping import SteppedSession, random_states
from corolla.repository.plan import RepositoryPlan

PROMPT_POSITIONS = 16
PETALS_MERGED, PETALS_UNMERGED = 25.9, 18.9
"""Tokens per second that Petals is known for, with blocks merged into one pool and with one pool per block."""


@dataclass(frozen=True)
class StreamedSteps:
    """Steps per second of one session after a prompt, medians of rounds; `ratio` is the median of their ratios."""

    steps: int
    merged: float
    unmerged: float
    ratio: float


def streamed_steps(rounds: list[tuple[float, float]], steps: int) -> StreamedSteps:
    """From the steps per second of each round, merged and unmerged."""
    return StreamedSteps(
        steps,
        statistics.median(merged for merged, _ in rounds),
        statistics.median(unmerged for _, unmerged in rounds),
        statistics.median(merged / unmerged for merged, unmerged in rounds),
    )


def run_steps(address: str, plan: RepositoryPlan, steps: int) -> tuple[float, float]:
    """Steps per second through `chain` and through `ranges`, hidden states in and out, the prompt not counted."""
    prompt, token = random_states(plan, PROMPT_POSITIONS), random_states(plan, 1)
    speeds = []
    with SteppedSession(address, plan, PROMPT_POSITIONS + steps) as session:
        for model in (MERGED, UNMERGED):
            session.step(model, prompt, 0)
            taken = milliseconds(lambda model=model: [  # type: ignore[misc]
                session.step(model, token, PROMPT_POSITIONS + step) for step in range(steps)
            ])  # fmt: skip
            speeds.append(steps * 1e3 / taken)
    return speeds[0], speeds[1]
