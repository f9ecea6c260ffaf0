"""The swarm of a served model, from its parameters."""

from corolla.peers.directory import PeerDirectory
from corolla.peers.environment import own_peer_id, registry_url
from corolla.remote.peer import LocalBlocks
from corolla.remote.server import RemoteServers
from corolla.remote.swarm import Swarm, SwarmSettings
from corolla.serving.parameters import ServedModel


def open_swarm(model: ServedModel, blocks: int, local: LocalBlocks | None) -> Swarm | None:
    """None where no registry is known. The whole model has so many `blocks`; `local` are those of this process."""
    url = registry_url(model.registry)
    if not url:
        return None
    servers = RemoteServers()
    settings = SwarmSettings(
        blocks=range(blocks),
        encoding=model.wire or model.dtype.name,
        hosted=model.blocks,
        peer_id=own_peer_id(),
        failover_timeout=model.failover_timeout,
        step_timeout=model.step_timeout,
    )
    return Swarm(PeerDirectory(url, model.model_id, model.revision), servers.connect, settings, local, servers.close)
