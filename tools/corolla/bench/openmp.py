"""OpenMP for the peer in this process."""

import os

SETTINGS = {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "20000"}
"""Fair to transformers beside a server that is idle: its threads spin on to the next kernel, and sleep soon after the
last one. Threads that sleep at once would be woken for every kernel; threads that spin for ever starve the server."""


def load_torch() -> None:
    """Imports torch, whose OpenMP reads the settings then; processes that are started later do not get them."""
    before = {name: os.environ.get(name) for name in SETTINGS}
    os.environ.update(SETTINGS)
    import torch  # noqa: F401

    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
