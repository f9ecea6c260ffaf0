"""Options from elsewhere than the command line: from environment variables, and from a file in TOML.

An option of several places is taken from the command line, else from the environment, else from the file.
"""

import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click

from corolla.errors import CorollaError, InvalidValueError

DEFAULT_FILE = Path("corolla.toml")
FILE_VARIABLE = "COROLLA_CONFIG"
SHARING = ("init", "plan", "serve", "doctor")
"""The commands that know the keys and variables without the name of a command, as they have most options in common."""
COMMON_KEYS = ("registry",)
"""Of these keys and variables, all commands know those they have."""
OTHER_VARIABLES = ("COROLLA_CACHE", "COROLLA_CACHE_LIMIT", FILE_VARIABLE)
"""What is no option: the disk cache, and the file itself."""

_META = f"{__name__}.file"


class SettingsError(CorollaError):
    """A settings file that cannot be used."""


@dataclass(frozen=True)
class SettingsFile:
    """What a file says: keys at its top for the commands that share them, and a table for each command."""

    path: Path
    content: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> "SettingsFile":
        """SettingsError where it cannot be read."""
        try:
            return cls(path, tomllib.loads(path.read_text()))
        except (OSError, ValueError) as error:
            raise SettingsError(f"{path}: {error}") from error

    def shared(self) -> dict[str, Any]:
        """The keys at the top."""
        return {key: value for key, value in self.content.items() if not isinstance(value, dict)}

    def table(self, names: Sequence[str]) -> dict[str, Any]:
        """The keys of the command of these names, such as `sessions open`, or of a group of commands."""
        content: Any = self.content
        for name in names:
            content = content.get(name, {})
            if not isinstance(content, dict):
                raise SettingsError(f"{self.path}: {name} is the name of a command: write a table [{'.'.join(names)}]")
        return dict(content)


def configure(command: click.Command, names: Sequence[str]) -> click.Command:
    """Lets a command, and those of a group, take their options from elsewhere too; `names` lead to it."""
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            configure(inner, [*names, name])
    elif not any(isinstance(param, _ConfigOption) for param in command.params):
        for param in command.params:
            given = [param.envvar] if isinstance(param.envvar, str) else param.envvar or ()
            param.envvar = [*variables(param, names), *given]
        command.params.append(_ConfigOption(names))
    return command


def key_of(param: click.Parameter) -> str:
    """The name of an option in a file: that of its flag."""
    flags = [flag for flag in param.opts if flag.startswith("--")]
    return max(flags, key=len).removeprefix("--") if flags else str(param.name).replace("_", "-")


def variables(param: click.Parameter, names: Sequence[str]) -> list[str]:
    """The environment variables of an option of a command, the first one first."""
    key = key_of(param)
    own, shared = ("_".join(["COROLLA", *words]).upper().replace("-", "_") for words in ([*names, key], [key]))
    return [own, shared] if names[0] in SHARING or key in COMMON_KEYS else [own]


def settings_of(command: click.Command) -> Iterator[click.Parameter]:
    """The options and arguments that may come from elsewhere."""
    return (param for param in command.params if not isinstance(param, _ConfigOption))


def used_file(ctx: click.Context) -> SettingsFile | None:
    """The file that a command takes settings from."""
    found: SettingsFile | None = ctx.meta.get(_META)
    return found


class _ConfigOption(click.Option):
    """`--config`: read before all other options, whose values it provides and checks."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(
            ["--config"],
            type=click.Path(path_type=Path),
            envvar=FILE_VARIABLE,
            help=f"File with settings in TOML, see docs/configuration.md. [default: {DEFAULT_FILE} if there is one]",
            is_eager=True,
            expose_value=False,
            callback=lambda ctx, param, value: apply(ctx, names, value),
        )


def apply(ctx: click.Context, names: Sequence[str], path: Path | None) -> None:
    """Makes a file, or corolla.toml if there is one, the source of what command line and environment leave open.

    SettingsError, InvalidValueError for what it or the environment says wrongly of this command.
    """
    params = {key_of(param): param for param in settings_of(ctx.command)}
    for param in params.values():
        _check_environment(ctx, param)
    if path is None and not DEFAULT_FILE.exists():
        return
    file = SettingsFile.read(path or DEFAULT_FILE)
    ctx.meta[_META] = file
    own = file.table(names)
    _check_known(file.path, f"table [{'.'.join(names)}]", own, params)
    if names[0] in SHARING:
        _check_known(file.path, "the file's top", file.shared(), _shared_keys())
    taken = params if names[0] in SHARING else set(params).intersection(COMMON_KEYS)
    shared = {key: value for key, value in file.shared().items() if key in taken}
    for key, value in (shared | own).items():
        _check_value(ctx, params[key], f"{file.path}: {key}", value)
    ctx.default_map = {str(params[key].name): value for key, value in (shared | own).items()}


def _shared_keys() -> set[str]:
    from corolla.cli.main import COMMANDS, cli

    keys: set[str] = set()
    for name in SHARING:
        if name in COMMANDS:
            command = cli.get_command(click.Context(cli), name)
            assert command is not None
            keys |= {key_of(param) for param in settings_of(command)}
    return keys


def _check_known(path: Path, place: str, keys: Iterable[str], known: Iterable[str]) -> None:
    for key in keys:
        if key not in known:
            close = get_close_matches(key.replace("_", "-"), known, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise SettingsError(f"{path}: unknown key {key!r}; {hint}{place} may hold: {', '.join(sorted(known))}")


def _check_environment(ctx: click.Context, param: click.Parameter) -> None:
    variable = variable_in_use(param)
    if variable:
        _check_value(ctx, param, variable, param.value_from_envvar(ctx))


def variable_in_use(param: click.Parameter) -> str | None:
    """The environment variable that the option would be taken from."""
    return next((name for name in param.envvar or () if os.environ.get(name)), None)


def _check_value(ctx: click.Context, param: click.Parameter, where: str, value: Any) -> None:
    several = param.nargs != 1 or param.multiple
    flag = isinstance(param, click.Option) and param.is_flag
    for each in value if several and isinstance(value, list | tuple) else [value]:
        if not isinstance(each, str | int | float) or (isinstance(each, bool) and not flag):
            raise InvalidValueError(where, value, f"{'a list of' if several else 'one'} {param.type.name}")
    try:
        param.type_cast_value(ctx, value)
    except click.BadParameter as error:
        raise InvalidValueError(where, value, error.message) from error
