"""The models of a server opened in this process, with a run directory of their own."""

import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from corolla.checkpoint.folder import CheckpointFolder
from corolla.kv.run_directory import ENVIRONMENT_VARIABLE, SHARED_MEMORY
from corolla.kv.table import SessionTable
from corolla.kv.token_log import TokenLog
from corolla.model.batch_sizes import COMPILED
from corolla.model.ends import Embedding, Head
from corolla.model.shape import ModelShape
from corolla.repository.plan import RepositoryPlan
from corolla.serving.blocks import BlocksService
from corolla.serving.hosted_blocks import HostedBlocks
from corolla.serving.hosting import Host
from corolla.serving.parameters import ServedModel


@dataclass(frozen=True)
class LocalModels:
    """What the `generate` model of a server opens."""

    checkpoint: CheckpointFolder
    embedding: Embedding
    head: Head
    chain: BlocksService
    table: SessionTable
    log: TokenLog


@contextmanager
def local_models(plan: RepositoryPlan, table_type: type[SessionTable] = SessionTable) -> Iterator[LocalModels]:
    """Opens a plan's models for CPUs; the session table may be of a type that watches."""
    with tempfile.TemporaryDirectory(prefix="corolla-bench-", dir=SHARED_MEMORY) as folder:
        # In a thread that ends, as in the backend: its OpenMP threads would else compete with those of the user.
        with _run_directory(folder), ThreadPoolExecutor(1) as opener:
            models = opener.submit(_open, plan, Path(folder), table_type).result()
        torch.set_num_threads(plan.threads)
        yield models


def _open(plan: RepositoryPlan, folder: Path, table_type: type[SessionTable]) -> LocalModels:
    host = Host(_served_chain(plan))
    table = table_type(folder, host.layout, ModelShape.of(plan.config).context_length)
    return LocalModels(
        checkpoint=host.checkpoint,
        embedding=Embedding(host.parts),
        head=Head(host.parts).compile(),
        chain=HostedBlocks(host, table).current,
        table=table,
        log=host.token_log(),
    )


def _served_chain(plan: RepositoryPlan) -> ServedModel:
    return ServedModel(
        name="chain",
        checkpoint=plan.checkpoint,
        device=torch.device("cpu"),
        dtype=plan.dtype,
        blocks=plan.hosted,
        threads=plan.threads,
        attn_cache_tokens=plan.cache_tokens,
        page_size=plan.page_size,
        max_short_tokens=plan.short_tokens,
        decoder_batch_sizes=plan.batch_sizes if plan.decoder == COMPILED else (),
        batch_channel_capacity=plan.batch_channel_capacity,
        quant=plan.quant,
        tensor_parallel=1,
        adapters={},
    )


@contextmanager
def _run_directory(folder: str) -> Iterator[None]:
    before = os.environ.get(ENVIRONMENT_VARIABLE)
    os.environ[ENVIRONMENT_VARIABLE] = folder
    try:
        yield
    finally:
        del os.environ[ENVIRONMENT_VARIABLE]
        if before is not None:
            os.environ[ENVIRONMENT_VARIABLE] = before
