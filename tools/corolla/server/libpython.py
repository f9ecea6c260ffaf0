"""Provides libpython where the system has none, without root: `python -m corolla.server.libpython`.

Debian and Ubuntu link python3 statically and keep the shared library, which the Python backend needs, in a package of
its own. It is downloaded and unpacked into the virtual environment, where `find_libpython` looks for it.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from corolla.errors import EnvironmentProblemError
from corolla.server.installation import LIBPYTHON, PYTHON_VERSION, find_libpython

_PACKAGE = f"libpython{PYTHON_VERSION}"


def provide_libpython() -> Path:
    """The library's path, after a download if need be; EnvironmentProblemError where that cannot be done."""
    if not find_libpython() and shutil.which("apt-get") and shutil.which("dpkg"):
        with tempfile.TemporaryDirectory() as folder:
            _download(Path(folder))
            for package in Path(folder).glob("*.deb"):
                subprocess.run(["dpkg", "-x", package, Path(sys.prefix) / "libpython"], check=True)
    found = find_libpython()
    if found is None:
        raise EnvironmentProblemError(
            f"{LIBPYTHON} is missing and could not be downloaded: `apt-get install {_PACKAGE}` (as root), or use a "
            "Python that is built with --enable-shared"
        )
    return found


def _download(folder: Path) -> None:
    """Downloads the package with the system's package lists, or with lists of its own where those are missing."""
    own_lists = [f"-o=Dir::State={folder / 'state'}", f"-o=Dir::Cache={folder / 'cache'}"]
    (folder / "state" / "lists" / "partial").mkdir(parents=True)
    (folder / "cache" / "archives" / "partial").mkdir(parents=True)
    if not _apt_get(folder, "download", _PACKAGE) and _apt_get(folder, *own_lists, "update"):
        _apt_get(folder, *own_lists, "download", _PACKAGE)


def _apt_get(folder: Path, *arguments: str) -> bool:
    return subprocess.run(["apt-get", "-qq", *arguments], cwd=folder).returncode == 0


if __name__ == "__main__":
    try:
        print(f"libpython: {provide_libpython()}")
    except EnvironmentProblemError as error:
        sys.exit(f"corolla: {error}")
