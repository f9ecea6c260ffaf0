"""The run directory of a server, and the folder of backends that goes with it.

The run directory is on shared memory: it holds the KV cache and the session table that all models of the server
share, so its path goes to them as COROLLA_RUN_DIR. The backends are put together in the temporary folder instead,
because /dev/shm is often mounted noexec and the backend library is loaded from there. `owner.json` names that folder
and the processes of the server. A lock held as long as the owner lives lets the next server find and remove what a
killed one has left behind.
"""

import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from corolla.errors import EnvironmentProblemError, InvalidValueError
from corolla.processes import ProcessIdentity
from corolla.server.checks import SHARED_MEMORY
from corolla.server.installation import Installation
from corolla.server.processes import kill_and_wait

_LOCK = "owner.lock"
_RECORD = "owner.json"
_PREFIX = "corolla-"
_BURIAL_SECONDS = 2.0
"""How long a directory may be in use because what a killed server has left is just being removed."""


class RunDirectory:
    """A directory owned by this process until `remove` or its death."""

    def __init__(self, path: Path | None = None) -> None:
        """Makes the directory; `path` must be new, empty, or left behind by a server that is dead."""
        self.path = _claim(path) if path else Path(tempfile.mkdtemp(prefix=_PREFIX, dir=SHARED_MEMORY))
        self._made = path is None
        self._lock = _take_lock(self.path)
        self.assembly = Path(tempfile.mkdtemp(prefix="corolla-backends-"))
        self.record([], [])

    def record(self, processes: Iterable[ProcessIdentity], regions: Iterable[Path]) -> None:
        """Writes down what to end and to remove if this process is killed."""
        content = {
            "assembly": str(self.assembly),
            "processes": [str(process) for process in processes],
            "regions": [str(region) for region in regions],
        }
        new = self.path / f"{_RECORD}.new"
        new.write_text(json.dumps(content))
        new.rename(self.path / _RECORD)

    def clear(self) -> None:
        """Empties the directory for a new server."""
        _empty(self.path)

    def remove(self) -> None:
        """Removes all that it holds, and itself unless the user named it."""
        shutil.rmtree(self.assembly, ignore_errors=True)
        _empty(self.path)
        (self.path / _RECORD).unlink(missing_ok=True)
        (self.path / _LOCK).unlink(missing_ok=True)
        os.close(self._lock)
        if self._made:
            self.path.rmdir()


def assemble_backends(assembly: Path, installation: Installation, backends: Path) -> tuple[Path, Path]:
    """Puts together what tritonserver loads: (backend directory, folder to put on the library path).

    The backend library is a copy, since tritonserver refuses a link that leads out of the directory; all else links.
    """
    directory, libraries = assembly / "backends", assembly / "lib"
    shutil.rmtree(directory, ignore_errors=True)
    shutil.rmtree(libraries, ignore_errors=True)
    python = directory / "python"
    python.mkdir(parents=True)
    shutil.copy(installation.backend_library, python)
    (python / installation.backend_utilities.name).symlink_to(installation.backend_utilities)
    (python / installation.stub.name).symlink_to(installation.stub)
    for backend in sorted(backends.iterdir()):
        if (backend / "model.py").exists():
            (directory / backend.name).symlink_to(backend.resolve())
    libraries.mkdir()
    (libraries / installation.libpython.name).symlink_to(installation.libpython)
    return directory, libraries


def remove_stale_run_directories() -> list[Path]:
    """Removes the run directories of this user whose owners are dead, with the processes they left; returns them."""
    return [path for path in SHARED_MEMORY.glob(f"{_PREFIX}*") if bury(path)]


def bury(path: Path) -> bool:
    """Removes a run directory of this user, with the processes it left, if its owner is dead; whether it did.

    A folder that the user named stays, empty.
    """
    try:
        mine = (path / _LOCK).stat().st_uid == os.getuid()
    except FileNotFoundError:
        return False
    buried = mine and _remove_stale(path)
    if buried and path.parent == SHARED_MEMORY and path.name.startswith(_PREFIX):
        path.rmdir()
    return buried


def _claim(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    deadline = time.monotonic() + _BURIAL_SECONDS
    while (path / _LOCK).exists() and not _remove_stale(path) and time.monotonic() < deadline:
        time.sleep(0.05)
    if (path / _LOCK).exists():
        raise EnvironmentProblemError(f"--run-dir: {path} is in use by another server: stop it, or pass another folder")
    if any(path.iterdir()):
        raise InvalidValueError("--run-dir", str(path), "a new or an empty folder, best on /dev/shm")
    return path.resolve()


def _take_lock(path: Path) -> int:
    """Locks before the name appears, so that nobody takes a directory in the making for a dead one."""
    new = path / f"{_LOCK}.new"
    descriptor = os.open(new, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    new.rename(path / _LOCK)
    return descriptor


def _remove_stale(path: Path) -> bool:
    """Ends and removes what a dead owner has left in `path` and elsewhere; False if the owner lives."""
    try:
        descriptor = os.open(path / _LOCK, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink == 0:  # another server has just cleaned up here
            return False
    except BlockingIOError:
        return False
    else:
        record = path / _RECORD
        content = json.loads(record.read_text()) if record.exists() else {}
        kill_and_wait(ProcessIdentity.parse(text) for text in content.get("processes", []))
        for region in content.get("regions", []):
            Path(region).unlink(missing_ok=True)
        if "assembly" in content:
            shutil.rmtree(content["assembly"], ignore_errors=True)
        _empty(path)
        record.unlink(missing_ok=True)
        (path / _LOCK).unlink()
        return True
    finally:
        os.close(descriptor)


def _empty(path: Path) -> None:
    for entry in path.iterdir():
        if entry.name in (_LOCK, _RECORD):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
