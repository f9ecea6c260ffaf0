"""`corolla generate`: stream generated text from a server."""

from typing import Any

import click

from corolla.client import DEFAULT_ADDRESS, CorollaClient


@click.command(
    epilog="""\b
    Examples:
      corolla generate "A block range is"
      corolla generate "Once upon a time" --max-tokens 200 --temperature 0.8 --random-seed 7"""
)
@click.argument("text")
@click.option("--address", default=DEFAULT_ADDRESS, show_default=True, help="gRPC endpoint of the server.")
@click.option("--max-tokens", type=int, default=64, show_default=True)
@click.option("--temperature", type=float, help="0: greedy. [default: the checkpoint's generation_config.json]")
@click.option("--top-k", type=int)
@click.option("--top-p", type=float)
@click.option("--repetition-penalty", type=float)
@click.option("--random-seed", type=int)
@click.option("--adapter", help="One that is loaded; see `corolla adapters list`.")
@click.option("--timeout", type=float, help="Seconds to wait for room and for servers. [default: 30]")
@click.option("--session-id", help="Of a generation that was broken off, to go on with it after the same TEXT.")
@click.option("--stop-word", "stop_words", multiple=True, help="The text ends before it; may be given repeatedly.")
def command(text: str, address: str, stop_words: tuple[str, ...], **options: Any) -> None:
    """Print TEXT and what a running server generates after it, as it comes."""
    given = {name: value for name, value in options.items() if value is not None}
    if stop_words:
        given["stop_words"] = stop_words
    click.echo(text, nl=False)
    try:
        with CorollaClient(address) as client:
            for chunk in client.generate(text, **given):
                click.echo(chunk.text, nl=False)
    finally:
        click.echo()
