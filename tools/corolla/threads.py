"""How idle threads of OpenMP behave in the processes of Corolla.

The kernels of a decode step have threads of their own (kernels/pool.h). OpenMP runs the rest: long prompts, training.
"""

import os

VARIABLE = "OMP_WAIT_POLICY"
PASSIVE = "PASSIVE"
"""Idle threads sleep: those that spin starve other processes (steps of 6 ms took 70)."""


def let_idle_threads_sleep(environment: dict[str, str] | None = None) -> None:
    """Sets the policy unless one is set. For this process, call it before torch is imported."""
    (os.environ if environment is None else environment).setdefault(VARIABLE, PASSIVE)
