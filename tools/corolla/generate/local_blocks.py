"""The blocks of this process, where several loops step them."""

from collections.abc import Sequence
from threading import Lock

import torch

from corolla.kv.steps import Row
from corolla.serving.blocks import BlocksService, Step
from corolla.serving.span_loop import Blocks, RunRanges


class SharedBlocks:
    """Short steps one at a time, as decoders are made for one thread. Long ones of all blocks take the ranges."""

    def __init__(self, blocks: Blocks, hosted: range, run_ranges: RunRanges, max_short_tokens: int) -> None:
        self._blocks = blocks
        self._hosted = hosted
        self._run_ranges = run_ranges
        self._max_short_tokens = max_short_tokens
        self._whole: BlocksService | None = None
        self._parts: dict[range, BlocksService] = {}
        self._guard = Lock()

    def step(
        self, hidden_states: torch.Tensor, session_ids: Sequence[str], starts: Sequence[int], blocks: range
    ) -> torch.Tensor:
        """See corolla.remote.peer.LocalBlocks; the errors are those of BlocksService.step."""
        positions = hidden_states.shape[0] * hidden_states.shape[1]
        if positions > self._max_short_tokens and hidden_states.shape[1] > 1 and blocks == self._hosted:
            rows = zip(hidden_states.split(1), session_ids, starts, strict=True)
            return torch.cat([self._run_ranges(*row) for row in rows])
        with self._guard:
            service = self._service(blocks)
            step = Step(hidden_states.to(service.blocks.device), list(map(Row, session_ids, starts)))
            return service.step([step])[0].cpu()

    def _service(self, blocks: range) -> BlocksService:
        whole = self._blocks.current
        if whole is not self._whole:
            self._whole, self._parts = whole, {self._hosted: whole}
        if blocks not in self._parts:
            self._parts[blocks] = whole.part(blocks)
        return self._parts[blocks]
