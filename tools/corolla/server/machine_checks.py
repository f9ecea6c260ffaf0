"""What `corolla doctor` checks of the machine beyond what every server needs."""

import importlib.metadata
import shutil
import subprocess

from packaging.requirements import Requirement

from corolla.server.checks import Check
from corolla.server.endpoints import port_problem

_NAMED = ("corolla", "torch", "transformers", "tritonclient")
_LEAST_MEMORY = 2 * 2**30
"""What the processes of a server take without any weights."""
_DRIVER_SECONDS = 20


def check_versions() -> Check:
    """Whether what is installed is what this package asks for."""
    wrong = []
    for text in importlib.metadata.requires("corolla") or []:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = _version(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version or 'is missing'}, wanted {requirement.specifier}")
    named = ", ".join(f"{name} {_version(name)}" for name in _NAMED)
    return Check("versions", not wrong, "; ".join(wrong) or named, "run `make setup` for those that were tested")


def check_port(service: str, host: str, port: int) -> Check:
    """Whether a server can listen there."""
    problem = port_problem(host, port) if port else None
    return Check(
        f"{service} port",
        problem is None,
        f"any free one of {host}" if not port else f"{host}:{port} {'is free' if problem is None else problem}",
        f"stop what uses it, which may be a server of yours, or pass another --{service}-port (0: any free one)",
    )


def check_memory() -> Check:
    """Whether there is room for the processes of a server; weights and KV cache are another check's."""
    from corolla.planning.machine import device_memories
    from corolla.planning.quantity import bytes_text

    (memory,) = device_memories("cpu")
    return Check(
        "memory",
        memory.free >= _LEAST_MEMORY,
        f"{bytes_text(memory.free)} free of {bytes_text(memory.total)} ({memory.limit})",
        f"a server takes {bytes_text(_LEAST_MEMORY)} before any weights: end other programs, or give the container "
        "more",
    )


def check_gpu(device: str) -> Check:
    """GPUs and their driver; none are needed unless `device` is cuda."""
    wanted = device == "cuda"
    driver, complaint = _driver()
    if driver is None:
        return Check(
            "GPU",
            not wanted,
            f"none ({complaint}); models run on CPUs" if not wanted else complaint,
            "install NVIDIA's driver; in a container, start it with --gpus all and NVIDIA's container toolkit",
        )
    import torch

    if torch.version.cuda is None:
        return Check(
            "GPU", not wanted, f"{driver}; torch {torch.__version__} is for CPUs only", "install a torch with CUDA"
        )
    usable = torch.cuda.is_available()
    return Check(
        "GPU",
        usable or not wanted,
        f"{driver}; CUDA {torch.version.cuda} of torch {'works' if usable else 'does not work with it'}",
        "install a newer driver, or a torch for an older CUDA",
    )


def _driver() -> tuple[str | None, str]:
    """GPUs with their memory and driver as nvidia-smi says, or None and why not."""
    if shutil.which("nvidia-smi") is None:
        return None, "no nvidia-smi"
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        ran = subprocess.run(query, capture_output=True, text=True, timeout=_DRIVER_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"nvidia-smi: {error}"
    if ran.returncode != 0 or not ran.stdout.strip():
        return None, f"nvidia-smi: {(ran.stdout + ran.stderr).strip() or 'no GPUs'}"
    return "; ".join(ran.stdout.strip().splitlines()), ""


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
