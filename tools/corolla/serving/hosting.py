"""Everything a served model opens when it is loaded: weights, KV arena, session table."""

import os
from collections.abc import Callable
from threading import Lock

import torch

from corolla.checkpoint.disk_cache import DiskCache
from corolla.checkpoint.folder import CheckpointFolder
from corolla.checkpoint.prepared import PreparedParts
from corolla.kv.arena import device_arena, host_arena
from corolla.kv.device_exports import DeviceExports
from corolla.kv.layout import KVLayout
from corolla.kv.reorder import CacheReorderer
from corolla.kv.run_directory import run_directory
from corolla.kv.steps import SessionSteps
from corolla.kv.table import SessionTable
from corolla.kv.token_log import TokenLog
from corolla.model.block_range import BlockRange
from corolla.model.decoders import open_decoders
from corolla.serving.blocks import BlocksService
from corolla.serving.metrics import DecoderMetrics, MakeCounter
from corolla.serving.parameters import ServedModel


class Host:
    """Opens what the models of one process need, from the model's parameters."""

    def __init__(self, model: ServedModel) -> None:
        torch.set_num_threads(model.threads or len(os.sched_getaffinity(0)))
        self.model = model
        self.checkpoint = CheckpointFolder(model.checkpoint)
        self._directory = run_directory()
        self._layout = KVLayout.of(self.checkpoint.config, model.dtype.name, model.attn_cache_tokens, model.page_size)
        on_device = model.device.type != "cpu"
        self._exports = DeviceExports(self._directory / "exports") if on_device else None
        self.parts = PreparedParts(
            self.checkpoint, model.dtype.torch, DiskCache.default(), model.device, self._exports, model.packed
        )

    def session_table(self) -> SessionTable:
        """The server's session table."""
        return SessionTable(self._directory, self._layout, self.checkpoint.config.max_position_embeddings)

    def token_log(self) -> TokenLog:
        """The server's log of generated tokens."""
        return TokenLog(self._directory, self._layout)

    def blocks(self, table: SessionTable) -> "HostedBlocks":
        """The model's block range with its part of the KV arena."""
        return HostedBlocks(lambda: self._open_blocks(table), self._exports)

    def _open_blocks(self, table: SessionTable) -> BlocksService:
        hosted = self.model.blocks
        if self._exports is None:
            arena = host_arena(self._directory, self._layout, hosted)
        else:
            arena = device_arena(self._exports, self._layout, hosted, self.model.device, table.forget_block)
        steps = SessionSteps(table, hosted, lambda: self.parts.generation)
        blocks = BlockRange(self.parts, hosted)
        decoders = open_decoders(self.parts, blocks, arena, self.model.decoder_batch_sizes)
        return BlocksService(blocks, arena, steps, CacheReorderer(steps, arena, hosted), decoders)


class HostedBlocks:
    """A BlocksService that is opened again when device memory it uses was lost with the process that owned it."""

    def __init__(self, open_blocks: Callable[[], BlocksService], exports: DeviceExports | None) -> None:
        self._open = open_blocks
        self._exports = exports
        self._guard = Lock()
        self._generation = exports.generation if exports else 0
        self._service = open_blocks()

    def count_rows(self, model: str, make_counter: MakeCounter) -> DecoderMetrics | None:
        """Reports what the decoders do as metrics; None with the eager decoder."""
        decoders = self._service.decoders
        return None if decoders is None else DecoderMetrics(model, decoders, make_counter)

    @property
    def current(self) -> BlocksService:
        """The service on memory that is valid now."""
        if self._exports is None:
            return self._service
        with self._guard:
            generation = self._exports.generation
            if generation != self._generation:
                self._service = self._open()
                self._generation = generation
            return self._service
