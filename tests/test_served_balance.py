"""A real server that chooses its blocks by itself, and moves when others are needed more."""

from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from checkpoints import GROUPED
from corolla.checkpoint.identity import ModelIdentity
from corolla.cli.serve import command
from corolla.errors import InvalidValueError
from corolla.peers.record import PeerRecord, PeerState
from corolla.peers.registry import PeerRegistry, open_registry
from registries import record
from servers import RunningServer
from waiting import wait_until

REGISTRY = "--registry=sqlite:///tmp/peers.sqlite"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-blocks=2"], "--num-blocks: 2 is not allowed; allowed: only with --registry"),
        (["--num-blocks=2", REGISTRY, "--blocks=0:2"], "--blocks: '0:2' is not allowed; allowed: none with"),
        (["--num-blocks=2", REGISTRY, "--out=folder"], "--out: 'folder' is not allowed; allowed: none with"),
    ],
)
def test_only_the_swarm_says_which_blocks(flags: list[str], message: str) -> None:
    with pytest.raises(InvalidValueError) as raised:
        CliRunner().invoke(command, ["checkpoint", *flags], catch_exceptions=False)
    assert message in str(raised.value)


def test_a_server_takes_the_missing_blocks_and_moves_when_others_are_missing(tmp_path: Path, suite_cache: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    GROUPED.write(checkpoint)
    blocks = GROUPED.model_config().num_hidden_layers
    identity = ModelIdentity.of(checkpoint)
    url = f"sqlite://{tmp_path}/peers.sqlite"

    def other(name: str, start: int, end: int) -> PeerRecord:
        return record(name, model=identity.name, revision=identity.revision, start=start, end=end)

    def own(registry: PeerRegistry) -> PeerRecord | None:
        found = [peer for peer in registry.list(identity.name) if peer.movable]
        return found[0] if found else None

    def is_online_with(registry: PeerRegistry, start: int, end: int) -> bool:
        peer = own(registry)
        return peer is not None and (peer.state, peer.start, peer.end) == (PeerState.ONLINE, start, end)

    with closing(open_registry(url)) as registry, closing(open_registry(url)) as leaving:
        leaving.put(other("second-half", 2, blocks))
        flags = ("--num-blocks=2", f"--registry={url}", "--balance-period=1", "--decoder=eager")
        environment = {"COROLLA_CACHE": str(suite_cache), "XDG_STATE_HOME": str(tmp_path / "state")}
        with RunningServer(checkpoint, *flags, env=environment) as server:
            assert is_online_with(registry, 0, 2)
            registry.put(other("first-half", 0, 2))
            leaving.remove(identity.name, "second-half")
            wait_until(lambda: is_online_with(registry, blocks - 2, blocks), timeout=120.0)
            assert f"moving from blocks 0:2 to {blocks - 2}:{blocks}" in server.log
            assert server.stop() == 0
        assert own(registry) is None
