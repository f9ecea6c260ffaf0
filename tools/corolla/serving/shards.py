"""The shards of a block range: what the process of the first one tells those of the others, step by step.

Imported only where there are shards, as torch.distributed takes time to import.
"""

import logging
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Lock, Thread
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from corolla.errors import CorollaError
from corolla.kv.arena import KVArena
from corolla.kv.paged_cache import PagedCache
from corolla.kv.run_directory import ENVIRONMENT_VARIABLE
from corolla.kv.session import Session
from corolla.kv.steps import StepRows
from corolla.model.block_range import BlockRange, StepCache
from corolla.model.lora import RowAdapters
from corolla.model.sharding import Shard
from corolla.model.tensor_parallel import join_shards, parallelizer
from corolla.serving.hosting import Host
from corolla.serving.parameters import ServedModel

logger = logging.getLogger(__name__)

READY = "ready"


@dataclass(frozen=True)
class Start:
    """What a process needs to know to become a shard."""

    model: ServedModel
    shard: Shard
    rendezvous: Path


class Command(Protocol):
    """What all shards do at the same time."""

    def follow(self, blocks: BlockRange, arena: KVArena) -> None:
        """Does a shard's part of it."""


@dataclass(frozen=True)
class Whole:
    """Whole sequences; the hidden states [B, T, H] of this shape follow."""

    shape: torch.Size

    def follow(self, blocks: BlockRange, arena: KVArena) -> None:
        """See Command."""
        blocks.forward(_received(self.shape, arena))


@dataclass(frozen=True)
class NewPositions:
    """New positions of sessions; the hidden states [B, T, H] of this shape follow.

    `pages` are those that the step reads and writes, `contiguous` tells whether they are neighbours, per row.
    """

    shape: torch.Size
    pages: list[NDArray[np.int32]]
    contiguous: list[bool]
    starts: list[int]

    @classmethod
    def of(cls, hidden_states: torch.Tensor, rows: StepRows, page_size: int) -> "NewPositions":
        """Those of a step."""
        ends = [-(-(start + rows.new_tokens) // page_size) for start in rows.starts]
        pages = [session.pages[:end] for session, end in zip(rows.sessions, ends, strict=True)]
        return cls(hidden_states.shape, pages, [session.contiguous for session in rows.sessions], rows.starts)

    def follow(self, blocks: BlockRange, arena: KVArena) -> None:
        """See Command."""
        size = arena.layout.page_size
        sessions = [
            Session("", 0, 0, 0, pages, (pages[:, None].astype(np.int64) * size + np.arange(size)).ravel(), contiguous)
            for pages, contiguous in zip(self.pages, self.contiguous, strict=True)
        ]
        rows = StepRows(sessions, np.empty(0, np.int64), self.starts, self.starts, self.shape[1], None, 0)
        blocks.step(_received(self.shape, arena), PagedCache(arena, rows))


@dataclass(frozen=True)
class Copy:
    """Keys and values from slots to slots; see KVArena.copy."""

    origins: NDArray[np.int64]
    targets: NDArray[np.int64]

    def follow(self, blocks: BlockRange, arena: KVArena) -> None:
        """See Command."""
        arena.copy(self.origins, self.targets)


class ShardLeader:
    """Starts the processes of the other shards and tells them what to do.

    When one of them ends, so does this process, whose steps would wait for it; the supervisor replaces it. The others
    end with this process.
    """

    def __init__(self, host: Host) -> None:
        host.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        rendezvous = host.directory / f"shards-{uuid.uuid4().hex}"
        self._guard = Lock()
        self._followers = [_start(Start(host.model, shard, rendezvous), host.directory) for shard in host.shard.others]
        Thread(target=self._watch, name="shards", daemon=True).start()
        self.mesh = join_shards(host.shard, rendezvous, host.device)

    def blocks(self, host: Host) -> "LeadingBlocks":
        """The first shard, opened."""
        return LeadingBlocks(host, self)

    def wait_until_ready(self) -> None:
        """Waits until all shards are open; CorollaError when one cannot be."""
        for _, connection in self._followers:
            answer = connection.recv()
            if answer != READY:
                raise CorollaError(answer)
        logger.info("blocks run in %d shards, with the eager decoder", 1 + len(self._followers))

    @contextmanager
    def leading(self, command: Command, hidden_states: torch.Tensor | None = None) -> Iterator[None]:
        """Has the others do what this process does in the block.

        An error in it ends this process: the shards would not wait for each other at the same places any more.
        """
        with self._guard:
            try:
                for _, connection in self._followers:
                    connection.send(command)
                if hidden_states is not None:
                    dist.broadcast(hidden_states.contiguous(), src=0)
                yield
            except BaseException:
                logger.exception("a step in shards failed; this process ends, to be replaced")
                os._exit(1)

    def copy(self, arena: KVArena, origins: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """KVArena.copy in all shards."""
        with self.leading(Copy(origins, targets)):
            arena.copy(origins, targets)

    def _watch(self) -> None:
        processes = {os.pidfd_open(process.pid): process for process, _ in self._followers}
        ended = processes[wait(list(processes))[0]]  # type: ignore[index]
        logger.error(
            "the process %d of a shard ended with status %d; this process ends too, to be replaced",
            ended.pid,
            ended.wait(),
        )
        os._exit(1)


class LeadingBlocks(BlockRange):
    """The first shard of a block range, which the others follow. A server of shards loads no adapters."""

    def __init__(self, host: Host, leader: ShardLeader) -> None:
        super().__init__(host.parts, host.model.blocks, parallelizer(host.parts, leader.mesh))
        self._leader = leader
        self._page_size = host.layout.page_size

    def forward(self, hidden_states: torch.Tensor, adapters: RowAdapters = ()) -> torch.Tensor:
        """See BlockRange."""
        self.check_length(hidden_states.shape[1])
        with self._leader.leading(Whole(hidden_states.shape), hidden_states):
            return super().forward(hidden_states, adapters)

    def step(self, hidden_states: torch.Tensor, cache: StepCache, adapters: RowAdapters = ()) -> torch.Tensor:
        """See BlockRange."""
        assert isinstance(cache, PagedCache)
        with self._leader.leading(NewPositions.of(hidden_states, cache.rows, self._page_size), hidden_states):
            return super().step(hidden_states, cache, adapters)


def _start(start: Start, run_directory: Path) -> tuple[subprocess.Popen[bytes], Connection]:
    ours, theirs = Pipe()
    python = Path(sys.prefix, "bin", "python")
    process = subprocess.Popen(
        [python, "-m", "corolla.serving.shard", str(theirs.fileno()), str(os.getpid())],
        pass_fds=[theirs.fileno()],
        env=os.environ | {ENVIRONMENT_VARIABLE: str(run_directory)},
    )
    theirs.close()
    ours.send(start)
    return process, ours


def _received(shape: torch.Size, arena: KVArena) -> torch.Tensor:
    hidden_states = torch.empty(shape, dtype=arena.layout.torch_dtype, device=arena.device)
    dist.broadcast(hidden_states, src=0)
    return hidden_states
