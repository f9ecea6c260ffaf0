"""`corolla resume`: brings a paused model of a running server back."""

import click

from corolla.client import DEFAULT_ADDRESS
from corolla.pausing import ModelControl


@click.command(epilog="Example: corolla resume blocks_00_04")
@click.argument("model")
@click.option("--address", default=DEFAULT_ADDRESS, show_default=True, help="gRPC endpoint of the server.")
def command(model: str, address: str) -> None:
    """Bring MODEL, which `corolla pause` took out of service, back with the ensembles that need it."""
    with ModelControl(address) as control:
        control.resume(model)
    click.echo(f"{model}: serves again")
