"""The limits of the control groups that this process is in, as containers have them, of both versions of Linux's."""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def memory_limits(mount: Path = MOUNT, own: Path = OWN) -> list[tuple[int, int]]:
    """Limit and use in bytes, without file cache that can be dropped, of each group around us that has a limit."""
    found = []
    for folder, version in _groups("memory", mount, own):
        limit_name, use_name, cache_name = {
            1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            2: ("memory.max", "memory.current", "inactive_file"),
        }[version]
        with suppress(OSError, ValueError):  # no such file, or "max"
            limit, used = int((folder / limit_name).read_text()), int((folder / use_name).read_text())
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            if limit < _NO_LIMIT:
                found.append((limit, max(0, used - int(statistics.get(cache_name, 0)))))
    return found


_NO_LIMIT = 2**60
"""Version 1 writes nearly 2 ** 63 where there is none."""


def usable_cores(mount: Path = MOUNT, own: Path = OWN) -> int:
    """Processors that this process may run on, and may use in full: a container may have part of their time."""
    cores = len(os.sched_getaffinity(0))
    for folder, version in _groups("cpu", mount, own):
        with suppress(OSError, ValueError):
            if version == 2:
                quota, period = map(int, (folder / "cpu.max").read_text().split())
            else:
                quota = int((folder / "cpu.cfs_quota_us").read_text())
                period = int((folder / "cpu.cfs_period_us").read_text())
            if quota > 0:
                cores = min(cores, max(1, math.ceil(quota / period)))
    return cores


def _groups(controller: str, mount: Path, own: Path) -> Iterator[tuple[Path, int]]:
    """The folders of our group and of those around it, with the version; in a container, some are not to be seen."""
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = mount / controller if controllers else mount
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            yield folder, 1 if controllers else 2
            if folder == top:
                break
