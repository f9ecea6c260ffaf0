"""Writes a model repository: one folder with config.pbtxt and an empty version folder per model."""

import hashlib
import json
import os
import shutil
from pathlib import Path

from corolla.errors import CorollaError, EnvironmentProblemError
from corolla.repository.changes import CONFIG, KEEP, Changes, find_changes
from corolla.repository.config_text import config_text
from corolla.repository.models import all_models
from corolla.repository.plan import RepositoryPlan


class EditedRepositoryError(CorollaError):
    """Writing the repository would undo what a person has done in it."""

    def __init__(self, folder: Path, changes: Changes) -> None:
        named = "\n".join(f"  {folder / change.file}" for change in changes.edited)
        diff = "".join(change.diff() for change in changes.edited)
        super().__init__(
            f"nothing was written, as these are no longer as `corolla init` wrote them:\n{named}\n"
            "Undo what was changed or added there, write to another folder, or give --force to lose it. This would "
            f"change:\n{diff}"
        )


def repository_files(plan: RepositoryPlan) -> dict[Path, str]:
    """Every file of the repository by its path inside it."""
    files: dict[Path, str] = {}
    for model in all_models(plan):
        files[Path(model.name) / CONFIG] = config_text(model, plan)
        files[Path(model.name) / KEEP] = ""
    return files


def state_folder(plan: RepositoryPlan) -> Path:
    """Where a repository goes that nobody named a folder for: in the user's state folder, one for each content."""
    base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    content = json.dumps([[str(path), text] for path, text in repository_files(plan).items()])
    name = plan.checkpoint.name or "checkpoint"
    return base / "corolla" / "repositories" / f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"


def repository_changes(plan: RepositoryPlan, out: Path, *, force: bool = False) -> Changes:
    """What `write_repository` would do, an error left aside."""
    return find_changes(repository_files(plan), out, force=force)


def write_repository(plan: RepositoryPlan, out: Path, *, force: bool = False) -> Changes:
    """Writes what differs from what is there, and removes models that were written before and are not planned now.

    Anything else is left alone. EditedRepositoryError, and nothing written, where that would undo a person's work;
    with `force` it is undone: edited files are overwritten, models removed with all that was added to them.
    EnvironmentProblemError where the folder cannot be written.
    """
    changes = repository_changes(plan, out, force=force)
    if changes.edited and not force:
        raise EditedRepositoryError(out, changes)
    try:
        for change in changes.changes:
            if change.after is None:
                shutil.rmtree(out / change.file.parent)
            else:
                _replace(out / change.file, change.after)
    except OSError as error:
        raise EnvironmentProblemError(f"{out}: cannot be written ({error}); name another folder") from error
    return changes


def _replace(file: Path, text: str) -> None:
    """At once, so that nobody sees half a file; others may be writing the same."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f".{file.name}.{os.getpid()}")
    new.write_text(text)
    new.rename(file)
