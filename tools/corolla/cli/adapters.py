"""`corolla adapters`: the LoRA adapters of a running server."""

from pathlib import Path

import click

from corolla.client import DEFAULT_ADDRESS, CorollaClient
from corolla.errors import InvalidValueError

_address = click.option("--address", default=DEFAULT_ADDRESS, show_default=True, help="gRPC endpoint of the server.")


@click.group(
    epilog="""\b
    Examples:
      corolla adapters list
      corolla adapters load poems=./my-adapter
      corolla adapters unload poems"""
)
def command() -> None:
    """List, load and unload the LoRA adapters of a running server."""


@command.command("list", epilog="Example: corolla adapters list")
@_address
def list_adapters(address: str) -> None:
    """Print the loaded adapters as JSON: name, source, rank, and how many sessions have each."""
    _call(address, "list_adapters")


@command.command(epilog="Example: corolla adapters load poems=org/name")
@click.argument("adapter", metavar="NAME=ADAPTER")
@_address
def load(adapter: str, address: str) -> None:
    """Load an adapter that `peft` wrote, a folder on the server's machine or org/name on the hub."""
    name, equals, source = adapter.partition("=")
    if not equals:
        raise InvalidValueError("NAME=ADAPTER", adapter, "name=folder or name=org/name")
    if Path(source).is_dir():
        source = str(Path(source).resolve())
    _call(address, "load_adapter", adapter=name, source=source)


@command.command(epilog="Example: corolla adapters unload poems")
@click.argument("name")
@_address
def unload(name: str, address: str) -> None:
    """Unload an adapter. Sessions and generations that have it go on with it until they end."""
    _call(address, "unload_adapter", adapter=name)


def _call(address: str, operation: str, **fields: str) -> None:
    with CorollaClient(address) as client:
        click.echo(client.sessions(operation, **fields)["adapters"])
