"""The linear layers of bitsandbytes on mapped tensors, without a copy: the reference on CPUs, and what runs on CUDA."""

from typing import Any

import torch
from torch import nn

from corolla.checkpoint.bitsandbytes import layers
from corolla.checkpoint.quantized_layers import layer_state
from corolla.errors import CheckpointError
from corolla.kernels.quantized_packing import NF4_BLOCK

THRESHOLD = 6.0
"""LLM.int8: inputs of at least this size are outliers, whose columns are multiplied in the dtype."""


class Int8Linear(layers.Linear8bitLt):
    """LLM.int8: inputs are quantized as well, row by row."""

    def __init__(self, linear: nn.Linear) -> None:
        """Takes the place of `linear`; its weight must be loaded."""
        biased = linear.bias is not None
        super().__init__(
            linear.in_features, linear.out_features, biased, has_fp16_weights=False, threshold=THRESHOLD, device="meta"
        )

    def _load_from_state_dict(self, state_dict: dict[str, torch.Tensor], prefix: str, *_: Any) -> None:
        tensors = _own(state_dict, prefix)
        numbers = tensors["weight"]
        self.weight = layers.Int8Params(
            numbers, requires_grad=False, has_fp16_weights=False, CB=numbers, SCB=tensors["SCB"]
        )
        _load_bias(self, tensors)


class NF4Linear(layers.Linear4bit):
    """NF4, with double quantization or without."""

    def __init__(self, linear: nn.Linear) -> None:
        """Takes the place of `linear`; its weight must be loaded."""
        biased = linear.bias is not None
        super().__init__(linear.in_features, linear.out_features, biased, quant_type="nf4", device="meta")
        # On some CPUs the layer would rearrange its weight, which is a copy, and round inputs and scales to bfloat16.
        self.support_avx512bf16_for_cpu = False

    def _load_from_state_dict(self, state_dict: dict[str, torch.Tensor], prefix: str, *_: Any) -> None:
        tensors = _own(state_dict, prefix)
        numbers = tensors["weight"]
        if numbers.device.type == "cpu" and self.in_features % NF4_BLOCK == NF4_BLOCK // 2:
            raise CheckpointError(
                f"{prefix}weight: bitsandbytes multiplies wrongly by nf4 weights of {self.in_features} inputs on CPUs; "
                "write the repository with --decoder compiled or --quant int8 of an unquantized checkpoint"
            )
        state = layer_state(tensors)
        self.weight = layers.Params4bit.from_prequantized(numbers, state, device=numbers.device, module=self)
        _load_bias(self, tensors)


def _own(state_dict: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in state_dict.items() if name.startswith(prefix)}


def _load_bias(layer: nn.Linear, tensors: dict[str, torch.Tensor]) -> None:
    if layer.bias is not None:
        layer.bias = nn.Parameter(tensors["bias"], requires_grad=False)
