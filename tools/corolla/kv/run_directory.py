"""The directory that holds what the processes of one server share while it runs."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from corolla.errors import EnvironmentProblemError
from corolla.kv.layout import KVLayout
from corolla.processes import ProcessIdentity

SHARED_MEMORY = Path("/dev/shm")
ENVIRONMENT_VARIABLE = "COROLLA_RUN_DIR"
SESSIONS, USED, PINS, LAYOUT = "sessions.sqlite", "used", "pins", "layout.json"
"""Files in it: the session table, when each record was last used, and who uses it now."""


def run_directory() -> Path:
    """The directory named by COROLLA_RUN_DIR, which `corolla serve` sets for its server.

    Under a plain tritonserver, one in /dev/shm named after the server's process, the parent of every model's;
    those of servers that are gone are removed.
    """
    if ENVIRONMENT_VARIABLE in os.environ:
        return Path(os.environ[ENVIRONMENT_VARIABLE])
    for left_behind in SHARED_MEMORY.glob("corolla-*-*"):
        if not _is_of_living_server(left_behind):
            shutil.rmtree(left_behind, ignore_errors=True)
    return SHARED_MEMORY / f"corolla-{ProcessIdentity.of(os.getppid())}"


def _is_of_living_server(directory: Path) -> bool:
    try:
        return ProcessIdentity.parse(directory.name.removeprefix("corolla-")).is_alive()
    except ValueError:
        return True


@contextmanager
def prepared_run_directory(path: Path, layout: KVLayout) -> Iterator[None]:
    """Holds the directory's lock while the caller creates or opens its files.

    Raises EnvironmentProblemError when another model with another layout uses the directory already.
    """
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    with FileLock(path / "lock"):
        recorded = path / LAYOUT
        if not recorded.exists():
            unfinished = path / f"{LAYOUT}.new"
            unfinished.write_text(layout.to_json())
            unfinished.rename(recorded)
        elif recorded.read_text() != layout.to_json():
            raise EnvironmentProblemError(
                f"{recorded}: holds the KV cache of another model or configuration ({recorded.read_text()}, not "
                f"{layout.to_json()}); all models of a server must agree: write the repository anew with "
                "`corolla init` and restart the server"
            )
        yield
