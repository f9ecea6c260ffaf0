"""All models of a server inside the test's process, opened from a repository as their backends open them."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event
from typing import Any
from unittest import mock

import torch

from corolla.checkpoint.source import Source, open_checkpoint
from corolla.dtypes import dtype_named
from corolla.generate.engine import EngineLimits, GenerateEngine
from corolla.generate.sequence import Finished
from corolla.kv.session import OpenRequest
from corolla.model.ends import Embedding, Head
from corolla.remote.swarm import Swarm
from corolla.repository.plan import RepositoryPlan
from corolla.repository.reading import served_model
from corolla.repository.writer import write_repository
from corolla.serving.blocks import BlocksRequest, BlocksService
from corolla.serving.hosted_blocks import HostedBlocks
from corolla.serving.hosting import Host
from corolla.serving.span import SpanService
from corolla.serving.span_loop import Blocks
from corolla.serving.span_push import Connection


def make_plan(checkpoint: Source, ranges: Sequence[range], dtype: str = "float32", **options: Any) -> RepositoryPlan:
    """A plan with one thread per process and the eager decoder, for small models."""
    return RepositoryPlan(
        checkpoint=checkpoint,
        config=open_checkpoint(checkpoint).config,
        dtype=dtype_named(dtype),
        ranges=list(ranges),
        **({"threads": 1, "decoder": "eager"} | options),
    )


class LocalServer:
    """The services behind `embed`, `head`, `chain`, each range and `generate`, those that the plan has.

    Chain and ranges have nothing in common but the run directory, as in processes of their own.
    """

    def __init__(self, plan: RepositoryPlan, folder: Path, cache: Path | None = None) -> None:
        self.repository = folder / "repository"
        self.run_directory = folder / "run"
        write_repository(plan, self.repository)
        self._plan = plan
        with mock.patch.dict(
            os.environ, COROLLA_RUN_DIR=str(self.run_directory), COROLLA_CACHE=str(cache or folder / "cache")
        ):
            if plan.ends:
                self.embedding = Embedding(self._host("embed").parts)
                self.head = Head(self._host("head").parts)
            sessions = self._host("sessions")
            self.table = sessions.session_table()
            self.adapters = sessions.adapters(self.table)
            self.adapters.load_first(sessions.model.adapters)
            self._token_log = sessions.token_log()
            self.ranges = [self._blocks(f"blocks_{r.start:02d}_{r.stop:02d}").current for r in plan.ranges]
            if plan.hosted:
                self._chain = self._blocks("chain")
                self.chain = self._chain.current
        self.checkpoint = open_checkpoint(served_model(self.repository, "sessions").checkpoint)

    def open(self, max_length: int, adapter: str = "") -> str:
        """The id of a new session."""
        return self.table.open(OpenRequest(max_length, adapter=adapter)).id

    def run_chain(self, hidden_states: torch.Tensor, *session: Any) -> torch.Tensor:
        """Hidden states [B, T, H] through all blocks at once; `session` as of BlocksRequest."""
        return run(self.chain, hidden_states, *session)

    def run_ranges(self, hidden_states: torch.Tensor, *session: Any) -> torch.Tensor:
        """Hidden states [B, T, H] through one range after the other."""
        for service in self.ranges:
            hidden_states = run(service, hidden_states, *session)
        return hidden_states

    def engine(self, swarm: Swarm | None = None, blocks: Blocks | None = None) -> GenerateEngine:
        """A generate model of this server, to be stopped by the caller; in a swarm, with no blocks but those given."""
        return GenerateEngine(
            checkpoint=self.checkpoint,
            embedding=self.embedding,
            head=self.head,
            blocks=blocks if swarm else self._chain,
            table=self.table,
            log=self._token_log,
            run_ranges=self._run_long,
            limits=EngineLimits(self._plan.short_tokens, self._plan.batch_channel_capacity),
            swarm=swarm,
        )

    def span(self, connect: Callable[[str], Connection]) -> SpanService:
        """A span model of this server, to be stopped by the caller."""
        return SpanService(self._chain, self.table, self._run_long, self._plan.short_tokens, connect)

    def _run_long(self, hidden_states: torch.Tensor, session_id: str, start: int) -> torch.Tensor:
        return self.run_ranges(hidden_states, [session_id], [start])

    def _host(self, name: str) -> Host:
        return Host(served_model(self.repository, name))

    def _blocks(self, name: str) -> HostedBlocks:
        host = self._host(name)
        return HostedBlocks(host, host.session_table())


def run(service: BlocksService, hidden_states: torch.Tensor, *session: Any) -> torch.Tensor:
    """One request, alone; its error is raised."""
    result = service.run([BlocksRequest(hidden_states, *session)])[0]
    if isinstance(result, Exception):
        raise result
    return result


class CollectingOutput:
    """An output that keeps what it gets."""

    def __init__(self) -> None:
        self.cancelled = False
        self.session_id = ""
        self.pieces: list[str] = []
        self.finished: Finished | None = None
        self.error: Exception | None = None
        self._ended = Event()

    def poll(self) -> None:
        """Cancelled is what the test says."""

    def begin(self, session_id: str) -> None:
        self.session_id = session_id

    def send(self, text: str, finished: Finished | None) -> None:
        self.pieces.append(text)
        if finished is not None:
            self.finished = finished
            self._ended.set()

    def fail(self, error: Exception) -> None:
        self.error = error
        self._ended.set()

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def text(self, timeout: float = 60.0) -> str:
        """The whole text, once it has ended."""
        assert self._ended.wait(timeout), "the generation did not end"
        if self.error is not None:
            raise self.error
        return "".join(self.pieces)
