"""`corolla pause`: takes a model of a running server out of service."""

import click

from corolla.client import DEFAULT_ADDRESS
from corolla.pausing import ModelControl


@click.command(epilog="Example: corolla pause blocks_00_04")
@click.argument("model")
@click.option("--timeout", type=float, default=60.0, show_default=True, help="Seconds to wait for running requests.")
@click.option("--address", default=DEFAULT_ADDRESS, show_default=True, help="gRPC endpoint of the server.")
def command(model: str, timeout: float, address: str) -> None:
    """Take MODEL out of service until `corolla resume`; running requests end first.

    Its process ends and gives back its memory. Sessions keep their place in the KV cache and go on afterwards;
    ensembles that need the model pause with it.
    """
    with ModelControl(address) as control:
        control.pause(model, timeout)
    click.echo(f"{model}: paused; `corolla resume {model}` brings it back")
