"""Everything a served model opens when it is loaded: weights, KV arena, session table."""

import os

import torch

from corolla.checkpoint.disk_cache import DiskCache
from corolla.checkpoint.folder import CheckpointFolder
from corolla.checkpoint.prepared import PreparedParts
from corolla.kv.arena import KVArena
from corolla.kv.layout import KVLayout
from corolla.kv.reorder import CacheReorderer
from corolla.kv.run_directory import run_directory
from corolla.kv.steps import SessionSteps
from corolla.kv.table import SessionTable
from corolla.kv.token_log import TokenLog
from corolla.model.block_range import BlockRange
from corolla.serving.blocks import BlocksService
from corolla.serving.parameters import ServedModel


class Host:
    """Opens what the models of one process need, from the model's parameters."""

    def __init__(self, model: ServedModel) -> None:
        torch.set_num_threads(model.threads or len(os.sched_getaffinity(0)))
        self.model = model
        self.checkpoint = CheckpointFolder(model.checkpoint)
        self.parts = PreparedParts(self.checkpoint, model.dtype.torch, DiskCache.default())
        self._layout = KVLayout.of(self.checkpoint.config, model.dtype.name, model.attn_cache_tokens, model.page_size)

    def session_table(self) -> SessionTable:
        """The server's session table."""
        context_length = self.checkpoint.config.max_position_embeddings
        return SessionTable(run_directory(), self._layout, context_length)

    def token_log(self) -> TokenLog:
        """The server's log of generated tokens."""
        return TokenLog(run_directory(), self._layout)

    def blocks(self, table: SessionTable) -> BlocksService:
        """The model's block range with its part of the KV arena."""
        hosted = self.model.blocks
        arena = KVArena(run_directory(), self._layout, hosted)
        steps = SessionSteps(table, hosted)
        return BlocksService(BlockRange(self.parts, hosted), arena, steps, CacheReorderer(steps, arena, hosted))
