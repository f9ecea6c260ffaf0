"""The `corolla` command. Commands are imported only when called, so that `--help` stays fast."""

import importlib
import sys

import click

from corolla import __version__
from corolla.errors import CorollaError

COMMANDS = {
    "cache": "corolla.cli.cache",
    "demo-checkpoint": "corolla.cli.demo_checkpoint",
    "doctor": "corolla.cli.doctor",
    "generate": "corolla.cli.generate",
    "init": "corolla.cli.init",
    "make-checkpoint": "corolla.cli.make_checkpoint",
    "serve": "corolla.cli.serve",
    "sessions": "corolla.cli.sessions",
}


class LazyGroup(click.Group):
    """A click group whose commands live in modules of their own, each with an attribute `command`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(COMMANDS[name]).command
        return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__)
def cli() -> None:
    """Serve one large language model as a chain of block ranges on Triton Inference Server.

    \b
    Example:
      corolla init ./my-llama --out ./repository
      corolla serve ./repository
      corolla generate "Once upon a time"
    """


def main() -> None:
    """Entry point: errors meant for the user end the process with their message and status 1."""
    try:
        cli(prog_name="corolla")
    except CorollaError as error:
        click.echo(f"corolla: {error}", err=True)
        sys.exit(1)
