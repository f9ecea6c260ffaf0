"""How many threads the processes of Corolla have, and how idle threads of OpenMP behave in them.

The kernels of a decode step have threads of their own (kernels/pool.h). OpenMP runs the rest: long prompts, training.
"""

import os

from corolla.cgroups import usable_cores

VARIABLE = "OMP_WAIT_POLICY"
PASSIVE = "PASSIVE"
"""Idle threads sleep: those that spin starve other processes (steps of 6 ms took 70)."""


def let_idle_threads_sleep(environment: dict[str, str] | None = None) -> None:
    """Sets the policy unless one is set. For this process, call it before torch is imported."""
    (os.environ if environment is None else environment).setdefault(VARIABLE, PASSIVE)


def thread_count(wanted: int, shards: int = 1) -> int:
    """Threads of a process: `wanted`, 0 for as many as there are, but never more than its shard's part of the cores.

    All processes may have one thread per core: mostly one of them computes at a time, and the kernels of several at
    once wait for nobody (kernels/pool.h).
    """
    most = max(1, usable_cores() // shards)
    return min(wanted or most, most)
