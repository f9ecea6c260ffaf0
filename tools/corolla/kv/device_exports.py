"""Device memory that one process allocates and the other processes of a server open.

On CUDA this is done with IPC handles, through the reductions of torch.multiprocessing. A handle is good as long as
the process that allocated the memory lives. The logic is the same for CPU tensors, which is how it is tested.
"""

import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import torch
import torch.multiprocessing  # registers the reductions of tensors with ForkingPickler
from filelock import FileLock

from corolla.kv.shared_memory import map_array
from corolla.processes import ProcessIdentity

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class _Export:
    """Who allocated some tensors, and the handles by which others open them."""

    owner: str
    handles: bytes


class DeviceExports:
    """Named groups of tensors on one device, allocated once for all processes of a server.

    `generation` counts how often a successor had to allocate again what a dead owner had: a process that finds
    another number than before opens its tensors again.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        with FileLock(directory / "lock"):
            self._generation = map_array(directory / "generation", (1,), np.dtype(np.int64))
        self._owned: dict[str, Tensors] = {}

    @property
    def generation(self) -> int:
        """The same number in all processes."""
        return int(self._generation[0])

    def get(self, name: str, make: Callable[[], Tensors]) -> Tensors:
        """The tensors of a group: those of this process, those of a living owner, or new ones from `make`."""
        if name in self._owned:
            return self._owned[name]
        with FileLock(self._directory / f"{name}.lock"):
            export = self._read(name)
            if export is not None and ProcessIdentity.parse(export.owner).is_alive():
                opened: Tensors = pickle.loads(export.handles)
                return opened
            tensors = self._allocate(name, make)
        if export is not None:
            with FileLock(self._directory / "lock"):
                self._generation[0] += 1
        return tensors

    def _allocate(self, name: str, make: Callable[[], Tensors]) -> Tensors:
        tensors = make()
        handles = bytes(ForkingPickler.dumps(tensors))
        unfinished = self._directory / f"{name}.part"
        unfinished.write_bytes(pickle.dumps(_Export(str(ProcessIdentity.current()), handles)))
        os.replace(unfinished, self._directory / name)
        self._owned[name] = tensors
        return tensors

    def _read(self, name: str) -> _Export | None:
        file = self._directory / name
        if not file.exists():
            return None
        export: _Export = pickle.loads(file.read_bytes())
        return export
