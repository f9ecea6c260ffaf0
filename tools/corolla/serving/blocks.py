"""What a blocks model does with the requests of one batch."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from corolla.errors import CorollaError, InvalidValueError
from corolla.kv.arena import KVArena
from corolla.kv.steps import PagedCache, Row, SessionSteps
from corolla.model.block_range import BlockRange


@dataclass(frozen=True)
class BlocksRequest:
    """`hidden_states` [B, T, H]; with sessions, one id per row; without `starts`, rows go on where they are."""

    hidden_states: torch.Tensor
    session_ids: list[str] | None = None
    starts: list[int] | None = None


@dataclass(frozen=True)
class BlocksService:
    """A block range with its part of the server's KV cache."""

    blocks: BlockRange
    arena: KVArena
    steps: SessionSteps

    def run(self, requests: Sequence[BlocksRequest]) -> list[torch.Tensor | CorollaError]:
        """Output hidden states or an error per request. Requests of equal length run as one batch."""
        results: list[torch.Tensor | CorollaError] = [CorollaError("not run")] * len(requests)
        for group in _groups(requests):
            outputs = self._run_group([requests[i] for i in group])
            for index, output in zip(group, outputs, strict=True):
                results[index] = output
        return results

    def _run_group(self, group: list[BlocksRequest]) -> Sequence[torch.Tensor | CorollaError]:
        try:
            merged = self._run_merged(group)
        except CorollaError as error:
            if len(group) == 1:
                return [error]
            return [output for request in group for output in self._run_group([request])]
        return merged.split([len(request.hidden_states) for request in group])

    def _run_merged(self, group: list[BlocksRequest]) -> torch.Tensor:
        hidden_states = torch.cat([request.hidden_states for request in group])
        if group[0].session_ids is None:
            return self._run_whole(hidden_states, group)
        rows = [row for request in group for row in self._rows(request)]
        return self.step(hidden_states, rows)

    def _run_whole(self, hidden_states: torch.Tensor, group: list[BlocksRequest]) -> torch.Tensor:
        if any(request.starts is not None for request in group):
            raise InvalidValueError("start_position", "a value without session_id", "only together with session_id")
        return self.blocks.forward(hidden_states)

    def step(self, hidden_states: torch.Tensor, rows: list[Row]) -> torch.Tensor:
        """One step of `rows`, hidden states [B, T, H]; see SessionSteps.running for the errors."""
        new_tokens = hidden_states.shape[1]
        with self.steps.running(rows, new_tokens) as checked:
            if new_tokens == 0:
                return hidden_states
            return self.blocks.step(hidden_states, PagedCache(self.arena, checked))

    def _rows(self, request: BlocksRequest) -> list[Row]:
        ids = request.session_ids or []
        if len(set(ids)) < len(ids):
            raise InvalidValueError("session_id", max(ids, key=ids.count), "each session once in a batch")
        starts = request.starts or [self.steps.length(session_id) for session_id in ids]
        return [Row(session_id, start) for session_id, start in zip(ids, starts, strict=True)]


def _groups(requests: Sequence[BlocksRequest]) -> list[list[int]]:
    """Indices of requests that can run as one batch: the same length, all or none with sessions.

    Steps of the same session stay in order, in groups after each other.
    """
    groups: dict[tuple[int, bool, int], list[int]] = defaultdict(list)
    seen: dict[str, int] = defaultdict(int)
    for index, request in enumerate(requests):
        ids = request.session_ids or []
        turn = max((seen[session_id] for session_id in ids), default=0)
        for session_id in ids:
            seen[session_id] = turn + 1
        groups[turn, request.session_ids is not None, request.hidden_states.shape[1]].append(index)
    return [groups[key] for key in sorted(groups)]
