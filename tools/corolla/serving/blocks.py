"""What a blocks model does with the requests of one batch."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from corolla.errors import CorollaError, InvalidValueError
from corolla.kv.arena import KVArena
from corolla.kv.paged_cache import PagedCache
from corolla.kv.reorder import CacheReorderer
from corolla.kv.steps import Row, SessionSteps
from corolla.model.block_range import BlockRange

MAX_CHUNK_TOKENS = 512
"""Positions, over all rows, that run at once: bounds the memory of a long prompt."""


@dataclass(frozen=True)
class BlocksRequest:
    """`hidden_states` [B, T, H]; with sessions, one id per row; without `starts`, rows go on where they are.

    With `hypo_ids`, row i continues the cache of row `hypo_ids[i]` (beam search).
    """

    hidden_states: torch.Tensor
    session_ids: list[str] | None = None
    starts: list[int] | None = None
    hypo_ids: list[int] | None = None


@dataclass(frozen=True)
class BlocksService:
    """A block range with its part of the server's KV cache."""

    blocks: BlockRange
    arena: KVArena
    steps: SessionSteps
    reorderer: CacheReorderer

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
        hidden_states = torch.cat([request.hidden_states for request in group]).to(self.blocks.device)
        if group[0].session_ids is None:
            return self._run_whole(hidden_states, group)
        rows = [row for request in group for row in self._rows(request)]
        return self.step(hidden_states, rows, group[0].hypo_ids)

    def _run_whole(self, hidden_states: torch.Tensor, group: list[BlocksRequest]) -> torch.Tensor:
        for request in group:
            for name, values in (("start_position", request.starts), ("hypo_ids", request.hypo_ids)):
                if values is not None:
                    raise InvalidValueError(name, "a value without session_id", "only together with session_id")
        return self.blocks.forward(hidden_states)

    def step(self, hidden_states: torch.Tensor, rows: list[Row], sources: list[int] | None = None) -> torch.Tensor:
        """One step of `rows`, hidden states [B, T, H], in chunks whose memory is bounded.

        See SessionSteps.running for the errors.
        """
        new_tokens = hidden_states.shape[1]
        with self.steps.running(rows, new_tokens, sources) as checked:
            self.reorderer.apply(checked)
            if new_tokens == 0:
                return hidden_states
            chunk = max(1, MAX_CHUNK_TOKENS // len(rows))
            outputs = [
                self.blocks.step(part, PagedCache(self.arena, checked.part(offset, part.shape[1])))
                for offset, part in zip(range(0, new_tokens, chunk), hidden_states.split(chunk, dim=1), strict=True)
            ]
            self.reorderer.wrote(checked)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _rows(self, request: BlocksRequest) -> list[Row]:
        ids = request.session_ids or []
        if len(set(ids)) < len(ids):
            raise InvalidValueError("session_id", max(ids, key=ids.count), "each session once in a batch")
        starts = request.starts or [self.steps.length(session_id) for session_id in ids]
        return [Row(session_id, start) for session_id, start in zip(ids, starts, strict=True)]


def _groups(requests: Sequence[BlocksRequest]) -> list[list[int]]:
    """Indices of requests that can run as one batch: the same length, all or none with sessions.

    Steps of the same session stay in order, in groups after each other; a reordering runs by itself.
    """
    groups: dict[tuple[int, bool, int, int], list[int]] = defaultdict(list)
    seen: dict[str, int] = defaultdict(int)
    for index, request in enumerate(requests):
        ids = request.session_ids or []
        turn = max((seen[session_id] for session_id in ids), default=0)
        for session_id in ids:
            seen[session_id] = turn + 1
        steps_alone = request.hypo_ids is not None or (request.session_ids is not None and request.starts is None)
        alone = index + 1 if steps_alone else 0
        groups[turn, request.session_ids is not None, request.hidden_states.shape[1], alone].append(index)
    return [groups[key] for key in sorted(groups)]
