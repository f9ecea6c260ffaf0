"""`corolla doctor`: is this machine fit to serve?"""

import click

from corolla.server.checks import check_compiler, describe, run_checks


@click.command(
    epilog="""\b
    Example:
      corolla doctor"""
)
def command() -> None:
    """Check what a server needs on this machine; say what to do about what is missing.

    Exits with status 1 if anything is missing.
    """
    checks = [*run_checks(), check_compiler()]
    for check in checks:
        click.echo(("ok      " if check.ok else "MISSING ") + describe(check))
    if not all(check.ok for check in checks):
        raise SystemExit(1)
