"""Which linear layers a block runs on: its own, packed ones for the CPU kernels, or those of bitsandbytes."""

import torch
from torch import nn

from corolla.kernels.packed_layers import PackedLinear, replace_linears, use_packed_experts
from corolla.kernels.quantized_packing import PackedInt8Linear, PackedNF4Linear
from corolla.quantization import INT8, NF4, NONE

_PACKED = {NONE: PackedLinear, INT8: PackedInt8Linear, NF4: PackedNF4Linear}


def use_linears(block: nn.Module, dtype: torch.dtype, quant: str, *, packed: bool) -> nn.Module:
    """Replaces the linear layers inside a block by those that read what stored_weight stores, loaded afterwards.

    Experts are packed but not quantized, as in transformers.
    """
    if packed:
        return replace_linears(use_packed_experts(block, dtype), lambda linear: _PACKED[quant](linear, dtype))
    if quant == NONE:
        return block
    from corolla.model.bitsandbytes_linears import Int8Linear, NF4Linear

    return replace_linears(block, Int8Linear if quant == INT8 else NF4Linear)
