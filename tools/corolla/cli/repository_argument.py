"""The repository that `corolla serve` is to serve: one that is there, or that of a checkpoint, written now."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from corolla.checkpoint.source import may_be_checkpoint
from corolla.cli.repository_options import write_chosen
from corolla.errors import InvalidValueError
from corolla.repository.choices import Choices, plan_repository
from corolla.repository.reading import is_repository
from corolla.repository.writer import state_folder


def repository_to_serve(ctx: click.Context, named: str, out: Path | None, choices: Mapping[str, Any]) -> Path:
    """The folder of a repository; `choices` but the registry, and `out`, are for a checkpoint only.

    InvalidValueError for what is neither; errors as of `plan_repository` and `write_repository`.
    """
    if not is_repository(Path(named)):
        return _write_repository(named, out, Choices(**choices))
    _refuse(ctx, named, {"out", *choices} - {"registry"})
    return Path(named)


def _refuse(ctx: click.Context, repository: str, names: Iterable[str]) -> None:
    """What the repository was written with holds; settings that are meant for all commands are passed over."""
    for name in names:
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            flag = f"--{name.replace('_', '-')}"
            raise InvalidValueError(
                flag, ctx.params[name], f"only for a checkpoint; {repository} is written: change it with `corolla init`"
            )


def _write_repository(checkpoint: str, out: Path | None, choices: Choices) -> Path:
    """The folder of the repository, the same for the same inputs."""
    if not may_be_checkpoint(checkpoint):
        raise InvalidValueError(
            "CHECKPOINT|REPO",
            checkpoint,
            "a checkpoint, which is a folder with config.json or org/name on the hub, or a repository as `corolla "
            "init` writes it; flags for tritonserver come after it",
        )
    if choices.relative and out is None:
        raise InvalidValueError("--relative", True, "only together with --out")
    plan, opened = plan_repository(checkpoint, out or Path(), choices)
    folder = out or state_folder(plan)
    write_chosen(plan, opened, folder, choices)
    return folder
