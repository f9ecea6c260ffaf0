"""The process of a further shard of a block range: `python -m corolla.serving.shard DESCRIPTOR LEADER`.

DESCRIPTOR is its end of a pipe to the process of the first shard, LEADER the id of that process, with which it ends.
"""

from corolla.serving.starting import started

# isort: split
import os
import select
import signal
import sys
from multiprocessing.connection import Connection
from threading import Thread

from corolla.errors import CorollaError
from corolla.kv.arena import KVArena
from corolla.model.block_range import BlockRange
from corolla.model.tensor_parallel import join_shards, parallelizer
from corolla.serving.hosted_blocks import open_arena
from corolla.serving.hosting import Host
from corolla.serving.shards import READY, Command, Start


def main(descriptor: int, leader: int) -> None:
    """Follows until the leader ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes, and the leader decides
    _end_with(leader)
    connection = Connection(descriptor)
    start: Start = connection.recv()
    host = Host(start.model, start.shard.rank)
    mesh = join_shards(host.shard, start.rendezvous, host.device)
    table = host.session_table()

    def opened() -> tuple[int, BlockRange, KVArena]:
        generation = host.parts.generation
        blocks = BlockRange(host.parts, host.model.blocks, parallelizer(host.parts, mesh))
        return generation, blocks, open_arena(host, table)

    try:
        generation, blocks, arena = opened()
        connection.send(READY)
    except CorollaError as error:
        connection.send(str(error))
    started()
    while True:
        try:
            command: Command = connection.recv()
        except EOFError:
            return
        if host.parts.generation != generation:
            generation, blocks, arena = opened()
        command.follow(blocks, arena)


def _end_with(leader: int) -> None:
    """Ends this process at once when the other one ends, even while it waits for it."""

    def watch(descriptor: int) -> None:
        select.select([descriptor], [], [])
        os._exit(0)

    try:
        Thread(target=watch, args=(os.pidfd_open(leader),), daemon=True).start()
    except ProcessLookupError:
        os._exit(0)
    if os.getppid() != leader:
        os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
