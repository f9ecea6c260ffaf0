"""The parts a model is prepared in, and the tensors that each of them must have."""

import torch
from transformers import PretrainedConfig

from corolla.errors import CheckpointError
from corolla.model.family import family_of

EMBEDDING, HEAD = "embedding", "head"


def block_part(index: int) -> str:
    """The name of a block's part."""
    return f"block_{index:03d}"


def block_of(part: str) -> int:
    """The inverse of `block_part`."""
    return int(part.removeprefix("block_"))


def check_tensors(part: str, tensors: dict[str, torch.Tensor], config: PretrainedConfig) -> None:
    """CheckpointError when a tensor that the config asks for is missing or has another shape."""
    for name, shape in _shapes(part, config).items():
        if name not in tensors:
            raise CheckpointError(f"{part}: the checkpoint holds no {name!r}, which its config.json asks for")
        if tensors[name].shape != shape:
            raise CheckpointError(
                f"{part}: {name!r} has the shape {list(tensors[name].shape)}, but config.json asks for {list(shape)}"
            )


def _shapes(part: str, config: PretrainedConfig) -> dict[str, torch.Size]:
    family = family_of(config)
    projection = torch.Size((config.vocab_size, config.hidden_size))
    if part == EMBEDDING:
        return {"weight": projection}
    with torch.device("meta"):
        module = family.final_norm(config) if part == HEAD else family.block(config, block_of(part))
    shapes = {name: tensor.shape for name, tensor in module.state_dict().items()}
    if part == HEAD:
        return {f"norm.{name}": shape for name, shape in shapes.items()} | {"projection.weight": projection}
    return shapes
