"""The two ends of a model: token ids to hidden states, hidden states to logits."""

import torch
from torch import nn

from corolla.checkpoint.parts import EMBEDDING, HEAD
from corolla.checkpoint.prepared import PreparedParts
from corolla.errors import InvalidValueError
from corolla.kernels.build import load_kernels
from corolla.model.family import family_of
from corolla.model.loading import load_module
from corolla.model.program_chain import ProgramChain
from corolla.model.programs import Programs


class Embedding:
    """Token ids [B, T] int64 on the CPU to hidden states [B, T, H] in the model's dtype, on its device."""

    def __init__(self, parts: PreparedParts) -> None:
        self._parts = parts
        self._open()

    def _open(self) -> None:
        self._generation = self._parts.generation
        tensors = self._parts.load(EMBEDDING)
        config = self._parts.checkpoint.config
        family = family_of(config)
        self._weight = tensors["weight"]
        self._scale = family.embedding_scale and self._weight.new_tensor(family.embedding_scale(config))
        norm = family.embedding_norm
        self._norm = norm and load_module(lambda: norm(config), _submodule(tensors, "norm."), EMBEDDING)

    @torch.inference_mode()
    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self._parts.generation != self._generation:
            self._open()
        if self._weight.device.type != "cpu":
            self._check(input_ids)
        try:
            hidden_states = nn.functional.embedding(input_ids.to(self._weight.device), self._weight)
        except IndexError:
            self._check(input_ids)
            raise
        if self._scale is not None:
            hidden_states = hidden_states * self._scale
        return hidden_states if self._norm is None else self._norm(hidden_states)

    def _check(self, input_ids: torch.Tensor) -> None:
        vocabulary = self._weight.shape[0]
        outside = (input_ids < 0) | (input_ids >= vocabulary)
        if bool(outside.any()):
            raise InvalidValueError("input_ids", int(input_ids[outside][0]), f"0 to {vocabulary - 1}")


class Head:
    """Hidden states [B, T, H] to logits [B, T, V] float32 on the CPU: final norm and output projection."""

    def __init__(self, parts: PreparedParts) -> None:
        self._parts = parts
        self._program: ProgramChain | None = None
        self._open()

    def _open(self) -> None:
        self._generation = self._parts.generation
        tensors = self._parts.load(HEAD)
        config = self._parts.checkpoint.config
        norm = family_of(config).final_norm
        self._norm = load_module(lambda: norm(config), _submodule(tensors, "norm."), HEAD)
        self._projection = _submodule(tensors, "projection.")["weight"]
        self.vocabulary: int = config.vocab_size
        if self._parts.packed:
            load_kernels()

    @torch.inference_mode()
    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self._parts.generation != self._generation:
            self._open()
        normed = self._norm(hidden_states.to(self._projection.device))
        if self._parts.packed:
            logits: torch.Tensor = torch.ops.corolla.packed_linear(normed, self._projection, None, self.vocabulary)
        else:
            logits = nn.functional.linear(normed, self._projection)
        return logits.float().cpu()

    def compile(self) -> "Head":
        """Lets `best` run as one program where weights are packed; compiled if it is not in the disk cache yet."""
        if self._parts.packed:
            file = Programs(self._parts).head(self._norm, self._projection)
            self._program = ProgramChain([file], [[self._projection, *self._norm.parameters()]])
        return self

    @torch.inference_mode()
    def best(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        """Hidden states [N, 1, H] to logits [N, V], as above, and the number of the greatest of each row."""
        if self._program is not None:
            logits, best = self._program(hidden_states)
        else:
            logits = self(hidden_states)[:, 0]
            best = logits.argmax(-1)
        return logits, best.tolist()


def _submodule(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
