"""`corolla sessions`: the KV cache and the sessions of a running server."""

import json

import click

from corolla.client import DEFAULT_ADDRESS, CorollaClient

_address = click.option("--address", default=DEFAULT_ADDRESS, show_default=True, help="gRPC endpoint of the server.")


@click.group(
    epilog="""\b
    Examples:
      corolla sessions stat
      corolla sessions open --max-length 512 --timeout 10
      corolla sessions close 6f1e..."""
)
def command() -> None:
    """Look at the KV cache of a running server; open and close sessions."""


@command.command(epilog="Example: corolla sessions stat")
@click.argument("session_id", required=False)
@_address
def stat(session_id: str | None, address: str) -> None:
    """Print the state of the cache, and of one session if given, as JSON."""
    _call(address, "stat", session_id=session_id)


@command.command("open", epilog="Example: corolla sessions open --max-length 512 --timeout 10")
@click.option("--max-length", type=int, required=True, help="Positions to reserve.")
@click.option("--timeout", type=float, default=0.0, show_default=True, help="Seconds to wait for room.")
@click.option("--priority", type=int, default=0, show_default=True, help="Lower is served first.")
@click.option("--idle-timeout", type=float, help="Seconds without a step after which the session ends.")
@click.option("--adapter", help="Adapts all steps of the session.")
@_address
def open_session(address: str, **options: str | float | None) -> None:
    """Open a session and print its id and what it reserved, as JSON."""
    _call(address, "open", **options)


@command.command(epilog="Example: corolla sessions close 6f1e...")
@click.argument("session_id")
@_address
def close(session_id: str, address: str) -> None:
    """Close a session and print what it gave back, as JSON."""
    _call(address, "close", session_id=session_id)


def _call(address: str, operation: str, **fields: str | float | None) -> None:
    with CorollaClient(address) as client:
        click.echo(json.dumps(client.sessions(operation, **fields), indent=2))
