"""Prepared parts: each part of a model converted once, stored in a disk cache and mapped by every process."""

import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from filelock import FileLock
from safetensors import safe_open
from safetensors.torch import save_file

from corolla.checkpoint.folder import CheckpointFolder
from corolla.errors import CheckpointError
from corolla.model.family import Family, family_of

FORMAT = 1
EMBEDDING, HEAD = "embedding", "head"


def block_part(index: int) -> str:
    """The name of a block's part."""
    return f"block_{index:03d}"


def default_cache_folder() -> Path:
    """`COROLLA_CACHE`, else `corolla` in the user's cache folder (XDG_CACHE_HOME or ~/.cache)."""
    if "COROLLA_CACHE" in os.environ:
        return Path(os.environ["COROLLA_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "corolla"


@dataclass(frozen=True)
class PreparedParts:
    """The parts of one checkpoint in one dtype.

    A part is `embedding`, `head` (final norm and output projection) or one block. `load` maps its file,
    written first if need be: one writer per part under a file lock, into a temporary file that is renamed.
    """

    checkpoint: CheckpointFolder
    dtype: torch.dtype
    cache: Path

    def load(self, part: str) -> dict[str, torch.Tensor]:
        """The tensors of a part by their names inside their module, mapped read-only, in `dtype`."""
        file = self.file(part)
        if not file.exists():
            self._prepare(part, file)
        with safe_open(file, framework="pt") as stored:
            return {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118

    def file(self, part: str) -> Path:
        """Where the part is stored; the name depends on the checkpoint's files, the dtype and the format."""
        key = hashlib.sha256(f"{FORMAT}:{self.checkpoint.fingerprint()}:{self.dtype}".encode()).hexdigest()[:16]
        return self.cache / key / f"{part}.safetensors"

    def _prepare(self, part: str, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(file.with_suffix(".lock")):
            if file.exists():
                return
            tensors = {name: tensor.to(self.dtype).contiguous() for name, tensor in self._read(part).items()}
            handle, temporary = tempfile.mkstemp(dir=file.parent, suffix=".part")
            os.close(handle)
            try:
                save_file(tensors, temporary)
                os.replace(temporary, file)
            except OSError as error:
                raise CheckpointError(
                    f"{file}: cannot be written ({error}); free disk space or set COROLLA_CACHE to another folder"
                ) from error
            finally:
                Path(temporary).unlink(missing_ok=True)

    def _read(self, part: str) -> dict[str, torch.Tensor]:
        family = family_of(self.checkpoint.config)
        if part == EMBEDDING:
            return self._read_prefix(family.embedding_prefix)
        if part == HEAD:
            return self._read_head(family)
        return self._read_prefix(family.block_prefix.format(int(part.removeprefix("block_"))))

    def _read_head(self, family: Family) -> dict[str, torch.Tensor]:
        tied = self.checkpoint.config.tie_word_embeddings
        projection = self._read_prefix(family.embedding_prefix if tied else family.head_prefix)
        norm = self._read_prefix(family.norm_prefix)
        return {f"norm.{n}": t for n, t in norm.items()} | {f"projection.{n}": t for n, t in projection.items()}

    def _read_prefix(self, prefix: str) -> dict[str, torch.Tensor]:
        names = self.checkpoint.names(prefix)
        if not names:
            raise CheckpointError(f"{self.checkpoint.path}: the checkpoint holds no tensors {prefix}*")
        return {name.removeprefix(prefix): tensor for name, tensor in self.checkpoint.read(names).items()}
