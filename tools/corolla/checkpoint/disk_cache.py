"""A disk cache of files that many processes map at once: one writer per entry, least recently used leaves first."""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from corolla.errors import EnvironmentProblemError, InvalidValueError

KEEP_FREE = 2**30
"""Bytes of the disk that are left free when no limit is set."""

SUFFIX = ".safetensors"


@dataclass(frozen=True)
class CacheEntry:
    """One file of the cache: its name, size in bytes, last use (seconds since the epoch), whether it is mapped."""

    name: str
    file: Path
    size: int
    last_used: float
    in_use: bool


class DiskCache:
    """The cache in one folder.

    A process keeps a shared lock on every file it maps, for as long as it lives; only files that nobody has
    locked are evicted. `limit` is in bytes; None leaves KEEP_FREE bytes of the disk free.
    """

    def __init__(self, folder: Path, limit: int | None) -> None:
        self.folder = folder
        self._limit = limit
        self._mapped: list[int] = []

    @classmethod
    def default(cls) -> "DiskCache":
        """In COROLLA_CACHE (else `corolla` in the user's cache folder), of at most COROLLA_CACHE_LIMIT bytes."""
        base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
        limit = os.environ.get("COROLLA_CACHE_LIMIT")
        if limit is not None and not limit.isdecimal():
            raise InvalidValueError("COROLLA_CACHE_LIMIT", limit, "a whole number of bytes")
        return cls(Path(os.environ.get("COROLLA_CACHE", base / "corolla")), None if limit is None else int(limit))

    def get(self, name: str, make: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """The tensors stored as `name`, mapped read-only; `make` provides them if they are not stored yet.

        EnvironmentProblemError when there is no room or the folder cannot be written.
        """

        def store(target: Path) -> None:
            tensors = make()
            self._make_room(sum(tensor.nbytes for tensor in tensors.values()))
            save_file(tensors, target)

        file = self.file(f"{name}{SUFFIX}", store)
        try:
            with safe_open(file, framework="pt") as stored:
                return {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise EnvironmentProblemError(f"{file}: damaged ({error}); run `corolla cache clear`") from error

    def file(self, name: str, make: Callable[[Path], None]) -> Path:
        """The file stored as `name`, which stays as long as this process lives; `make` writes it if need be.

        EnvironmentProblemError as for `get`.
        """
        file = self.folder / name
        while not self._hold(file):
            self._write(file, make)
        os.utime(file)
        return file

    def entries(self) -> list[CacheEntry]:
        """What is stored, the least recently used first."""
        found = []
        for file in _files(self.folder):
            with suppress(FileNotFoundError), _exclusive(file) as free:
                status = file.stat()
                name = file.relative_to(self.folder).as_posix().removesuffix(SUFFIX)
                found.append(CacheEntry(name, file, status.st_size, status.st_mtime, not free))
        return sorted(found, key=lambda entry: entry.last_used)

    def prune(self, limit: int) -> list[CacheEntry]:
        """Evicts the least recently used files until at most `limit` bytes are left; returns what was evicted.

        Files in use stay. What a killed writer left is removed as well.
        """
        for workshop in self.folder.glob("unfinished/*"):
            with suppress(Timeout), FileLock(self.folder / "locks" / workshop.name, timeout=0):
                shutil.rmtree(workshop, ignore_errors=True)
        evicted = []
        entries = self.entries()
        total = sum(entry.size for entry in entries)
        for entry in entries:
            if total <= limit:
                break
            if self._evict(entry.file):
                total -= entry.size
                evicted.append(entry)
        return evicted

    def _hold(self, file: Path) -> bool:
        """Locks a file against eviction; False when it does not exist, or was evicted this moment."""
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise EnvironmentProblemError(f"{file}: {error.strerror}; set COROLLA_CACHE to another folder") from error
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if os.fstat(descriptor).st_nlink == 0:
            os.close(descriptor)
            return False
        self._mapped.append(descriptor)
        return True

    def _write(self, file: Path, make: Callable[[Path], None]) -> None:
        name = file.relative_to(self.folder).as_posix().removesuffix(SUFFIX).replace("/", "-")
        workshop = self.folder / "unfinished" / name
        try:
            for folder in (file.parent, workshop.parent, self.folder / "locks"):
                folder.mkdir(parents=True, exist_ok=True)
            with FileLock(self.folder / "locks" / name):
                if file.exists():
                    return
                shutil.rmtree(workshop, ignore_errors=True)  # what a killed writer left
                workshop.mkdir()
                try:
                    make(workshop / file.name)
                    _flush(workshop / file.name)
                    (workshop / file.name).rename(file)
                finally:
                    shutil.rmtree(workshop, ignore_errors=True)
        except (OSError, SafetensorError) as error:
            raise EnvironmentProblemError(
                f"{file}: cannot be written ({error}); free disk space or set COROLLA_CACHE to another folder"
            ) from error

    def _make_room(self, size: int) -> None:
        total = sum(entry.size for entry in self.entries())
        limit = self._limit
        if limit is None:
            limit = total + shutil.disk_usage(self.folder).free - KEEP_FREE
        self.prune(limit - size)
        remaining = sum(entry.size for entry in self.entries())
        if remaining + size > limit:
            raise EnvironmentProblemError(
                f"{self.folder}: no room for {size} more bytes beside {remaining} that cannot be evicted (limit "
                f"{limit}); free disk space, raise COROLLA_CACHE_LIMIT or set COROLLA_CACHE to another folder"
            )

    @staticmethod
    def _evict(file: Path) -> bool:
        with suppress(FileNotFoundError), _exclusive(file) as free:
            if free:
                file.unlink()
            return free
        return False


def _files(folder: Path) -> list[Path]:
    """The finished entries in a cache's folder."""
    inside = {child for child in folder.glob("*") if child.name not in ("locks", "unfinished")}
    return [file for child in inside for file in (child, *child.glob("**/*")) if file.is_file()]


@contextmanager
def _exclusive(file: Path) -> Iterator[bool]:
    """Whether nobody maps the file; nobody can begin to while the context lasts."""
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(descriptor)


def _flush(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
