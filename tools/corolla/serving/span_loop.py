"""The loop of a span: steps that arrived while the last batch ran are the next batch."""

import logging
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Protocol

import torch

from corolla.errors import CorollaError, OverloadedError
from corolla.serving.blocks import BlocksService
from corolla.serving.grouping import BlocksRequest

logger = logging.getLogger(__name__)

LONG_STEPS = 4
"""Long steps that may run in the range processes at the same time."""

RunRanges = Callable[[torch.Tensor, str, int], torch.Tensor]
"""Runs hidden states [1, T, H] of a session at a position through the range processes."""


class Blocks(Protocol):
    """All blocks of the server; see corolla.serving.hosted_blocks.HostedBlocks."""

    @property
    def current(self) -> BlocksService:
        """The service on memory that is valid now."""


@dataclass
class SpanJob:
    """A step to compute: hidden states [n, T, H]; `done` is called once, from any thread, and must not block."""

    session_ids: list[str]
    starts: list[int]
    blocks: range
    hidden_states: torch.Tensor
    done: Callable[[torch.Tensor | Exception], None]
    outputs: list[torch.Tensor] = field(default_factory=list)
    """Of the parts of a long step that ran already."""

    @property
    def positions(self) -> int:
        return self.hidden_states.shape[0] * self.hidden_states.shape[1]


class SpanLoop:
    """One thread that owns the blocks of this process.

    Each turn runs all short steps that are there as one batch, and one part of at most one long step of some of the
    blocks. Long steps of all blocks run in the range processes meanwhile. `steps` and `rows` count what ran,
    `batched_rows` the rows that ran together with those of other steps.
    """

    def __init__(self, blocks: Blocks, run_ranges: RunRanges, max_short_tokens: int) -> None:
        self._blocks = blocks
        self._run_ranges = run_ranges
        self._max_short_tokens = max_short_tokens
        self._queue: SimpleQueue[SpanJob | None] = SimpleQueue()
        self._long: deque[SpanJob] = deque()
        self._parts: dict[range, BlocksService] = {}
        self._whole: BlocksService | None = None
        self._stopping = False
        self.steps = self.rows = self.batched_rows = 0
        self._ranges = ThreadPoolExecutor(LONG_STEPS, thread_name_prefix="span-long")
        self._thread = Thread(target=self._run, name="span-loop", daemon=True)
        self._thread.start()

    def put(self, job: SpanJob) -> None:
        """Lets a step run as soon as its turn comes."""
        if self._is_long(job) and job.blocks == self._blocks.current.blocks.blocks:
            self._count([job])
            self._ranges.submit(self._run_long, job)
        else:
            self._queue.put(job)

    def stop(self) -> None:
        """Ends the loop after the batch that runs; steps that are left fail."""
        self._stopping = True
        self._queue.put(None)
        self._thread.join()
        self._ranges.shutdown(wait=False, cancel_futures=True)
        for job in [*self._take(wait=False), *self._long]:
            job.done(OverloadedError("the server is stopping"))

    def _run(self) -> None:
        while not self._stopping:
            jobs = self._take(wait=not self._long)
            self._long.extend(job for job in jobs if self._is_long(job))
            by_blocks: dict[range, list[SpanJob]] = defaultdict(list)
            for job in jobs:
                if not self._is_long(job):
                    by_blocks[job.blocks].append(job)
            for blocks, batch in by_blocks.items():
                self._run_short(blocks, batch)
            if self._long:
                self._run_part(self._long.popleft())

    def _take(self, *, wait: bool) -> list[SpanJob]:
        """All that is there."""
        jobs = []
        try:
            if wait:
                jobs.append(self._queue.get())
            while True:
                jobs.append(self._queue.get_nowait())
        except Empty:
            return [job for job in jobs if job is not None]

    def _run_short(self, blocks: range, jobs: list[SpanJob]) -> None:
        self._count(jobs)
        requests = [BlocksRequest(job.hidden_states, job.session_ids, job.starts) for job in jobs]
        for job, result in zip(jobs, self._outcomes(blocks, requests), strict=True):
            job.done(result)

    def _run_part(self, job: SpanJob) -> None:
        """The next positions of a long step; what is left waits for its next turn behind the other long ones."""
        rows, length, _ = job.hidden_states.shape
        begun = sum(output.shape[1] for output in job.outputs)
        end = min(length, begun + max(1, self._max_short_tokens // rows))
        starts = [start + begun for start in job.starts]
        part = BlocksRequest(job.hidden_states[:, begun:end], job.session_ids, starts)
        (result,) = self._outcomes(job.blocks, [part])
        if isinstance(result, Exception):
            self._count([job])
            job.done(result)
            return
        job.outputs.append(result)
        if end < length:
            self._long.append(job)
            return
        self._count([job])
        job.done(torch.cat(job.outputs, dim=1))

    def _run_long(self, job: SpanJob) -> None:
        try:
            for session_id in job.session_ids:
                self._blocks.current.steps.length(session_id)  # known, before anything else is asked
            rows = zip(job.hidden_states.split(1), job.session_ids, job.starts, strict=True)
            outcome: torch.Tensor | Exception = torch.cat([self._run_ranges(*row) for row in rows])
        except Exception as error:
            outcome = error
        job.done(outcome)

    def _outcomes(self, blocks: range, requests: list[BlocksRequest]) -> list[torch.Tensor | Exception]:
        try:
            return list(self._service(blocks).run(requests))
        except Exception as error:
            if not isinstance(error, CorollaError):
                logger.exception("a batch of %d steps failed", len(requests))
            return [error] * len(requests)

    def _service(self, blocks: range) -> BlocksService:
        whole = self._blocks.current
        if whole is not self._whole:
            self._whole, self._parts = whole, {whole.blocks.blocks: whole}
        if blocks not in self._parts:
            self._parts[blocks] = whole.part(blocks)
        return self._parts[blocks]

    def _is_long(self, job: SpanJob) -> bool:
        return job.positions > self._max_short_tokens and job.hidden_states.shape[1] > 1

    def _count(self, jobs: list[SpanJob]) -> None:
        rows = sum(len(job.session_ids) for job in jobs)
        self.steps += len(jobs)
        self.rows += rows
        self.batched_rows += rows if len(jobs) > 1 else 0
