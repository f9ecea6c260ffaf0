"""OpenMP for the peer in this process."""

import os

SETTINGS = {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "20000"}
"""Best for transformers beside a server that is idle: its threads spin until the next kernel, half a millisecond at
most. With threads that sleep at once it is a third slower, with threads that spin for ever it starves the server."""


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
