"""Where a checkpoint comes from: a local folder, or one commit of a model on the hub."""

from pathlib import Path

from corolla.checkpoint.folder import CheckpointFolder
from corolla.checkpoint.hub import SCHEME, HubModel, is_hub_name, resolve
from corolla.errors import InvalidValueError

Source = Path | HubModel


def find_source(text: str, revision: str | None = None, token: str | None = None) -> Source:
    """What a user means: a folder if there is one, else a model on the hub if it may be the name of one.

    CheckpointError as of `resolve`; InvalidValueError for a `revision` of a folder.
    """
    if is_hub_name(text) and not Path(text).is_dir():
        return resolve(text, revision, token)
    if revision:
        raise InvalidValueError("--revision", revision, f"none, as {text} is no model on the hub")
    return Path(text)


def may_be_checkpoint(text: str) -> bool:
    """Whether it is a folder that looks like a checkpoint, or may be the name of a model on the hub."""
    return (Path(text) / "config.json").is_file() if Path(text).is_dir() else is_hub_name(text)


def written_source(text: str, repository: Path) -> Source:
    """What a model repository says; relative paths start at its folder."""
    return HubModel.parse(text) if text.startswith(SCHEME) else (repository / text).resolve()


def open_checkpoint(source: Source) -> CheckpointFolder:
    """The checkpoint; its weights are fetched when they are read, unless they are here."""
    if isinstance(source, HubModel):
        return CheckpointFolder(source.folder(), source)
    return CheckpointFolder(source)
