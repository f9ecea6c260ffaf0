"""What the weight of a block's linear layer becomes in the cache: packed for CPU kernels or not, quantized or not."""

import torch

from corolla.checkpoint.quantized_layers import layer_state
from corolla.kernels.compact_packing import pack_or_compact
from corolla.kernels.quantized_packing import NF4_BLOCK, pack_int8, pack_nf4
from corolla.quantization import INT8, NONE


def stored_weight(weight: torch.Tensor, quant: str, *, packed: bool) -> dict[str, torch.Tensor]:
    """The tensors for a weight [out_features, in_features] by their names in the layer, `weight` among them.

    The numbers are those of bitsandbytes, as its layers in transformers have them, packed or not; without `packed`
    under the names that its layers have for them. CheckpointError for a layer that cannot be packed.
    """
    if quant == NONE:
        return {"weight": pack_or_compact(weight) if packed else weight}
    numbers = _int8(weight) if quant == INT8 else _nf4(weight)
    return packed_numbers(numbers, quant, weight.dtype) if packed else numbers


def packed_numbers(numbers: dict[str, torch.Tensor], quant: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors of a layer of bitsandbytes, packed for inputs of `dtype`; the numbers stay the same.

    CheckpointError for a layer that cannot be packed.
    """
    if quant == INT8:
        return pack_int8(numbers["weight"], numbers["SCB"] / 127, dtype)
    from corolla.checkpoint.bitsandbytes import functional

    state = functional.QuantState.from_dict(layer_state(numbers), torch.device("cpu"))
    scales = state.absmax
    if state.nested:
        scales = functional.dequantize_blockwise(scales, state.state2) + state.offset
    flat = numbers["weight"].view(-1)
    each = torch.stack([flat >> 4, flat & 15], dim=1).view(-1)[: state.shape.numel()].view(state.shape)
    return pack_nf4(each, scales, dtype)


def _int8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    from corolla.checkpoint.bitsandbytes import functional

    numbers, largest, _ = functional.int8_vectorwise_quant(weight.to(torch.float16))
    return {"weight": numbers, "SCB": largest}


def _nf4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    from corolla.checkpoint.bitsandbytes import functional

    numbers, state = functional.quantize_4bit(weight, blocksize=NF4_BLOCK, compress_statistics=True, quant_type="nf4")
    return {"weight": numbers} | {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
