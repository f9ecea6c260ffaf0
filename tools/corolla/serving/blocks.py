"""What a blocks model does with the requests of one batch."""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from corolla.errors import CorollaError, InvalidValueError
from corolla.kv.arena import KVArena
from corolla.kv.paged_cache import PagedCache
from corolla.kv.paged_rows import paged_rows
from corolla.kv.reorder import CacheReorderer
from corolla.kv.steps import Row, SessionSteps, StepRows
from corolla.model.block_range import BlockRange
from corolla.model.decoders import Decoders
from corolla.serving.grouping import BlocksRequest, group_requests
from corolla.serving.lora import ProcessAdapters

MAX_CHUNK_TOKENS = 512
"""Positions, over all rows, that run at once: bounds the memory of a long prompt."""
MAX_SHORT_POSITIONS = 128
"""Positions, over all sessions, that run row by row in one step. Each row reads the cache of its session for itself,
so longer prompts are faster when all their positions share what is read."""


@dataclass(frozen=True)
class Step:
    """New positions of sessions, all of one length: hidden states [B, T, H] of `rows`.

    With `sources`, row i continues the cache of row `sources[i]`.
    """

    hidden_states: torch.Tensor
    rows: list[Row]
    sources: list[int] | None = None


@dataclass(frozen=True)
class BlocksService:
    """A block range with its part of the server's KV cache. Without `decoders`, every step runs eagerly."""

    blocks: BlockRange
    arena: KVArena
    steps: SessionSteps
    reorderer: CacheReorderer
    adapters: ProcessAdapters
    decoders: Decoders | None = None

    def part(self, blocks: range) -> "BlocksService":
        """The service of some of its blocks, on the same weights, cache and programs."""
        own = self.blocks.part(blocks)
        decoders = self.decoders and self.decoders.part(own)
        return replace(self, blocks=own, steps=self.steps.part(blocks), decoders=decoders)

    def run(self, requests: Sequence[BlocksRequest]) -> list[torch.Tensor | CorollaError]:
        """Output hidden states or an error per request.

        Short steps run together on the decoders, whatever their lengths; other requests of equal length as one batch.
        """
        results: list[torch.Tensor | CorollaError] = [CorollaError("not run")] * len(requests)
        for group in group_requests(requests, self.most_rows):
            outputs = self._run_group([requests[i] for i in group])
            for index, output in zip(group, outputs, strict=True):
                results[index] = output
        return results

    @property
    def most_rows(self) -> int:
        """Positions that can run in one step whatever the lengths of its sessions; 0 with the eager decoder."""
        return MAX_SHORT_POSITIONS if self.decoders else 0

    def _run_group(self, group: list[BlocksRequest]) -> Sequence[torch.Tensor | CorollaError]:
        try:
            return self._run_merged(group)
        except CorollaError as error:
            if len(group) == 1:
                return [error]
            return [output for request in group for output in self._run_group([request])]

    def _run_merged(self, group: list[BlocksRequest]) -> Sequence[torch.Tensor]:
        if group[0].session_ids is None:
            return self._run_whole(group)
        by_length: dict[int, list[BlocksRequest]] = defaultdict(list)
        for request in group:
            by_length[request.hidden_states.shape[1]].append(request)
        steps = [self._step_of(requests) for requests in by_length.values()]
        outputs = {
            id(request): output
            for requests, merged in zip(by_length.values(), self.step(steps), strict=True)
            for request, output in zip(requests, merged.split([len(r.hidden_states) for r in requests]), strict=True)
        }
        return [outputs[id(request)] for request in group]

    def _run_whole(self, group: list[BlocksRequest]) -> Sequence[torch.Tensor]:
        for request in group:
            for name, values in (("start_position", request.starts), ("hypo_ids", request.hypo_ids)):
                if values is not None:
                    raise InvalidValueError(name, "a value without session_id", "only together with session_id")
        hidden_states = torch.cat([request.hidden_states for request in group]).to(self.blocks.device)
        names = [name for r in group for name in r.adapters or [""] * len(r.hidden_states)]
        adapters = self.adapters.of_rows(self.adapters.of_names(names))
        return self.blocks.forward(hidden_states, adapters).split([len(request.hidden_states) for request in group])

    def _step_of(self, requests: list[BlocksRequest]) -> Step:
        hidden_states = torch.cat([request.hidden_states for request in requests]).to(self.blocks.device)
        return Step(hidden_states, [row for request in requests for row in self._rows(request)], requests[0].hypo_ids)

    def step(self, steps: Sequence[Step]) -> list[torch.Tensor]:
        """Runs steps of different sessions; outputs have the shapes of their hidden states.

        Several at once may have `most_rows` positions. See SessionSteps.running for the errors; nothing has
        changed then.
        """
        with ExitStack() as stack:
            checked = [
                stack.enter_context(self.steps.running(step.rows, step.hidden_states.shape[1], step.sources))
                for step in steps
            ]
            for rows in checked:
                self.reorderer.apply(rows)
            if self.decoders is not None and all(self._is_short(rows) for rows in checked):
                outputs = self._decode(self.decoders, [step.hidden_states for step in steps], checked)
            else:
                outputs = [self._run_long(step.hidden_states, rows) for step, rows in zip(steps, checked, strict=True)]
            for rows in checked:
                self.reorderer.wrote(rows)
        return outputs

    def _is_short(self, rows: StepRows) -> bool:
        return rows.new_tokens == 1 or 0 < rows.new_tokens * len(rows.sessions) <= self.most_rows

    def _decode(
        self, decoders: Decoders, hidden_states: list[torch.Tensor], rows: list[StepRows]
    ) -> list[torch.Tensor]:
        flat = [states.reshape(-1, 1, states.shape[2]) for states in hidden_states]
        joined = torch.cat(flat) if len(flat) > 1 else flat[0]
        paged = paged_rows(self.arena, rows)
        numbers = [session.adapter for step in rows for session in step.sessions for _ in range(step.new_tokens)]
        if adapters := self.adapters.of_rows(numbers):
            outputs = decoders.step_adapted(joined, paged, adapters)
        else:
            run = decoders.step if all(step.new_tokens == 1 for step in rows) else decoders.prompt
            outputs = run(joined, paged)
        split = outputs.split([len(states) for states in flat])
        return [output.reshape(states.shape) for output, states in zip(split, hidden_states, strict=True)]

    def _run_long(self, hidden_states: torch.Tensor, rows: StepRows) -> torch.Tensor:
        """In chunks whose memory is bounded."""
        new_tokens = hidden_states.shape[1]
        if new_tokens == 0:
            return hidden_states
        chunk = max(1, MAX_CHUNK_TOKENS // len(hidden_states))
        adapters = self.adapters.of_rows([session.adapter for session in rows.sessions])
        outputs = [
            self.blocks.step(part, PagedCache(self.arena, rows.part(offset, part.shape[1])), adapters)
            for offset, part in zip(range(0, new_tokens, chunk), hidden_states.split(chunk, dim=1), strict=True)
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _rows(self, request: BlocksRequest) -> list[Row]:
        ids = request.session_ids or []
        if len(set(ids)) < len(ids):
            raise InvalidValueError("session_id", max(ids, key=ids.count), "each session once in a batch")
        if request.adapters is not None:
            self._check_adapters(ids, request.adapters)
        starts = request.starts or [self.steps.length(session_id) for session_id in ids]
        return [Row(session_id, start) for session_id, start in zip(ids, starts, strict=True)]

    def _check_adapters(self, session_ids: list[str], names: list[str]) -> None:
        for session_id, name in zip(session_ids, names, strict=True):
            own = self.adapters.table.name(self.steps.adapter(session_id))
            if name != own:
                raise InvalidValueError("adapter", name, f"{own!r}, with which the session was opened")
