"""Waiting for what other threads and processes do."""

import time
from collections.abc import Callable


def wait_until(holds: Callable[[], bool], timeout: float = 20.0) -> None:
    """Returns as soon as the condition holds; AssertionError when it does not come to hold in time."""
    deadline = time.monotonic() + timeout
    while not holds():
        assert time.monotonic() < deadline, f"the condition did not come to hold within {timeout} s"
        time.sleep(0.005)
