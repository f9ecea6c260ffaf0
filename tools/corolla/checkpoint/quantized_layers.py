"""Linear layers that a checkpoint holds quantized, in the form in which transformers saves what bitsandbytes made.

INT8 is `weight` [out_features, in_features] int8 and `SCB` [out_features] float32, the largest size of a row's weights;
`weight_format` says that rows are stored one after the other. NF4 is `weight` uint8 [bytes, 1] with two weights per
byte, `weight.absmax` with a scale per 64 weights, `weight.quant_map` and a `weight.quant_state` in JSON; with double
quantization, scales are numbers of 8 bits with `weight.nested_absmax` and `weight.nested_quant_map`.
"""

import torch

from corolla.errors import CheckpointError
from corolla.kernels.quantized_packing import NF4_BLOCK
from corolla.quantization import INT8

Tensors = dict[str, torch.Tensor]
Form = tuple[torch.Size, torch.dtype | None]
"""Shape and dtype of a tensor; None for any floating-point one."""

NESTED_BLOCK = 256
"""Scales per scale of double quantization."""
STATE = "weight.quant_state.bitsandbytes__nf4"
ROW_MAJOR = 0


def layer_forms(layer: str, shape: torch.Size, quant: str, tensors: Tensors) -> dict[str, Form]:
    """What `tensors` must hold of a layer [out_features, in_features], but for the length of its state."""
    if quant == INT8:
        return {f"{layer}.weight": (shape, torch.int8), f"{layer}.SCB": (shape[:1], torch.float32)}
    nested = f"{layer}.weight.nested_absmax" in tensors
    count = shape.numel()
    scales = -(-count // NF4_BLOCK)
    forms: dict[str, Form] = {
        "weight": (torch.Size((-(-count // 2), 1)), torch.uint8),
        "weight.absmax": (torch.Size((scales,)), torch.uint8 if nested else torch.float32),
        "weight.quant_map": (torch.Size((16,)), torch.float32),
    }
    if nested:
        forms["weight.nested_absmax"] = (torch.Size((-(-scales // NESTED_BLOCK),)), torch.float32)
        forms["weight.nested_quant_map"] = (torch.Size((256,)), torch.float32)
    return {f"{layer}.{name}": form for name, form in forms.items()}


def check_layer(layer: str, shape: torch.Size, quant: str, tensors: Tensors) -> None:
    """CheckpointError when a layer's tensors, whose forms are right, mean something else than our kernels compute."""
    if quant == INT8:
        stored = tensors.get(f"{layer}.weight_format", torch.tensor(ROW_MAJOR))
        _check(f"{layer}.weight_format", stored.tolist(), ROW_MAJOR)
        return
    from corolla.checkpoint.bitsandbytes import functional

    state = f"{layer}.{STATE}"
    if state not in tensors:
        raise CheckpointError(f"the checkpoint holds no {state!r}, which its config.json asks for")
    try:
        numbers = take_layer(layer, dict(tensors), quant)
        found = functional.QuantState.from_dict(layer_state(numbers), torch.device("cpu"))
    except Exception as error:  # bitsandbytes raises whatever a damaged state leads to
        raise CheckpointError(f"{state!r} cannot be read ({error}); fetch the checkpoint again") from error
    _check(f"{state}: blocksize", found.blocksize, NF4_BLOCK)
    _check(f"{state}: shape", list(found.shape or ()), list(shape))
    if found.nested:
        _check(f"{state}: nested_blocksize", found.state2.blocksize, NESTED_BLOCK)
    if not torch.allclose(found.code, functional.get_4bit_type("nf4", device="cpu")):
        raise CheckpointError(f"'{layer}.weight.quant_map' is not that of nf4; fetch the checkpoint again")


def take_layer(layer: str, tensors: Tensors, quant: str) -> Tensors:
    """Takes a layer's tensors but its bias out of `tensors`; by their names in the layer, as bitsandbytes has them."""
    tensors.pop(f"{layer}.weight_format", None)
    own = [f"{layer}.weight", f"{layer}.SCB"]
    if quant != INT8:
        own = [name for name in tensors if name == own[0] or name.startswith(f"{layer}.weight.")]
    return {name.removeprefix(f"{layer}."): tensors.pop(name).contiguous() for name in own}


def layer_state(numbers: Tensors) -> Tensors:
    """What QuantState.from_dict reads of the tensors of an NF4 layer."""
    return {name: tensor for name, tensor in numbers.items() if name.startswith("weight.")}


def _check(field: str, value: object, allowed: object) -> None:
    if value != allowed:
        raise CheckpointError(f"{field}: {value!r} is not allowed; allowed: {allowed!r}")
