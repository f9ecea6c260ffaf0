"""The first blocks of a server that was told only how many to host."""

import logging
import random
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from corolla.balance.choice import choose_again, choose_blocks
from corolla.checkpoint.identity import ModelIdentity
from corolla.checkpoint.source import Source, open_checkpoint
from corolla.peers.membership import Membership
from corolla.peers.record import Throughput
from corolla.peers.registry import RegistryAwayError, open_registry

_ROUNDS = 10
_LOG = logging.getLogger("corolla.balance")


@dataclass(frozen=True)
class BlockChoice:
    """Consecutive blocks of a model of so many `blocks` that are to be served."""

    blocks: int
    chosen: range

    @classmethod
    def of(cls, source: Source, name: str, registry: str, size: int, throughput: Throughput) -> "BlockChoice":
        """Those of which the swarm of a checkpoint, called `name` unless it is empty, is shortest.

        InvalidValueError where the model has fewer than `size`. While the registry is away the first ones are taken.
        """
        blocks = open_checkpoint(source).config.num_hidden_layers
        identity = ModelIdentity.of(source, name)
        try:
            with closing(open_registry(registry)) as reader:
                peers = [peer for peer in reader.list(identity.name) if peer.revision == identity.revision]
        except RegistryAwayError as error:
            _LOG.warning("%s; taking the first %d blocks", error, size)
            peers = []
        return cls(blocks, choose_blocks(peers, blocks, size, throughput))

    def settled(self, joined: Membership, write: Callable[[range], Path], repository: Path) -> Path:
        """The repository to serve, once the choice is announced: another one if others chose the same moment."""
        for _ in range(_ROUNDS):
            time.sleep(random.uniform(0.5, 1.5))
            own = joined.announcer.record
            again = choose_again(joined.directory.peers(), self.blocks, own)
            if again == own.blocks:
                break
            repository = write(again)
            joined.announcer.update(start=again.start, end=again.stop)
        return repository
