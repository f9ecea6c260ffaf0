"""The block range of a process, with its part of the server's KV cache.

Apart from hosting.py, as these modules take a second of processor time to import, and all models of a server start at
once: those that host no blocks do without.
"""

from functools import partial
from threading import Lock
from typing import TYPE_CHECKING

from corolla.kv.adapters import AdapterTable
from corolla.kv.arena import KVArena, device_arena, host_arena
from corolla.kv.reorder import CacheReorderer
from corolla.kv.steps import SessionSteps
from corolla.kv.table import SessionTable
from corolla.model.block_range import BlockRange
from corolla.model.decoders import open_decoders
from corolla.serving.blocks import BlocksService
from corolla.serving.hosting import Host
from corolla.serving.lora import ProcessAdapters
from corolla.serving.metrics import MakeCounter, Reports, report_decoders

if TYPE_CHECKING:
    from corolla.serving.shards import ShardLeader


class HostedBlocks:
    """A BlocksService that is opened again when device memory it uses was lost with the process that owned it."""

    def __init__(self, host: Host, table: SessionTable) -> None:
        self._host = host
        self._table = table
        self._guard = Lock()
        self._generation = host.exports.generation if host.exports else 0
        self._leader = _start_shards(host) if host.shard.count > 1 else None
        self._service = _open_blocks(host, table, self._leader)
        if self._leader is not None:
            self._leader.wait_until_ready()

    def count_rows(self, model: str, make_counter: MakeCounter) -> Reports | None:
        """Reports what the decoders do as metrics; None with the eager decoder."""
        decoders = self._service.decoders
        return None if decoders is None else report_decoders(model, decoders, make_counter)

    @property
    def current(self) -> BlocksService:
        """The service on memory that is valid now."""
        if self._host.exports is None:
            return self._service
        with self._guard:
            generation = self._host.exports.generation
            if generation != self._generation:
                self._service = _open_blocks(self._host, self._table, self._leader)
                self._generation = generation
            return self._service


def open_arena(host: Host, table: SessionTable) -> KVArena:
    """The arena of a process, for the blocks of its model and its shard."""
    hosted = host.model.blocks
    if host.exports is None:
        return host_arena(host.directory, host.layout, hosted, host.shard)
    return device_arena(host.exports, host.layout, hosted, host.device, table.forget_block, host.shard)


def _open_blocks(host: Host, table: SessionTable, leader: "ShardLeader | None") -> BlocksService:
    arena = open_arena(host, table)
    steps = SessionSteps(table, host.model.blocks, lambda: host.parts.generation)
    if leader is None:
        blocks = BlockRange(host.parts, host.model.blocks)
        reorderer = CacheReorderer(steps, host.layout, arena.copy)
    else:
        blocks = leader.blocks(host)
        reorderer = CacheReorderer(steps, host.layout, partial(leader.copy, arena))
    sizes = host.model.decoder_batch_sizes
    decoders = open_decoders(host.parts, blocks, arena, sizes, adapters=bool(host.model.adapters))
    adapters = ProcessAdapters(AdapterTable(table.database), host.parts, host.model.blocks)
    return BlocksService(blocks, arena, steps, reorderer, adapters, decoders)


def _start_shards(host: Host) -> "ShardLeader":
    from corolla.serving.shards import ShardLeader

    return ShardLeader(host)
