"""Models on the Hugging Face hub, fetched into the cache of `huggingface_hub`.

Its environment variables hold: HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE and the rest.
"""

import errno
import logging
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_cached_repo_tree, snapshot_download
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import tqdm

from corolla.errors import CheckpointError, CorollaError, EnvironmentProblemError, InvalidValueError

logger = logging.getLogger(__name__)

SCHEME = "hf://"
SMALL_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]
"""Config, tokenizer and the index of the weights, whatever they are called."""
SUBFOLDERS = ["*/*"]
"""Other formats, and weights for other programs."""

_NAME = re.compile(r"(?:hf://)?(?P<id>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubModel:
    """One commit of a model; written as `hf://org/name@commit`. `token` is for this process and written nowhere."""

    id: str
    commit: str
    token: str | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return f"{SCHEME}{self.id}@{self.commit}"

    @property
    def name(self) -> str:
        """The id without the organisation."""
        return self.id.partition("/")[2]

    @classmethod
    def parse(cls, text: str) -> "HubModel":
        """The inverse of `str`; InvalidValueError without a whole commit."""
        match = _NAME.fullmatch(text)
        if match is None or not _COMMIT.fullmatch(match["revision"] or ""):
            raise InvalidValueError(
                "checkpoint", text, f"{SCHEME}org/name@ and a whole commit, as `corolla init` writes it"
            )
        return cls(match["id"], match["revision"])

    def folder(self) -> Path:
        """The local folder of the commit, with all its small files, and with what else was fetched.

        The hub is not asked when it is complete.
        CheckpointError, EnvironmentProblemError as of `fetch`.
        """
        with suppress(CachedRepoTreeNotFoundError, LocalEntryNotFoundError):
            get_cached_repo_tree(self.id, revision=self.commit)  # without it, nobody knows whether all files are there
            return Path(
                snapshot_download(
                    self.id,
                    revision=self.commit,
                    local_files_only=True,
                    allow_patterns=SMALL_FILES,
                    ignore_patterns=SUBFOLDERS,
                )
            )
        return _small_files(self.id, self.commit, self.token)

    def fetch(self, folder: Path, names: Iterable[str]) -> None:
        """Fetches files that are not in the `folder` yet; those that the hub does not have are not an error.

        CheckpointError when the hub does not give them, EnvironmentProblemError when the disk does not take them.
        """
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            logger.info("fetching %d files of %s", len(missing), self)
            _download(self.id, self.commit, self.token, missing, _TerminalBar)


def is_hub_name(text: str) -> bool:
    """Whether a text may name a model on the hub: org/name, hf://org/name, org/name@revision."""
    return _NAME.fullmatch(text) is not None


def resolve(text: str, revision: str | None, token: str | None) -> HubModel:
    """The commit that a name and its revision (None: the one in the name, else main) mean now.

    Offline, what they meant when they were last asked for. CheckpointError when there is no such model.
    """
    match = _NAME.fullmatch(text)
    assert match is not None
    if revision and match["revision"]:
        raise InvalidValueError("--revision", revision, f"none beside that of {text}")
    folder = _small_files(match["id"], revision or match["revision"] or constants.DEFAULT_REVISION, token)
    return HubModel(match["id"], folder.name, token)


class _TerminalBar(tqdm):
    """A progress bar where somebody sees it move."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options | {"disable": None})


class _NoBar(tqdm):
    """For what takes no time."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options | {"disable": True})


def _small_files(model_id: str, revision: str, token: str | None) -> Path:
    return _download(model_id, revision, token, SMALL_FILES, _NoBar)


def _download(model_id: str, revision: str, token: str | None, patterns: list[str], bar: type[tqdm]) -> Path:
    """The folder of the commit, into which the files of the top level that match were fetched."""
    try:
        return Path(
            snapshot_download(
                model_id,
                revision=revision,
                token=token,
                allow_patterns=patterns,
                ignore_patterns=SUBFOLDERS,
                tqdm_class=bar,
            )
        )
    except Exception as error:  # the library's own errors, those of its HTTP client, and those of the disk
        raise _explained(model_id, revision, error) from error


def _explained(model_id: str, revision: str, error: Exception) -> CorollaError:
    where = f"checkpoint: {model_id!r} of {constants.ENDPOINT}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
        return EnvironmentProblemError(
            f"{constants.HF_HUB_CACHE}: cannot be written ({error.strerror}); free disk space or set HF_HOME to "
            "another folder"
        )
    if isinstance(error, GatedRepoError):
        return CheckpointError(
            f"{where} is gated; accept its terms on {constants.ENDPOINT}/{model_id} and give the token of an account "
            "that has access (HF_TOKEN, `hf auth login`)"
        )
    if isinstance(error, RevisionNotFoundError):
        return CheckpointError(f"{where} has no revision {revision!r}; give a branch, a tag or a commit")
    answer = next((e for e in (error, error.__cause__) if isinstance(e, HfHubHTTPError)), None)
    if answer is not None and answer.response.status_code in (401, 404):
        return CheckpointError(
            f"{where} does not exist, or is private; there is no folder of that name either. If it is private, give "
            "the token of an account that has access (HF_TOKEN, `hf auth login`)"
        )
    if isinstance(error, LocalEntryNotFoundError) and constants.HF_HUB_OFFLINE:
        return CheckpointError(
            f"{where}, revision {revision!r}, is not in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE forbids "
            "to fetch it; fetch it online first"
        )
    reason = str(error.__cause__ or error).strip().splitlines()
    return CheckpointError(
        f"{where}, revision {revision!r}, cannot be fetched ({reason[0] if reason else type(error).__name__}); "
        "try again when the hub can be reached, or set HF_ENDPOINT to a mirror"
    )
