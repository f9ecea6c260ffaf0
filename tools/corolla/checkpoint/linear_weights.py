"""What the weight of a block's linear layer becomes in the cache: packed for CPU kernels or not, quantized or not."""

import torch

from corolla.kernels.packing import pack
from corolla.kernels.quantized_packing import NF4_BLOCK, pack_int8, pack_nf4
from corolla.quantization import INT8, NONE


def stored_weight(weight: torch.Tensor, quant: str, *, packed: bool) -> dict[str, torch.Tensor]:
    """The tensors for a weight [out_features, in_features] by their names in the layer, `weight` among them.

    The numbers are those of bitsandbytes, as its layers in transformers have them, packed or not; without `packed`
    under the names that its layers have for them. CheckpointError for a layer that cannot be packed.
    """
    if quant == NONE:
        return {"weight": pack(weight) if packed else weight}
    quantize = _int8 if quant == INT8 else _nf4
    return quantize(weight, packed)


def _int8(weight: torch.Tensor, packed: bool) -> dict[str, torch.Tensor]:
    from corolla.checkpoint.bitsandbytes import functional

    numbers, largest, _ = functional.int8_vectorwise_quant(weight.to(torch.float16))
    return pack_int8(numbers, largest / 127, weight.dtype) if packed else {"weight": numbers, "SCB": largest}


def _nf4(weight: torch.Tensor, packed: bool) -> dict[str, torch.Tensor]:
    from corolla.checkpoint.bitsandbytes import functional

    numbers, state = functional.quantize_4bit(weight, blocksize=NF4_BLOCK, compress_statistics=True, quant_type="nf4")
    if not packed:
        return {"weight": numbers} | {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    flat = numbers.view(-1)
    each = torch.stack([flat >> 4, flat & 15], dim=1).view(-1)[: weight.numel()].view(weight.shape)
    scales = functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
    return pack_nf4(each, scales, weight.dtype)
