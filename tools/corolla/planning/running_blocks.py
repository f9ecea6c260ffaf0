"""Blocks of a served model, opened in this process as its backend opens them, and stepped in all ways."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import torch

from corolla.kv.session import OpenRequest
from corolla.model.ends import Embedding, Head
from corolla.model.shape import ModelShape
from corolla.serving.blocks import MAX_SHORT_POSITIONS, BlocksRequest
from corolla.serving.hosted_blocks import HostedBlocks
from corolla.serving.hosting import Host
from corolla.serving.parameters import ServedModel
from corolla.threads import thread_count

PROMPT_POSITIONS = 16
FORWARD_POSITIONS = 1024
LONGEST_PROMPT = 4096


class RunningBlocks:
    """Some blocks with a KV cache of `cache_tokens`, 0 for as many as the steps here need, and the ends if wanted."""

    def __init__(self, model: ServedModel, blocks: range, cache_tokens: int, *, ends: bool) -> None:
        torch.set_num_threads(thread_count(model.threads))
        with ThreadPoolExecutor(1) as opener:  # OpenMP's threads would else be those of the opener, as in a backend
            config = opener.submit(lambda: Host(model).checkpoint.config).result()
            self._longest = min(ModelShape.of(config).context_length, LONGEST_PROMPT)
            self._rows = max(model.decoder_batch_sizes, default=16)
            self._tokens = cache_tokens or self._longest + self._rows * model.page_size
            self._model = replace(model, blocks=blocks, attn_cache_tokens=self._tokens, adapters={})
            host = opener.submit(Host, self._model).result()
            self._table = host.session_table()
            self._service = opener.submit(lambda: HostedBlocks(host, self._table).current).result()
        self._ends = (Embedding(host.parts), Head(host.parts).compile()) if ends else None
        self._hidden_size = config.hidden_size
        self.forward_positions = min(FORWARD_POSITIONS, self._longest)
        self._sequence = self._states(1, self.forward_positions)

    def step_in_all_ways(self) -> None:
        """A long prompt, a short one, and a step of as many sessions as decoders take at once."""
        longest = min(self._longest, self._tokens)
        rows = min(self._rows, self._tokens // self._model.page_size)
        for count, positions in ((1, longest), (1, min(MAX_SHORT_POSITIONS, longest)), (rows, 1)):
            with self._sessions(count, positions) as ids:
                self._run(self._states(count, positions), ids)

    def forward(self) -> None:
        """A whole sequence of `forward_positions` tokens, without cache."""
        self._run(self._sequence)

    @contextmanager
    def stepping(self, steps: int) -> Iterator[Callable[[int], None]]:
        """Steps of one token of one session after a prompt, by their number below `steps`, as far as its cache goes."""
        most = min(steps, min(self._longest, self._tokens) - PROMPT_POSITIONS)
        token = self._states(1, 1)
        with self._sessions(1, PROMPT_POSITIONS + most) as ids, self._service.steps.held(ids[0]):
            self._run(self._states(1, PROMPT_POSITIONS), ids)
            yield lambda number: self._run(token, ids, PROMPT_POSITIONS + number % most)

    def pass_ends(self) -> None:
        """One token through embedding and head, and the choice of the next."""
        assert self._ends is not None
        embedding, head = self._ends
        head.best(embedding(torch.tensor([[0]])))

    def touch_cache(self) -> None:
        """Uses all of it, as a server that is full."""
        for block in self._model.blocks:
            cache = self._service.arena[block]
            cache.keys.zero_()
            cache.values.zero_()

    def _run(self, hidden_states: torch.Tensor, ids: list[str] | None = None, start: int = 0) -> None:
        starts = None if ids is None else [start] * len(ids)
        (output,) = self._service.run([BlocksRequest(hidden_states, ids, starts)])
        if isinstance(output, Exception):
            raise output

    @contextmanager
    def _sessions(self, count: int, length: int) -> Iterator[list[str]]:
        ids = [self._table.open(OpenRequest(length)).id for _ in range(count)]
        yield ids
        for session_id in ids:
            self._table.close(session_id)

    def _states(self, count: int, positions: int) -> torch.Tensor:
        return torch.randn(count, positions, self._hidden_size).to(self._model.dtype.torch)
