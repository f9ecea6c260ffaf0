"""The `corolla` command. Commands are imported only when called, so that `--help` stays fast."""

import importlib
import sys

import click

from corolla import __version__
from corolla.cli.settings import configure
from corolla.errors import CorollaError

COMMANDS = {
    "adapters": "List, load and unload the adapters of a running server.",
    "bench": "Measure a checkpoint on this machine, beside transformers, and draw the figures.",
    "cache": "Look at, shrink or empty the disk cache of prepared blocks.",
    "config": "Print the settings of a command and where each of them comes from.",
    "demo": "Serve a repository, generate once and stop the server.",
    "demo-checkpoint": "Train the small Llama of the demo.",
    "doctor": "Check what a server needs on this machine; say what to do about what is missing.",
    "generate": "Print a text and what a running server generates after it, as it comes.",
    "init": "Write a model repository that serves a checkpoint, local or on the Hugging Face hub.",
    "make-checkpoint": "Write a Llama checkpoint with seeded random weights, for benchmarks.",
    "pause": "Take a model of a running server out of service.",
    "plan": "Say what of a checkpoint fits on this machine and how fast it will be, with every formula.",
    "peers": "List the servers of a swarm, as they announce themselves.",
    "resume": "Bring a paused model back.",
    "serve": "Serve a checkpoint, or the models of a repository, until interrupted.",
    "sessions": "Look at the KV cache of a running server; open and close sessions.",
}
"""What `corolla --help` says of each command. Its module has its name, with _ for -."""


class LazyGroup(click.Group):
    """A click group whose commands live in modules of their own, each with an attribute `command`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"corolla.cli.{name.replace('-', '_')}").command
        return configure(command, [name])

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))


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
