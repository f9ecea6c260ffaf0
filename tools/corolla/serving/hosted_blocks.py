"""The block range of a process, with its part of the server's KV cache.

Apart from hosting.py, as these modules take a second of processor time to import, and all models of a server start at
once: those that host no blocks do without.
"""

from threading import Lock

from corolla.kv.adapters import AdapterTable
from corolla.kv.arena import device_arena, host_arena
from corolla.kv.reorder import CacheReorderer
from corolla.kv.steps import SessionSteps
from corolla.kv.table import SessionTable
from corolla.model.block_range import BlockRange
from corolla.model.decoders import open_decoders
from corolla.serving.blocks import BlocksService
from corolla.serving.hosting import Host
from corolla.serving.lora import ProcessAdapters
from corolla.serving.metrics import DecoderMetrics, MakeCounter


class HostedBlocks:
    """A BlocksService that is opened again when device memory it uses was lost with the process that owned it."""

    def __init__(self, host: Host, table: SessionTable) -> None:
        self._host = host
        self._table = table
        self._guard = Lock()
        self._generation = host.exports.generation if host.exports else 0
        self._service = _open_blocks(host, table)

    def count_rows(self, model: str, make_counter: MakeCounter) -> DecoderMetrics | None:
        """Reports what the decoders do as metrics; None with the eager decoder."""
        decoders = self._service.decoders
        return None if decoders is None else DecoderMetrics(model, decoders, make_counter)

    @property
    def current(self) -> BlocksService:
        """The service on memory that is valid now."""
        if self._host.exports is None:
            return self._service
        with self._guard:
            generation = self._host.exports.generation
            if generation != self._generation:
                self._service = _open_blocks(self._host, self._table)
                self._generation = generation
            return self._service


def _open_blocks(host: Host, table: SessionTable) -> BlocksService:
    hosted = host.model.blocks
    if host.exports is None:
        arena = host_arena(host.directory, host.layout, hosted)
    else:
        arena = device_arena(host.exports, host.layout, hosted, host.model.device, table.forget_block)
    steps = SessionSteps(table, hosted, lambda: host.parts.generation)
    blocks = BlockRange(host.parts, hosted)
    sizes = host.model.decoder_batch_sizes
    decoders = open_decoders(host.parts, blocks, arena, sizes, adapters=bool(host.model.adapters))
    adapters = ProcessAdapters(AdapterTable(table.database), host.parts, hosted)
    return BlocksService(blocks, arena, steps, CacheReorderer(steps, arena, hosted), adapters, decoders)
