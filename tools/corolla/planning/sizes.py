"""How many bytes the parts of a model take as they are served: exact, from the shapes of the tensors.

No weight is read: modules are built without memory, as they are when they are loaded, and their tensors counted.
"""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PretrainedConfig

from corolla.checkpoint.parts import EMBEDDING, HEAD
from corolla.checkpoint.quantized_layers import NESTED_BLOCK
from corolla.checkpoint.stored_quant import stored_quant
from corolla.kernels.compact_packing import stored_size
from corolla.kernels.packed_layers import linear_layers
from corolla.kernels.quantized_packing import NF4_BLOCK
from corolla.kv.layout import KVLayout
from corolla.model.family import family_of
from corolla.model.linears import use_linears
from corolla.model.shape import ModelShape
from corolla.model.sharding import Shard, shard_tensors
from corolla.quantization import INT8, NF4, NONE

NF4_STATE_BYTES = 256
"""At most, of what bitsandbytes writes beside each NF4 weight in JSON."""


@dataclass(frozen=True)
class WeightForm:
    """What decides how weights lie in memory: dtype, quantization, packed for the CPU kernels or not, shards."""

    dtype: torch.dtype
    quant: str = NONE
    packed: bool = False
    shards: int = 1


def block_bytes(config: PretrainedConfig, form: WeightForm, rank: int = 0) -> int:
    """One block, or one shard of it. All blocks of a model are alike.

    Exact, but for NF4 without `packed`, where it is up to NF4_STATE_BYTES per layer too much.
    """
    with torch.device("meta"):
        block = family_of(config).block(config, 0).to(form.dtype)
        if form.packed:
            use_linears(block, form.dtype, form.quant, packed=True)
    tensors = shard_tensors(block.state_dict(), config, Shard(rank, form.shards))
    if form.packed or form.quant == NONE:
        return _bytes(tensors)
    quantized = linear_layers(block)
    rest = {name: tensor for name, tensor in tensors.items() if name.removesuffix(".weight") not in quantized}
    return _bytes(rest) + sum(_bitsandbytes_layer(layer, form.quant, config) for layer in quantized.values())


def part_bytes(part: str, config: PretrainedConfig, form: WeightForm) -> int:
    """The embedding or the head; they are never quantized, and have no shards."""
    family, itemsize = family_of(config), form.dtype.itemsize
    outputs, inputs = config.vocab_size, config.hidden_size
    with torch.device("meta"):
        norm = family.final_norm if part == HEAD else family.embedding_norm
        norm_elements = 0 if norm is None else sum(t.numel() for t in norm(config).state_dict().values())
    plain = outputs * inputs * itemsize
    weight = stored_size(outputs, inputs, form.dtype) if part == HEAD and form.packed else plain
    return weight + norm_elements * itemsize


def ends_bytes(config: PretrainedConfig, form: WeightForm) -> int:
    """Embedding and head. Tied weights are stored twice: as a table of rows and as a projection."""
    return part_bytes(EMBEDDING, config, form) + part_bytes(HEAD, config, form)


def token_cache_bytes(config: PretrainedConfig, dtype: str, shards: int = 1) -> int:
    """Keys and values of one token in one block, of one shard."""
    return KVLayout.of(config, dtype, 1, 1, shards).bytes_per_block


def token_cache_formula(config: PretrainedConfig, dtype: str, shards: int = 1, ranks: int = 1) -> str:
    """The same in words, of so many shards."""
    layout, shape = KVLayout.of(config, dtype, 1, 1, shards), ModelShape.of(config)
    kind = "multi-head" if shape.kv_heads == shape.heads else "grouped-query" if shape.kv_heads > 1 else "multi-query"
    repeated = f" x {ranks} of {shards} shards" if shards > 1 else ""
    heads = f"{layout.kv_heads} KV heads of {shape.heads} heads ({kind} attention)"
    return f"2 x {heads} x {layout.head_dim} x {layout.torch_dtype.itemsize} bytes{repeated}"


def _bytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _bitsandbytes_layer(layer: nn.Linear, quant: str, config: PretrainedConfig) -> int:
    """A weight as bitsandbytes has it; see corolla.checkpoint.quantized_layers."""
    count = layer.weight.numel()
    if quant == INT8:
        return count + 4 * layer.out_features
    assert quant == NF4
    scales = -(-count // NF4_BLOCK)
    nested = scales + 4 * -(-scales // NESTED_BLOCK) + 4 * 256
    return -(-count // 2) + (nested if _is_nested(config) else 4 * scales) + 4 * 16 + NF4_STATE_BYTES


def _is_nested(config: PretrainedConfig) -> bool:
    """Whether scales are quantized as well: unless the checkpoint was quantized without."""
    if stored_quant(config) == NONE:
        return True
    return bool(config.quantization_config.get("bnb_4bit_use_double_quant"))
