"""How a server takes part in a swarm: what it is announced as, from its start to its end."""

import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from corolla import __version__
from corolla.checkpoint.identity import ModelIdentity
from corolla.errors import InvalidValueError
from corolla.kv.occupancy import Occupancy
from corolla.peers.announcer import Announcer
from corolla.peers.directory import PeerDirectory
from corolla.peers.environment import PEER_ID, REGISTRY, own_peer_id
from corolla.peers.record import PeerRecord, PeerState, Throughput
from corolla.peers.registry import DEFAULT_TTL, open_registry
from corolla.peers.round_trips import RoundTrips
from corolla.repository.hosted import HostedModel
from corolla.repository.reading import checkpoint_of
from corolla.server.options import ServerOptions
from corolla.server.supervisor import ReadyServer

DEFAULT_THROUGHPUT = Throughput(inference=100.0, forward=1000.0, network=1000.0)
"""Of servers that nobody has measured: they count the same."""


@dataclass(frozen=True)
class MembershipOptions:
    """What a user may say about it; `registry` wins over the repository's.

    A `movable` server takes other blocks when the swarm is short of them.
    """

    registry: str = ""
    throughput: Throughput = DEFAULT_THROUGHPUT
    ttl: float = DEFAULT_TTL
    movable: bool = False


class Membership:
    """The server's own announcement and its copy of all others'; to be told what becomes of the server."""

    def __init__(self, registry: str, record: PeerRecord, options: MembershipOptions, server: ServerOptions) -> None:
        self._options = options
        self._server = server
        self._run_directory: Path | None = None
        with ExitStack() as stack:
            self.directory = PeerDirectory(registry, record.model, record.revision, options.ttl)
            stack.enter_context(closing(self.directory))
            self._round_trips = RoundTrips(self.directory.peers, record.peer_id, record.end)
            stack.enter_context(closing(self._round_trips))
            self.announcer = Announcer(open_registry(registry, options.ttl), record, options.ttl, self._observed)
            stack.enter_context(closing(self.announcer))
            self._closing = stack.pop_all()

    def ready(self, server: ReadyServer) -> None:
        """It takes sessions now."""
        self._run_directory = server.run_directory
        assert server.endpoints.grpc is not None
        announced = self._server.announced(server.endpoints.grpc.port)
        self.announcer.update(state=PeerState.ONLINE, address=str(announced.address))

    def down(self, stopping: bool) -> None:
        """It takes none any more: for good if it is `stopping`, else until it is ready again."""
        self.announcer.update(state=PeerState.OFFLINE if stopping else PeerState.JOINING)

    def close(self) -> None:
        """Takes the announcement back."""
        self._closing.close()

    def _observed(self, record: PeerRecord) -> PeerRecord:
        """The record as it is now."""
        self._round_trips.end = record.end
        found = Occupancy.of(self._run_directory) if self._run_directory else Occupancy(0, 0, ())
        return replace(
            record,
            free_tokens=found.free_tokens,
            total_tokens=found.total_tokens,
            adapters=found.adapters,
            round_trips=self._round_trips.seconds(),
        )


@contextmanager
def membership(server: ServerOptions, options: MembershipOptions) -> Iterator[Membership | None]:
    """JOINING from the start; None for a repository without a registry, where none is given either.

    Meanwhile, processes that are started know by COROLLA_PEER_ID and COROLLA_REGISTRY who and where they are.
    InvalidValueError when others could not use the server; errors of `open_registry`; a registry that is away is none.
    """
    hosted = HostedModel.of(server.repository)
    registry = options.registry or (hosted.registry if hosted else "")
    if not registry:
        yield None
        return
    if hosted is None:
        raise InvalidValueError("--registry", registry, "none with a repository that `corolla init` did not write")
    if not server.serves("grpc"):
        raise InvalidValueError("--allow-grpc", "false", "true, or no --registry: other servers come over gRPC")
    record = _record(hosted, server, options)
    names = {PEER_ID: record.peer_id, REGISTRY: registry}
    before = {name: os.environ.get(name) for name in names}
    with closing(Membership(registry, record, options, server)) as joined:
        os.environ.update(names)
        try:
            yield joined
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value


def _record(hosted: HostedModel, server: ServerOptions, options: MembershipOptions) -> PeerRecord:
    model, revision = _identity(hosted, server.repository)
    return PeerRecord(
        peer_id=own_peer_id() or secrets.token_hex(8),
        address=str(server.announced(server.grpc_port).address) if server.grpc_port else "",
        model=model,
        revision=revision,
        start=hosted.blocks.start,
        end=hosted.blocks.stop,
        state=PeerState.JOINING,
        throughput=options.throughput,
        dtype=hosted.dtype,
        quant=hosted.quant,
        generates=hosted.generates,
        free_tokens=0,
        total_tokens=0,
        version=__version__,
        movable=options.movable,
    )


def _identity(hosted: HostedModel, repository: Path) -> tuple[str, str]:
    if hosted.revision:
        return hosted.model_id, hosted.revision
    identity = ModelIdentity.of(checkpoint_of(repository), hosted.model_id)
    return identity.name, identity.revision
