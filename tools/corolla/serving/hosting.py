"""What every served model opens when it is loaded: the checkpoint's parts, the session table."""

import logging

import torch

from corolla.checkpoint.disk_cache import DiskCache
from corolla.checkpoint.prepared import PreparedParts
from corolla.checkpoint.source import open_checkpoint
from corolla.kv.adapters import AdapterTable
from corolla.kv.device_exports import DeviceExports
from corolla.kv.layout import KVLayout
from corolla.kv.run_directory import run_directory
from corolla.kv.table import SessionTable
from corolla.kv.token_log import TokenLog
from corolla.model.shape import ModelShape
from corolla.model.sharding import Shard
from corolla.serving.lora import AdaptersService
from corolla.serving.parameters import ServedModel
from corolla.threads import thread_count


class Host:
    """Opens what the models of one process need, from the model's parameters."""

    def __init__(self, model: ServedModel, rank: int = 0) -> None:
        """`rank` is that of the shard this process is to be; shards are on devices that follow each other."""
        logging.basicConfig(format="corolla: %(message)s")
        logging.getLogger("corolla").setLevel(logging.INFO)
        self.model = model
        self.shard = Shard(rank, model.tensor_parallel)
        torch.set_num_threads(thread_count(model.threads, self.shard.count))
        self.device = model.device
        if model.device.type == "cuda":
            self.device = torch.device("cuda", model.device.index + rank)
        self.checkpoint = open_checkpoint(model.checkpoint)
        self.directory = run_directory()
        self.layout = KVLayout.of(
            self.checkpoint.config, model.dtype.name, model.attn_cache_tokens, model.page_size, self.shard.count
        )
        on_device = self.device.type != "cpu"
        self.exports = DeviceExports(self.directory / "exports") if on_device else None
        self.parts = PreparedParts(
            self.checkpoint,
            model.dtype.torch,
            DiskCache.default(),
            self.device,
            self.exports,
            model.packed,
            model.quant,
            self.shard,
        )

    def session_table(self) -> SessionTable:
        """The server's session table."""
        return SessionTable(self.directory, self.layout, ModelShape.of(self.checkpoint.config).context_length)

    def adapters(self, table: SessionTable) -> AdaptersService:
        """Loads and unloads the server's adapters."""
        return AdaptersService(AdapterTable(table.database), self.parts, self.model.tensor_parallel)

    def token_log(self) -> TokenLog:
        """The server's log of generated tokens."""
        return TokenLog(self.directory, self.layout)
