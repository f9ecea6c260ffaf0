"""A checkpoint folder in Hugging Face format: its config and its weight files."""

import hashlib
import json
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from transformers import AutoConfig, PretrainedConfig

from corolla.checkpoint.hub import HubModel
from corolla.checkpoint.stored_quant import stored_quant
from corolla.checkpoint.weight_files import FORMATS, WeightFormat
from corolla.errors import CheckpointError


@dataclass(frozen=True)
class Weights:
    """The names of a checkpoint's weight files, and which tensor lies in which; None if there is one file only."""

    format: WeightFormat
    files: list[str]
    file_of: dict[str, str] | None


class CheckpointFolder:
    """Reads config and single tensors; nothing but the tensors asked for is read from disk.

    With `hub`, weight files that are not in the folder are fetched from there before they are read.
    `quant` is how the blocks are quantized in it.
    Raises CheckpointError when the folder, its config, a file or a tensor is missing or damaged, InvalidValueError when
    it is quantized in a way that cannot be served.
    """

    def __init__(self, path: Path, hub: HubModel | None = None) -> None:
        self.path = path
        self._hub = hub
        if not path.is_dir():
            raise CheckpointError(
                f"checkpoint: no folder {str(path)!r}; give a folder in Hugging Face format, or org/name of a model "
                "on the hub"
            )
        self.config = self._read_config()
        self.quant = stored_quant(self.config)

    def names(self, prefix: str) -> list[str]:
        """The names of all tensors that start with `prefix`."""
        return [name for name in self._file_of if name.startswith(prefix)]

    def read(self, names: list[str]) -> dict[str, torch.Tensor]:
        """The named tensors, mapped from their files in the dtype they are stored in."""
        by_file: dict[str, list[str]] = defaultdict(list)
        for name in names:
            if name not in self._file_of:
                raise CheckpointError(f"{self.path}: the checkpoint holds no tensor {name!r}")
            by_file[self._file_of[name]].append(name)
        self._fetch(list(by_file))
        tensors: dict[str, torch.Tensor] = {}
        for file, wanted in by_file.items():
            tensors |= self._weights.format.read(self.path / file, wanted)
        return tensors

    def fetch(self, without: tuple[str, ...] = ()) -> None:
        """Makes sure that all weight files are here, but those of which all tensors start with one of `without`."""
        file_of = self._weights.file_of
        wanted = file_of and {file for name, file in file_of.items() if not name.startswith(without)}
        self._fetch(self._weights.files if wanted is None else sorted(wanted))

    def check_weights(self) -> None:
        """CheckpointError where a weight file is missing or damaged; of a model on the hub, none is fetched for it."""
        if self._hub is None:
            self.fetch()
            for name in self._weights.files:
                self._weights.format.names(self.path / name)

    def fingerprint(self) -> str:
        """Changes when the config or any weight file does; no weight file is opened for it.

        Of a model on the hub it is that of the commit, wherever it was fetched to; of other folders it goes by the
        names, sizes and modification times of the files.
        """
        if self._hub is not None:
            return hashlib.sha256(self._hub.commit.encode()).hexdigest()[:16]
        self.fetch()
        digest = hashlib.sha256(self.config.to_json_string().encode())
        for name in sorted(self._weights.files):
            file = self.path / name
            status = file.stat()
            digest.update(f"{file.resolve()}:{status.st_size}:{status.st_mtime_ns}".encode())
        return digest.hexdigest()[:16]

    def _read_config(self) -> PretrainedConfig:
        if not (self.path / "config.json").is_file():
            raise CheckpointError(f"checkpoint: {str(self.path)!r} holds no config.json")
        try:
            return AutoConfig.from_pretrained(self.path)
        except Exception as error:  # transformers raises whatever a wrong value leads to
            raise CheckpointError(f"{self.path / 'config.json'}: {error}") from error

    def _fetch(self, files: list[str]) -> None:
        if self._hub is not None:
            self._hub.fetch(self.path, files)
        missing = [name for name in files if not (self.path / name).is_file()]
        if missing:
            raise CheckpointError(
                f"{self.path / self._weights.format.index}: names files that do not exist: {', '.join(missing)}"
            )

    @cached_property
    def _weights(self) -> Weights:
        for kind in FORMATS:
            if (self.path / kind.index).is_file():
                file_of = _read_index(self.path / kind.index)
                return Weights(kind, sorted(set(file_of.values())), file_of)
            if self._hub is not None:
                self._hub.fetch(self.path, [kind.single])
            if (self.path / kind.single).is_file():
                return Weights(kind, [kind.single], None)
        names = ", ".join(name for kind in FORMATS for name in (kind.index, kind.single))
        raise CheckpointError(f"checkpoint: {str(self.path)!r} holds none of {names}")

    @cached_property
    def _file_of(self) -> dict[str, str]:
        """The file of each tensor."""
        if self._weights.file_of is not None:
            return self._weights.file_of
        (single,) = self._weights.files
        return dict.fromkeys(self._weights.format.names(self.path / single), single)


def _read_index(index: Path) -> dict[str, str]:
    try:
        file_of = json.loads(index.read_text())["weight_map"]
        if not all(isinstance(file, str) for file in file_of.values()):
            raise TypeError("weight_map names no files")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: not an index of weight files ({error})") from error
    return dict(file_of)
