"""`corolla config`: the settings of a command, and where each of them comes from."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from corolla.cli.main import cli
from corolla.cli.settings import (
    OTHER_VARIABLES,
    SHARING,
    apply,
    key_of,
    settings_of,
    used_file,
    variable_in_use,
    variables,
)
from corolla.errors import InvalidValueError

SECRET = ("token",)
"""Keys whose values are not printed."""
_DEFAULT = "default"
_HIDDEN = "set, but not shown"


@dataclass(frozen=True)
class Setting:
    """One option: its value, None where it has none, and the flag, variable or file it comes from."""

    key: str
    value: str | int | float | bool | list[str] | None
    source: str


@click.command(
    context_settings={"ignore_unknown_options": True},
    epilog="""\b
    Examples:
      corolla config
      corolla config init --dtype float32
      corolla config serve > corolla.toml""",
)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.argument("name", metavar="[COMMAND]", default="serve")
@click.argument("arguments", metavar="[ITS ARGUMENTS]...", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(ctx: click.Context, as_json: bool, name: str, arguments: tuple[str, ...]) -> None:
    """Print the settings of COMMAND (serve), and where each of them comes from.

    What it prints can be used as corolla.toml; defaults are comments there.
    """
    if name not in SHARING:
        raise InvalidValueError("COMMAND", name, ", ".join(SHARING))
    file = used_file(ctx)
    settings = list(_settings(name, list(arguments), file.path if file else None))
    if as_json:
        content = {setting.key: {"value": setting.value, "source": setting.source} for setting in settings}
        click.echo(json.dumps(content, indent=2))
        return
    click.echo(f"# Settings of `corolla {name}`, and where each of them comes from.")
    for setting in settings:
        click.echo(_line(setting))
    for variable in OTHER_VARIABLES:
        click.echo(f"# {variable}: {os.environ.get(variable, 'not set')}")
    for variable in _unknown_variables(name):
        click.echo(f"# {variable}: set, but no option of `corolla {name}` has this name")


def _unknown_variables(name: str) -> list[str]:
    """Those that look like settings; a misspelt one would go unnoticed."""
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    known = {variable for param in settings_of(command) for variable in variables(param, [name])}
    return sorted(key for key in os.environ if key.startswith("COROLLA_") and key not in known | {*OTHER_VARIABLES})


def _settings(name: str, arguments: list[str], path: Path | None) -> Iterator[Setting]:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    apply(click.Context(command), [name], path)  # an error ends it, which it does not in resilient parsing
    option = [f"--config={path}"] if path else []
    ctx = command.make_context(name, [*option, *arguments], resilient_parsing=True)
    for param in settings_of(command):
        key, value, source = key_of(param), ctx.params.get(str(param.name)), _source(ctx, param)
        if key in SECRET and value is not None:
            value, source = None, f"{source}: {_HIDDEN}"
        yield Setting(key, _plain(value), source)


def _source(ctx: click.Context, param: click.Parameter) -> str:
    match ctx.get_parameter_source(str(param.name)):
        case ParameterSource.COMMANDLINE:
            return "command line"
        case ParameterSource.ENVIRONMENT:
            return str(variable_in_use(param))
        case ParameterSource.DEFAULT_MAP:
            file = used_file(ctx)
            assert file is not None
            return str(file.path)
        case _:
            return _DEFAULT


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [str(each) for each in value]
    return str(value) if isinstance(value, Path) else value


def _line(setting: Setting) -> str:
    """A line of TOML; a comment for defaults, and where there is no value, for which TOML has no word."""
    if setting.value is None:
        return f"# {setting.key}: {'' if setting.source.endswith(_HIDDEN) else 'not set, '}{setting.source}"
    assignment = f"{setting.key} = {json.dumps(setting.value, ensure_ascii=False)}"
    return f"{'# ' if setting.source == _DEFAULT else ''}{assignment:<40} # {setting.source}"
