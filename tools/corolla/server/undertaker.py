"""Outlives a server that is killed, and removes what that leaves behind.

tritonserver dies with its supervisor. Its stubs notice that and end by themselves, except those that are telling it
something at that moment: Triton's Python backend waits for ever for the answer, and holds the interpreter meanwhile.
"""

import os
import select
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from corolla.server.run_directory import bury


def watch_over(run_directory: Path) -> None:
    """Starts the process that buries this one, should it die without removing its run directory."""
    subprocess.Popen(
        [sys.executable, "-m", "corolla.server.undertaker", run_directory, str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def main(run_directory: Path, owner: int) -> None:
    """Waits for the end of the `owner`, which started this process."""
    with suppress(ProcessLookupError):
        descriptor = os.pidfd_open(owner)
        if os.getppid() == owner:
            select.select([descriptor], [], [])
    bury(run_directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
