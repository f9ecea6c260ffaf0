"""A checkpoint folder in Hugging Face format: its config and its safetensors files."""

import hashlib
import json
from collections import defaultdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PretrainedConfig

from corolla.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class CheckpointFolder:
    """Reads config and single tensors; nothing but the tensors asked for is read from disk.

    Raises CheckpointError when the folder, its config, a file or a tensor is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_dir():
            raise CheckpointError(f"checkpoint: no folder {str(path)!r}; give a folder in Hugging Face format")
        self.config = self._read_config()
        self._file_of = self._locate_tensors()

    def names(self, prefix: str) -> list[str]:
        """The names of all tensors that start with `prefix`."""
        return [name for name in self._file_of if name.startswith(prefix)]

    def read(self, names: list[str]) -> dict[str, torch.Tensor]:
        """The named tensors, mapped from their files in the dtype they are stored in."""
        by_file: dict[Path, list[str]] = defaultdict(list)
        for name in names:
            if name not in self._file_of:
                raise CheckpointError(f"{self.path}: the checkpoint holds no tensor {name!r}")
            by_file[self._file_of[name]].append(name)
        tensors: dict[str, torch.Tensor] = {}
        for file, wanted in by_file.items():
            try:
                with safe_open(file, framework="pt") as shard:
                    tensors.update({name: shard.get_tensor(name) for name in wanted})
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{file}: cannot be read ({error}); fetch the checkpoint again") from error
        return tensors

    def fingerprint(self) -> str:
        """Changes when the config or any weight file does (by name, size and modification time)."""
        digest = hashlib.sha256(self.config.to_json_string().encode())
        for file in sorted(set(self._file_of.values())):
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

    def _locate_tensors(self) -> dict[str, Path]:
        index, single = self.path / INDEX_FILE, self.path / SINGLE_FILE
        if index.is_file():
            try:
                weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
                located = {name: self.path / file for name, file in weight_map.items()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise CheckpointError(f"{index}: not a safetensors index ({error})") from error
        elif single.is_file():
            try:
                with safe_open(single, framework="pt") as shard:
                    located = dict.fromkeys(shard.keys(), single)
            except SafetensorError as error:
                raise CheckpointError(f"{single}: cannot be read ({error})") from error
        else:
            raise CheckpointError(f"checkpoint: {str(self.path)!r} holds neither {SINGLE_FILE} nor {INDEX_FILE}")
        missing = sorted({str(file) for file in located.values() if not file.is_file()})
        if missing:
            raise CheckpointError(f"{index}: names files that do not exist: {', '.join(missing)}")
        return located
