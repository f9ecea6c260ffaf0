"""`corolla peers`: the servers that a registry knows."""

import json
from contextlib import closing
from dataclasses import asdict
from time import sleep

import click

from corolla.peers.environment import REGISTRY
from corolla.peers.record import Peers
from corolla.peers.registry import PeerRegistry, RegistryAwayError, open_registry
from corolla.peers.table import peer_table

WATCH_SECONDS = 1.0


@click.command(
    epilog="""\b
    Examples:
      corolla peers
      corolla peers --registry etcd://10.0.0.1:2379,10.0.0.2:2379 --watch
      corolla peers --model org/name --json"""
)
@click.option("--registry", envvar=REGISTRY, default="sqlite://", show_default=True, show_envvar=True, help="Its URL.")
@click.option("--model", help="Only the servers of this one. [default: all]")
@click.option("--watch", is_flag=True, help="Print the servers again at each change, until interrupted.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list per line.")
def command(registry: str, model: str | None, watch: bool, as_json: bool) -> None:
    """List the servers of a swarm, as they announce themselves."""
    with closing(open_registry(registry)) as opened:
        shown: str | None = None
        while True:
            try:
                text = _text(_peers(opened, model), as_json) or f"no servers in {registry}"
            except RegistryAwayError as error:
                if not watch:
                    raise
                text = f"corolla: {error}"
            if text != shown:
                click.echo(text if as_json or shown is None else f"\n{text}")
            if not watch:
                return
            shown = text
            sleep(WATCH_SECONDS)


def _peers(registry: PeerRegistry, model: str | None) -> Peers:
    names = registry.models() if model is None else [model]
    return [peer for name in names for peer in registry.list(name)]


def _text(peers: Peers, as_json: bool) -> str:
    return json.dumps([asdict(peer) for peer in peers]) if as_json else peer_table(peers)
