"""The formats of weight files. Both are mapped: of a file, only the tensors that are used are read."""

from pathlib import Path
from pickle import UnpicklingError
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from corolla.errors import CheckpointError

PICKLE = b"\x80"
"""How a pickle begins, and with it the files of an old `torch.save`; those of today are zip archives."""


class WeightFormat(Protocol):
    """A format, by the names of a checkpoint's only file and of the index of many.

    CheckpointError for a file that cannot be read.
    """

    single: str
    index: str

    def names(self, file: Path) -> list[str]:
        """The names of all tensors in a file."""

    def read(self, file: Path, names: list[str]) -> dict[str, torch.Tensor]:
        """Tensors of a file, mapped, in the dtype they are stored in."""


class Safetensors:
    """See WeightFormat."""

    single = "model.safetensors"
    index = "model.safetensors.index.json"

    def names(self, file: Path) -> list[str]:
        """See WeightFormat."""
        try:
            with safe_open(file, framework="pt") as stored:
                return list(stored.keys())
        except (OSError, SafetensorError) as error:
            raise _unreadable(file, error) from error

    def read(self, file: Path, names: list[str]) -> dict[str, torch.Tensor]:
        """See WeightFormat."""
        try:
            with safe_open(file, framework="pt") as stored:
                return {name: stored.get_tensor(name) for name in names}
        except (OSError, SafetensorError) as error:
            raise _unreadable(file, error) from error


class TorchFiles:
    """Files of `torch.save`; see WeightFormat. Nothing but tensors is unpickled."""

    single = "pytorch_model.bin"
    index = "pytorch_model.bin.index.json"

    def names(self, file: Path) -> list[str]:
        """See WeightFormat."""
        return list(self._load(file))

    def read(self, file: Path, names: list[str]) -> dict[str, torch.Tensor]:
        """See WeightFormat."""
        stored = self._load(file)
        missing = [name for name in names if name not in stored]
        if missing:
            raise _unreadable(file, f"it holds no {missing[0]!r}")
        return {name: stored[name] for name in names}

    @staticmethod
    def _load(file: Path) -> dict[str, torch.Tensor]:
        try:
            with file.open("rb") as start:
                is_old = start.read(1) == PICKLE
            stored = None if is_old else torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        except UnpicklingError as error:
            raise _unreadable(
                file, "it is damaged, or holds other objects than tensors, which are not unpickled as that may run code"
            ) from error
        except Exception as error:  # the unpickler raises whatever a damaged file leads to
            raise _unreadable(file, error) from error
        if is_old:
            raise CheckpointError(
                f"{file}: written by a PyTorch older than 1.6, which cannot be mapped; save it again with "
                "torch.save(torch.load(file, weights_only=True), file)"
            )
        if not isinstance(stored, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in stored.values()):
            raise _unreadable(file, "it holds something else than tensors by name")
        return stored


FORMATS: tuple[WeightFormat, ...] = (Safetensors(), TorchFiles())
"""The first that a checkpoint has is read."""


def _unreadable(file: Path, reason: object) -> CheckpointError:
    lines = str(reason).splitlines()
    return CheckpointError(
        f"{file}: cannot be read ({lines[0] if lines else type(reason).__name__}); fetch the checkpoint again"
    )
