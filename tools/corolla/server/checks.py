"""What the machine must have before a server can start, each as one small check with its remedy."""

import importlib.metadata
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from corolla.errors import EnvironmentProblemError
from corolla.server.installation import LIBPYTHON, PYTHON_VERSION, find_libpython, find_stub, find_wheel

SHARED_MEMORY = Path("/dev/shm")
MIN_SHM_BYTES = 256 * 2**20
"""Room for the message regions of about ten models and a small KV cache."""


@dataclass(frozen=True)
class Check:
    """The outcome of one check: what was found, and what to do if it is not `ok`."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""


def run_checks(min_shm_bytes: int = MIN_SHM_BYTES) -> list[Check]:
    """What every server needs, in the order in which failures should be mended."""
    checks: list[Callable[[], Check]] = [
        check_platform,
        check_wheel,
        check_stub,
        check_numpy,
        check_libpython,
        check_tritonserver,
        check_bash,
        lambda: check_shared_memory(min_shm_bytes),
        check_temporary_folder,
    ]
    return [check() for check in checks]


def require_checks(min_shm_bytes: int = MIN_SHM_BYTES) -> None:
    """Raises EnvironmentProblemError with every failed check and its remedy."""
    failed = [check for check in run_checks(min_shm_bytes) if not check.ok]
    if failed:
        raise EnvironmentProblemError("\n  ".join(["this machine is not ready:", *map(describe, failed)]))


def describe(check: Check) -> str:
    """One line for a user."""
    return f"{check.name}: {check.detail}" + (f"; {check.remedy}" if check.remedy and not check.ok else "")


def check_platform() -> Check:
    system, machine = platform.system(), platform.machine()
    return Check(
        "platform",
        (system, machine) == ("Linux", "x86_64"),
        f"{system} {machine}",
        "the nvidia-pytriton wheel is for Linux on x86_64 only: use such a machine",
    )


def check_wheel() -> Check:
    found = find_wheel()
    return Check(
        "nvidia-pytriton",
        found is not None,
        _version("nvidia-pytriton") if found else "its tritonserver is not installed",
        "run `make setup`, or `pip install -c constraints.txt nvidia-pytriton`",
    )


def check_stub() -> Check:
    wheel = find_wheel()
    found = find_stub(wheel) if wheel else None
    offered = sorted(p.name for p in wheel.glob("tritonserver/python_backend_stubs/3.*")) if wheel else []
    return Check(
        "Python backend",
        found is not None,
        f"stub for Python {PYTHON_VERSION}" if found else f"the wheel has no stub for Python {PYTHON_VERSION}",
        f"make the virtual environment with a Python it has a stub for ({', '.join(offered) or 'none found'}), "
        "best 3.11: `make setup PYTHON=python3.11`",
    )


def check_numpy() -> Check:
    version = _version("numpy")
    return Check(
        "numpy",
        version.partition(".")[0] in ("0", "1"),
        version,
        "with numpy 2 the server returns empty tensors and no error: `pip install 'numpy>=1.26,<2'`",
    )


def check_libpython() -> Check:
    found = find_libpython()
    return Check(
        LIBPYTHON,
        found is not None,
        str(found) if found else f"not found for {sys.executable}",
        f"`apt-get install libpython{PYTHON_VERSION}`, or without root `{sys.executable} -m corolla.server.libpython`",
    )


def check_tritonserver() -> Check:
    """Whether the server's program starts at all: its shared libraries are found, the C library is new enough."""
    wheel = find_wheel()
    if wheel is None:
        return Check("tritonserver", False, "not installed", "see nvidia-pytriton")
    program = wheel / "tritonserver" / "bin" / "tritonserver"
    try:
        ran = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=60)
        complaint = "" if "Usage: tritonserver" in ran.stdout + ran.stderr else ran.stderr.strip()
        if ran.returncode < 0:
            complaint = f"killed by signal {-ran.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        complaint = str(error)
    return Check(
        "tritonserver",
        not complaint,
        f"{program} does not start: {complaint}" if complaint else "starts",
        "install the library it names (Debian: `apt-get install libstdc++6 zlib1g`); it needs glibc 2.35 or newer",
    )


def check_bash() -> Check:
    found = shutil.which("bash")
    return Check("bash", found is not None, found or "not found", "tritonserver starts models with it: install bash")


def check_shared_memory(min_bytes: int) -> Check:
    """Room in /dev/shm for the run directory and for the regions of the models' processes."""
    if not os.access(SHARED_MEMORY, os.W_OK):
        return Check(str(SHARED_MEMORY), False, "missing or not writable", "mount a tmpfs there")
    status = os.statvfs(SHARED_MEMORY)
    free = status.f_bavail * status.f_frsize
    return Check(
        str(SHARED_MEMORY),
        free >= min_bytes,
        f"{free / 2**20:,.0f} MiB free, {min_bytes / 2**20:,.0f} MiB needed",
        f"give it more room (docker run --shm-size, or `mount -o remount,size=... {SHARED_MEMORY}`) or remove what "
        "is left there of servers that no longer run",
    )


def check_temporary_folder() -> Check:
    """The backend library is copied to the temporary folder and loaded from there."""
    folder = Path(tempfile.gettempdir())
    usable = not os.statvfs(folder).f_flag & os.ST_NOEXEC
    return Check(
        "temporary folder",
        usable,
        str(folder) if usable else f"{folder} is mounted noexec",
        "set TMPDIR to a folder on a file system that allows programs",
    )


def check_compiler() -> Check:
    """Wanted by servers with compiled decoders only, the first time that they start."""
    command = shlex.split(os.environ.get("CXX", "g++"))[0]
    found = shutil.which(command)
    return Check(
        "C++ compiler",
        found is not None,
        found or f"{command} not found",
        "install one (Debian: apt-get install g++) or set CXX; `corolla init --decoder eager` does without, slowly",
    )


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
