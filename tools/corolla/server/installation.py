"""Where the parts of the stock Triton server are: in the nvidia-pytriton wheel and around this Python."""

import importlib.util
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import corolla
from corolla.errors import EnvironmentProblemError

PYTHON_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
LIBPYTHON = f"libpython{PYTHON_VERSION}.so.1.0"


@dataclass(frozen=True)
class Installation:
    """The files that one server is put together from."""

    tritonserver: Path
    backend_library: Path
    """libtriton_python.so"""
    backend_utilities: Path
    """triton_python_backend_utils.py"""
    stub: Path
    """triton_python_backend_stub for this Python version"""
    wheel_libraries: Path
    """nvidia_pytriton.libs"""
    libpython: Path

    @classmethod
    def find(cls) -> "Installation":
        """The installation of this virtual environment; EnvironmentProblemError where a part is missing."""
        wheel, libpython = find_wheel(), find_libpython()
        stub = find_stub(wheel) if wheel else None
        if wheel is None or stub is None or libpython is None:
            raise EnvironmentProblemError("the server's files are not complete; `corolla doctor` tells what to do")
        python_backend = wheel / "tritonserver" / "backends" / "python"
        return cls(
            tritonserver=wheel / "tritonserver" / "bin" / "tritonserver",
            backend_library=python_backend / "libtriton_python.so",
            backend_utilities=python_backend / "triton_python_backend_utils.py",
            stub=stub,
            wheel_libraries=wheel.parent / "nvidia_pytriton.libs",
            libpython=libpython,
        )


def find_wheel() -> Path | None:
    """The folder of the installed package pytriton that brings tritonserver, or None."""
    spec = importlib.util.find_spec("pytriton")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / "tritonserver" / "bin" / "tritonserver").exists():
            return Path(folder)
    return None


def find_stub(wheel: Path) -> Path | None:
    """The wheel's Python backend stub for this Python version, or None."""
    stub = wheel / "tritonserver" / "python_backend_stubs" / PYTHON_VERSION / "triton_python_backend_stub"
    return stub if stub.exists() else None


def find_libpython() -> Path | None:
    """The shared library of this Python version, or None: Debian links its python3 statically.

    `make setup` unpacks one into the virtual environment's folder `libpython` where the system has none.
    """
    architecture = sysconfig.get_config_var("MULTIARCH") or "x86_64-linux-gnu"
    folders = [
        Path(sysconfig.get_config_var("LIBDIR") or "/usr/lib"),
        Path(sys.base_prefix) / "lib",
        Path(sys.prefix) / "libpython" / "usr" / "lib" / architecture,
        *(Path(folder) / architecture for folder in ("/usr/lib", "/lib")),
        *map(Path, ("/usr/lib64", "/usr/local/lib")),
    ]
    return next((folder / LIBPYTHON for folder in folders if (folder / LIBPYTHON).exists()), None)


def find_backends() -> Path:
    """The folder `backends` of the project this package is installed from in editable mode."""
    for folder in Path(corolla.__file__).resolve().parents:
        if (folder / "pyproject.toml").exists():
            return folder / "backends"
    raise EnvironmentProblemError(
        "the project's folder `backends` is not beside this package: pass it with --backends DIR, or install the "
        "project from its checkout with `pip install -e .`"
    )
