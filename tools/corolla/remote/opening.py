"""The swarm of a served model, from its parameters."""

from corolla.peers.directory import PeerDirectory
from corolla.peers.environment import own_peer_id
from corolla.remote.peer import LocalBlocks
from corolla.remote.server import RemoteServers
from corolla.remote.swarm import Swarm, SwarmSettings
from corolla.serving.parameters import ServedModel


def open_swarm(registry: str, model: ServedModel, blocks: int, local: LocalBlocks | None) -> Swarm:
    """Of the servers in a registry. The whole model has so many `blocks`; `local` are those of this process."""
    settings = SwarmSettings(
        blocks=range(blocks),
        encoding=model.wire or model.dtype.name,
        hosted=model.blocks,
        peer_id=own_peer_id(),
        failover_timeout=model.failover_timeout,
        step_timeout=model.step_timeout,
    )
    directory = PeerDirectory(registry, model.model_id, model.revision)
    return Swarm(directory, RemoteServers(), settings, local)
