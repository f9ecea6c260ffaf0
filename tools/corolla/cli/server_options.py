"""The options that say where a server listens and how others reach it."""

from collections.abc import Callable
from typing import TypeVar

import click

_Command = TypeVar("_Command", bound=Callable[..., None])
_PORT = click.IntRange(0, 65535)

_OPTIONS = (
    click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0: all of them."),
    click.option("--http-port", type=_PORT, default=8000, show_default=True, help="0: any free one."),
    click.option("--grpc-port", type=_PORT, default=8001, show_default=True, help="0: any free one."),
    click.option("--metrics-port", type=_PORT, default=8002, show_default=True, help="0: any free one."),
    click.option(
        "--announce-address",
        metavar="HOST[:PORT]",
        help="Where other servers reach its gRPC endpoint. [default: --host, or the address of the network interface]",
    ),
)


def server_options(command: _Command) -> _Command:
    """Adds the options to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
