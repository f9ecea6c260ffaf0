"""A supervised server in a thread of this process."""

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from corolla.server.options import ServerOptions
from corolla.server.supervisor import ReadyServer, Supervisor


@contextmanager
def background_server(options: ServerOptions, sink: TextIO) -> Iterator[ReadyServer]:
    """Serves while the context lasts; raises what `Supervisor.run` raises if the server does not start."""
    outcome: queue.SimpleQueue[ReadyServer | Exception] = queue.SimpleQueue()
    supervisor = Supervisor(options, outcome.put, sink)

    def serve() -> None:
        try:
            supervisor.run()
        except Exception as error:
            outcome.put(error)

    thread = threading.Thread(target=serve, name="supervisor")
    thread.start()
    try:
        first = outcome.get()
        if isinstance(first, Exception):
            raise first
        yield first
    finally:
        supervisor.stop()
        thread.join()
