"""The blocks of this process, where several loops step them."""

from collections.abc import Sequence
from threading import Lock
from typing import Protocol

import torch

from corolla.errors import InvalidValueError
from corolla.kv.steps import Row
from corolla.serving.blocks import BlocksService, Step


class Blocks(Protocol):
    """The merged chain; see corolla.serving.hosted_blocks.HostedBlocks."""

    @property
    def current(self) -> BlocksService:
        """The service on memory that is valid now."""


class SharedBlocks:
    """One step at a time, as decoders are made for one thread."""

    def __init__(self, blocks: Blocks, hosted: range) -> None:
        self._blocks = blocks
        self._hosted = hosted
        self._guard = Lock()

    def step(
        self, hidden_states: torch.Tensor, session_ids: Sequence[str], starts: Sequence[int], blocks: range
    ) -> torch.Tensor:
        """See corolla.remote.peer.LocalBlocks; the errors are those of BlocksService.step."""
        if blocks != self._hosted:
            raise InvalidValueError("blocks", blocks, f"{self._hosted}, all that this process hosts")
        service = self._blocks.current
        rows = list(map(Row, session_ids, starts))
        with self._guard:
            (output,) = service.step([Step(hidden_states.to(service.blocks.device), rows)])
        return output.cpu()
