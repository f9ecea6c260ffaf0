"""`corolla demo`: start a server, generate once, stop it."""

import os
from contextlib import ExitStack
from pathlib import Path

import click

from corolla.server.background import background_server
from corolla.server.options import ServerOptions


@click.command(
    epilog="""\b
    Example:
      corolla demo ./model_repository "A block range is" """
)
@click.argument("repository", metavar="REPO", type=click.Path(path_type=Path))
@click.argument("text")
@click.option("--max-tokens", type=int, default=64, show_default=True)
@click.option("--log-file", type=click.Path(path_type=Path), help="File for the server's log. [default: none is kept]")
def command(repository: Path, text: str, max_tokens: int, log_file: Path | None) -> None:
    """Serve REPO on free ports, print TEXT and what the server generates after it, and stop the server."""
    from corolla.client import CorollaClient

    with ExitStack() as stack:
        sink = stack.enter_context((log_file or Path(os.devnull)).open("a"))
        click.echo(f"Starting a server for {repository} ...", err=True)
        options = ServerOptions(repository, http_port=0, grpc_port=0, metrics_port=0)
        server = stack.enter_context(background_server(options, sink))
        click.echo(f"It serves at {server.endpoints}.", err=True)
        click.echo(text, nl=False)
        with CorollaClient(str(server.endpoints.grpc)) as client:
            for chunk in client.generate(text, max_tokens=max_tokens):
                click.echo(chunk.text, nl=False)
        click.echo()
        click.echo("Stopping it ...", err=True)
