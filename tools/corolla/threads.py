"""How OpenMP's idle threads behave in every process of Corolla."""

import os

THREAD_SETTINGS = {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "20000"}
"""Idle threads spin for a moment only, long enough for the next kernel of the same step: threads that spin on starve
those of other models (steps of 6 ms took 70), threads that sleep at once wake too late (6 ms took 13). With the policy
PASSIVE, GNU's OpenMP would not spin at all in a process that has more threads than processors."""


def apply_thread_settings(environment: dict[str, str] | None = None) -> None:
    """Sets what is not set yet. For this process, call it before torch is imported."""
    target = os.environ if environment is None else environment
    for variable, value in THREAD_SETTINGS.items():
        target.setdefault(variable, value)
