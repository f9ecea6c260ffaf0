"""Prepared parts: each part of a model converted once, stored in a disk cache and mapped by every process."""

import hashlib
from dataclasses import dataclass

import torch

from corolla.checkpoint.disk_cache import DiskCache
from corolla.checkpoint.folder import CheckpointFolder
from corolla.checkpoint.linear_weights import packed_numbers, stored_weight
from corolla.checkpoint.parts import EMBEDDING, HEAD, block_of, check_tensors
from corolla.checkpoint.quantized_layers import take_layer
from corolla.checkpoint.stored_quant import check_fits
from corolla.errors import CheckpointError
from corolla.kernels.compact_packing import is_compact, pack_or_compact
from corolla.kernels.packed_layers import expert_names, linear_names
from corolla.kv.device_exports import DeviceExports
from corolla.model.family import Family, Tensors, family_of
from corolla.model.sharding import WHOLE, Shard, shard_tensors
from corolla.quantization import NONE

FORMAT = 2
CPU = torch.device("cpu")


@dataclass(frozen=True)
class PreparedParts:
    """The parts of one checkpoint in one dtype: `embedding`, `head` (final norm and output projection), blocks.

    With `packed`, the weights of linear layers are stored as the CPU kernels read them; see
    corolla.kernels.packing. Those of blocks are quantized as `quant` says, or were already in the checkpoint, whose
    numbers are then left as they are; InvalidValueError where it says something else. Of blocks, only what `shard`
    holds is read and stored. A part's name in the cache depends on all of these, the checkpoint's files and FORMAT, so
    a changed checkpoint is prepared anew.
    """

    checkpoint: CheckpointFolder
    dtype: torch.dtype
    cache: DiskCache
    device: torch.device = CPU
    exports: DeviceExports | None = None
    packed: bool = False
    quant: str = NONE
    shard: Shard = WHOLE

    def __post_init__(self) -> None:
        check_fits(self.quant, self.checkpoint.config)

    @property
    def generation(self) -> int:
        """Another number than before means that device memory was lost, and parts have to be loaded again."""
        return 0 if self.exports is None else self.exports.generation

    def load(self, part: str) -> Tensors:
        """The tensors of a part by their names inside their module, in `dtype`.

        They are mapped read-only; with `exports`, the first process copies them to `device` and the others open
        its copy. Only the part's own tensors are read from the checkpoint, and only if it is not in the cache yet.
        """
        if self.exports is None:
            return self._load_mapped(part)
        name = part + self._suffix(part)
        return self.exports.get(name, lambda: {n: t.to(self.device) for n, t in self._load_mapped(part).items()})

    def _load_mapped(self, part: str) -> Tensors:
        return self.cache.get(self._name(part), lambda: self._prepare(part))

    def _name(self, part: str) -> str:
        form = "plain" if not self.packed else "compact" if is_compact(self.dtype) else "packed"
        kind = f"{FORMAT}:{self.checkpoint.fingerprint()}:{self.dtype}:{form}"
        kind += f":{quant}" if (quant := self._quant_of(part)) != NONE else ""
        return f"{hashlib.sha256(kind.encode()).hexdigest()[:16]}/{part}{self._suffix(part)}"

    def _suffix(self, part: str) -> str:
        return "" if part in (EMBEDDING, HEAD) else self.shard.suffix()

    def _prepare(self, part: str) -> Tensors:
        read = self._read(part)
        check_tensors(part, read, self.checkpoint.config, self.checkpoint.quant)
        if part not in (EMBEDDING, HEAD):
            read = shard_tensors(read, self.checkpoint.config, self.shard)
        linears, experts = self._matrices(part)
        weights = {
            f"{layer}.{name}": tensor
            for layer in linears
            for name, tensor in self._take_weight(layer, read, self._quant_of(part)).items()
        }
        rest = {name: tensor.to(self.dtype).contiguous() for name, tensor in read.items()}
        return weights | rest | {name: pack_or_compact(rest[name]) for name in experts if self.packed}

    def _take_weight(self, layer: str, read: Tensors, quant: str) -> Tensors:
        """Takes the weight of a linear layer out of what was read; as stored_weight has it."""
        if quant == NONE or self.checkpoint.quant == NONE:
            weight = read.pop(f"{layer}.weight").to(self.dtype).contiguous()
            return stored_weight(weight, quant, packed=self.packed)
        numbers = take_layer(layer, read, quant)
        return packed_numbers(numbers, quant, self.dtype) if self.packed else numbers

    def _quant_of(self, part: str) -> str:
        """Like transformers, which leaves the ends of the model in their dtype."""
        return NONE if part in (EMBEDDING, HEAD) else self.quant

    def _matrices(self, part: str) -> tuple[list[str], list[str]]:
        """The names of the linear layers, whose weights may be packed or quantized, and of weights of experts."""
        if part == EMBEDDING:
            return [], []
        if part == HEAD:
            return ["projection"], []
        with torch.device("meta"):
            block = family_of(self.checkpoint.config).block(self.checkpoint.config, 0)
        return linear_names(block), expert_names(block)

    def _read(self, part: str) -> Tensors:
        family = family_of(self.checkpoint.config)
        if part == EMBEDDING:
            return self._read_embedding(family)
        if part == HEAD:
            return self._read_head(family)
        tensors = self._read_prefix(family, family.block_prefix.format(block_of(part)))
        computed = [name for name in tensors if name.endswith("rotary_emb.inv_freq")]  # stored by old checkpoints
        try:
            return family.block_tensors({name: tensor for name, tensor in tensors.items() if name not in computed})
        except RuntimeError as error:
            raise CheckpointError(f"{part}: the tensors do not fit together ({error})") from error

    def _read_embedding(self, family: Family) -> Tensors:
        embedding = self._read_prefix(family, family.embedding_prefix)
        if family.embedding_norm is None:
            return embedding
        norm = self._read_prefix(family, family.embedding_norm_prefix)
        return embedding | {f"norm.{name}": tensor for name, tensor in norm.items()}

    def _read_head(self, family: Family) -> Tensors:
        tied = self.checkpoint.config.tie_word_embeddings
        projection = self._read_prefix(family, family.embedding_prefix if tied else family.head_prefix)
        norm = self._read_prefix(family, family.norm_prefix)
        return {f"norm.{n}": t for n, t in norm.items()} | {f"projection.{n}": t for n, t in projection.items()}

    def _read_prefix(self, family: Family, prefix: str) -> Tensors:
        """Tensors that start with `prefix`, by the rest of their names; with the family's base prefix or without."""
        based = f"{family.base_prefix}{prefix}"
        for whole in (based, prefix):
            if names := self.checkpoint.names(whole):
                return {name.removeprefix(whole): tensor for name, tensor in self.checkpoint.read(names).items()}
        missing = prefix if prefix == family.head_prefix else based
        raise CheckpointError(f"{self.checkpoint.path}: the checkpoint holds no tensors {missing}*")
