"""Builds the CPU kernels for this machine, once, into the disk cache."""

import hashlib
import os
import platform
import shlex
import subprocess
from functools import cache
from pathlib import Path

import torch

from corolla.checkpoint.disk_cache import DiskCache
from corolla.errors import EnvironmentProblemError

_UNITS = ("cpu.cpp", "programs.cpp")
_HEADERS = ("compact.h", "quantized.h", "tile.h", "lora.h", "pool.h")
UNITS, HEADERS = (tuple(Path(__file__).with_name(name) for name in names) for names in (_UNITS, _HEADERS))
"""What is compiled, and what that includes."""
FLAGS = ("-std=c++20", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-w")


def compiler() -> list[str]:
    """The C++ compiler's command: CXX, else g++. EnvironmentProblemError when it does not run."""
    command = shlex.split(os.environ.get("CXX", "g++"))
    try:
        subprocess.run([*command, "--version"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise EnvironmentProblemError(
            f"compiled decoders need a C++ compiler, and {shlex.join(command)} does not run ({error}); install one "
            "(Debian: apt-get install g++), set CXX, or write the repository with --decoder eager"
        ) from error
    return command


@cache
def processor_flags() -> frozenset[str]:
    """What this processor can do, by the names of Linux; empty where it does not tell."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return frozenset(next((line for line in lines if line.startswith("flags")), "").partition(":")[2].split())


@cache
def machine_key() -> str:
    """Names what compiled code depends on outside its source: torch and the kind of processor."""
    info = Path("/proc/cpuinfo")
    flags = [line for line in info.read_text().splitlines() if line.startswith("flags")] if info.exists() else []
    processor = flags[0] if flags else platform.processor()
    return hashlib.sha256(f"{torch.__version__}:{platform.machine()}:{processor}".encode()).hexdigest()[:16]


@cache
def load_kernels() -> None:
    """Makes the CPU implementations of `torch.ops.corolla` available in this process, building them if need be.

    They use as many threads as PyTorch does at this moment.
    """
    import corolla.kernels.ops  # noqa: F401  (their definitions)

    load_library(build(DiskCache.default()))
    torch.ops.corolla.set_threads(torch.get_num_threads())


def load_library(file: Path) -> None:
    """Loads a built library."""
    torch.ops.load_library(file)


def build(cache: DiskCache, extra_flags: tuple[str, ...] = ()) -> Path:
    """The library's file; compiled if it is not in `cache` yet. EnvironmentProblemError when that fails."""
    source = hashlib.sha256(
        b"".join(map(Path.read_bytes, UNITS + HEADERS)) + repr(FLAGS + extra_flags).encode()
    ).hexdigest()[:16]
    return cache.file(f"kernels/{machine_key()}-{source}.so", lambda target: _compile(target, extra_flags))


def _compile(target: Path, extra_flags: tuple[str, ...]) -> None:
    from torch.utils import cpp_extension  # takes a fifth of a second to import

    include = [f"-I{path}" for path in cpp_extension.include_paths()]
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    command = [
        *compiler(), *FLAGS, *extra_flags, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *include, *map(str, UNITS), "-o", str(target), *libraries, "-ltorch", "-ltorch_cpu", "-lc10",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise EnvironmentProblemError(
            f"the CPU kernels cannot be compiled ({shlex.join(command)}): {done.stderr[-2000:]}; "
            "try another compiler (CXX), or write the repository with --decoder eager"
        )
