"""How much memory the devices of this machine have for a server, limits of containers included."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from corolla.cgroups import memory_limits
from corolla.errors import InvalidValueError

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class DeviceMemory:
    """A device by its name, cpu or cuda:0, and its bytes: `total`, and `free` for a server that starts now.

    `limit` says what `free` goes by.
    """

    device: str
    total: int
    free: int
    limit: str


def device_memories(device: str, count: int = 0) -> tuple[DeviceMemory, ...]:
    """The machine's memory for `cpu`, each GPU's for `cuda`; the first `count` of them, 0 for all.

    InvalidValueError when there are fewer.
    """
    found = (_host_memory(),) if device == "cpu" else tuple(_gpu_memories())
    if len(found) < max(count, 1):
        raise InvalidValueError("devices", count or 1, f"at most {len(found)}: this machine has no more of {device}")
    return found[:count] if count else found


def assumed_memories(device: str, count: int, free: int) -> tuple[DeviceMemory, ...]:
    """GPUs of some other machine, each with so many free bytes."""
    return tuple(DeviceMemory(f"{device}:{index}", free, free, "--memory") for index in range(count))


def shared_memory_free() -> int:
    """Bytes that files in /dev/shm, such as the KV cache on CPUs, may still take."""
    return psutil.disk_usage(str(SHARED_MEMORY)).free


def _host_memory() -> DeviceMemory:
    memory = psutil.virtual_memory()
    total, free, limit = memory.total, memory.available, "available memory of the machine"
    for group_limit, used in memory_limits():
        if group_limit - used < free:
            total, free, limit = group_limit, group_limit - used, "memory limit of the container, less what it uses"
    return DeviceMemory("cpu", total, max(0, free), limit)


def _gpu_memories() -> Iterator[DeviceMemory]:
    import torch

    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        yield DeviceMemory(f"cuda:{index}", total, free, "free memory of the device")
