"""gRPC among the greenlets of Locust; to be imported before the first connection is made."""

import atexit
import os
import sys
from typing import Any

from grpc.experimental.gevent import init_gevent
from locust import events

init_gevent()


@events.quit.add_listener
def _end_at_once(exit_code: int, **_: Any) -> None:
    """Skips the interpreter's last clean-up: deleting a gRPC connection waits there for greenlets that are gone."""
    atexit.register(_end, exit_code)


def _end(exit_code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
