"""Prepared parts: each part of a model converted once, stored in a disk cache and mapped by every process."""

import hashlib
from dataclasses import dataclass

import torch

from corolla.checkpoint.disk_cache import DiskCache
from corolla.checkpoint.folder import CheckpointFolder
from corolla.errors import CheckpointError
from corolla.kernels.packing import linear_names, pack
from corolla.kv.device_exports import DeviceExports
from corolla.model.family import Family, family_of

FORMAT = 2
CPU = torch.device("cpu")
EMBEDDING, HEAD = "embedding", "head"


def block_part(index: int) -> str:
    """The name of a block's part."""
    return f"block_{index:03d}"


@dataclass(frozen=True)
class PreparedParts:
    """The parts of one checkpoint in one dtype: `embedding`, `head` (final norm and output projection), blocks.

    With `packed`, the weights of linear layers are stored as the CPU kernels read them; see
    corolla.kernels.packing. A part's name in the cache depends on the checkpoint's files, the dtype, `packed` and
    FORMAT, so a changed checkpoint is prepared anew.
    """

    checkpoint: CheckpointFolder
    dtype: torch.dtype
    cache: DiskCache
    device: torch.device = CPU
    exports: DeviceExports | None = None
    packed: bool = False

    @property
    def generation(self) -> int:
        """Another number than before means that device memory was lost, and parts have to be loaded again."""
        return 0 if self.exports is None else self.exports.generation

    def load(self, part: str) -> dict[str, torch.Tensor]:
        """The tensors of a part by their names inside their module, in `dtype`.

        They are mapped read-only; with `exports`, the first process copies them to `device` and the others open
        its copy. Only the part's own tensors are read from the checkpoint, and only if it is not in the cache yet.
        """
        if self.exports is None:
            return self._load_mapped(part)
        return self.exports.get(part, lambda: {n: t.to(self.device) for n, t in self._load_mapped(part).items()})

    def _load_mapped(self, part: str) -> dict[str, torch.Tensor]:
        return self.cache.get(self._name(part), lambda: self._prepare(part))

    def _name(self, part: str) -> str:
        kind = f"{FORMAT}:{self.checkpoint.fingerprint()}:{self.dtype}:{'packed' if self.packed else 'plain'}"
        return f"{hashlib.sha256(kind.encode()).hexdigest()[:16]}/{part}"

    def _prepare(self, part: str) -> dict[str, torch.Tensor]:
        tensors = {name: tensor.to(self.dtype).contiguous() for name, tensor in self._read(part).items()}
        return {name: pack(t) if name in self._linear_weights(part) else t for name, t in tensors.items()}

    def _linear_weights(self, part: str) -> set[str]:
        """The names of the weights that are packed."""
        if not self.packed or part == EMBEDDING:
            return set()
        if part == HEAD:
            return {"projection.weight"}
        with torch.device("meta"):
            block = family_of(self.checkpoint.config).block(self.checkpoint.config, 0)
        return {f"{name}.weight" for name in linear_names(block)}

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
