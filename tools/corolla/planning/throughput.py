"""How many tokens a second a server computes and its network carries, for its announcement and for plans."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from corolla.checkpoint.source import open_checkpoint
from corolla.peers.record import Throughput
from corolla.planning.dry_run import Outcome
from corolla.planning.measurement import Conditions, known, measured, remembered
from corolla.planning.network import DEFAULT_MBPS, tokens_of_mbps, tokens_to_peer
from corolla.repository.reading import served_model

STREAM_SECONDS = 0.9e-3
"""What a token costs beside the model: choice, text, tritonserver, client. `corolla bench merged` measures it."""


@dataclass(frozen=True)
class Network:
    """`mbps` megabits a second, or a `peer` at host:port to be asked; DEFAULT_MBPS without either."""

    mbps: float | None = None
    peer: str | None = None

    def tokens(self, hidden_size: int, itemsize: int, *, again: bool = False) -> float:
        """Tokens a second as hidden states. CorollaError when the peer does not answer."""
        if self.peer is None:
            return tokens_of_mbps(self.mbps or DEFAULT_MBPS, hidden_size, itemsize)
        peer = self.peer
        key = ("network", peer, hidden_size, itemsize)
        return remembered(key, lambda: tokens_to_peer(peer, hidden_size), again=again)


@dataclass(frozen=True)
class ServerSpeed:
    """What a server of `blocks` blocks does, by what one block does.

    `ends` and `stream` are seconds per token: embedding, head and choice; everything beside the model.
    As in Petals, a request goes through half of the blocks on average, as routes enter and leave anywhere.
    """

    throughput: Throughput
    blocks: int
    ends: float
    stream: float = STREAM_SECONDS

    @property
    def compute(self) -> float:
        """Tokens a second in long forwards."""
        return self.throughput.forward / ((self.blocks + 1) / 2)

    @property
    def effective(self) -> float:
        """Tokens a second: what it computes or what its network carries, whichever is less."""
        return min(self.compute, self.throughput.network)

    @property
    def session(self) -> float:
        """Tokens a second that one stream gets of a server with all blocks and the ends."""
        return 1 / (self.blocks / self.throughput.inference + self.ends + self.stream)

    def to_json(self) -> dict[str, Any]:
        """For --json."""
        derived = {"compute": self.compute, "effective": self.effective, "session": self.session}
        return asdict(self) | derived


def speed_of(outcome: Outcome, network: float, blocks: int) -> ServerSpeed:
    """What a dry run and tokens a second of the network say of a server with so many blocks."""
    throughput = Throughput(
        inference=outcome.blocks / outcome.step,
        forward=outcome.blocks * outcome.forward_positions / outcome.forward,
        network=network,
    )
    return ServerSpeed(throughput, blocks, outcome.ends)


def measured_throughput(repository: Path, network: Network | None = None, *, again: bool = False) -> Throughput:
    """Of the server that a repository describes; measured the first time, which takes minutes, or `again`.

    CorollaError when blocks cannot be run, or the peer does not answer.
    """
    model = served_model(repository, "chain")
    hidden_size = open_checkpoint(model.checkpoint).config.hidden_size
    tokens = (network or Network()).tokens(hidden_size, model.dtype.torch.itemsize, again=again)
    return speed_of(measured(repository, again=again), tokens, len(model.blocks)).throughput


def known_throughput(repository: Path, network: Network | None = None) -> Throughput | None:
    """The same if it was measured before; nothing is run, but a peer may be asked."""
    model = served_model(repository, "chain")
    conditions = Conditions.of_repository(repository)
    outcome = known(conditions)
    if outcome is None:
        return None
    tokens = (network or Network()).tokens(conditions.config.hidden_size, model.dtype.torch.itemsize)
    return speed_of(outcome, tokens, len(model.blocks)).throughput
