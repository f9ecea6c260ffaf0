"""The parts a model is prepared in, and the tensors that each of them must have."""

from collections.abc import Iterable

import torch
from transformers import PretrainedConfig

from corolla.checkpoint.quantized_layers import Form, check_layer, layer_forms
from corolla.errors import CheckpointError
from corolla.kernels.packed_layers import linear_names
from corolla.model.family import family_of
from corolla.quantization import NONE

EMBEDDING, HEAD = "embedding", "head"


def block_part(index: int) -> str:
    """The name of a block's part."""
    return f"block_{index:03d}"


def block_of(part: str) -> int:
    """The inverse of `block_part`."""
    return int(part.removeprefix("block_"))


def block_prefixes(config: PretrainedConfig, blocks: Iterable[int]) -> tuple[str, ...]:
    """What the names of the tensors of blocks start with in a checkpoint."""
    family = family_of(config)
    prefixes = [family.block_prefix.format(block) for block in blocks]
    return (*prefixes, *(f"{family.base_prefix}{prefix}" for prefix in prefixes))


def check_tensors(part: str, tensors: dict[str, torch.Tensor], config: PretrainedConfig, quant: str = NONE) -> None:
    """CheckpointError when a tensor that the config asks for is missing, or has another shape or kind of dtype.

    `quant` is how the checkpoint itself is quantized.
    """
    shapes, linears = _shapes(part, config)
    forms: dict[str, Form] = {name: (shape, None) for name, shape in shapes.items()}
    quantized = {layer: shapes[f"{layer}.weight"] for layer in linears if quant != NONE}
    for layer, shape in quantized.items():
        forms |= layer_forms(layer, shape, quant, tensors)
    for name, form in forms.items():
        _check_form(part, name, tensors, form)
    for layer, shape in quantized.items():
        try:
            check_layer(layer, shape, quant, tensors)
        except CheckpointError as error:
            raise CheckpointError(f"{part}: {error}") from error


def _check_form(part: str, name: str, tensors: dict[str, torch.Tensor], form: Form) -> None:
    shape, dtype = form
    if name not in tensors:
        raise CheckpointError(f"{part}: the checkpoint holds no {name!r}, which its config.json asks for")
    tensor = tensors[name]
    if tensor.shape != shape:
        raise CheckpointError(
            f"{part}: {name!r} has the shape {list(tensor.shape)}, but config.json asks for {list(shape)}"
        )
    if not tensor.is_floating_point() if dtype is None else tensor.dtype != dtype:
        wanted = dtype or "floating-point numbers"
        raise CheckpointError(f"{part}: {name!r} has the dtype {tensor.dtype}, but config.json asks for {wanted}")


def _shapes(part: str, config: PretrainedConfig) -> tuple[dict[str, torch.Size], list[str]]:
    """The shapes of an unquantized part, and the names of the linear layers among them if it is a block."""
    family = family_of(config)
    projection = torch.Size((config.vocab_size, config.hidden_size))
    if part == EMBEDDING:
        return {"weight": projection}, []
    with torch.device("meta"):
        module = family.final_norm(config) if part == HEAD else family.block(config, block_of(part))
    shapes = {name: tensor.shape for name, tensor in module.state_dict().items()}
    if part == HEAD:
        return {f"norm.{name}": shape for name, shape in shapes.items()} | {"projection.weight": projection}, []
    return shapes, linear_names(module)
