"""What writing a repository would change in a folder, and which of it would undo a person's work."""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from corolla.repository.stamp import digest_of, read_stamp

CONFIG = "config.pbtxt"
KEEP = Path("1", ".gitkeep")
"""Keeps the folder of the model's version, which is empty, in git."""


@dataclass(frozen=True)
class Change:
    """One file, by its path in the repository, before and after; None where there is none.

    `edited`: a person has changed the file, or added others to the folder of a model that is to go.
    """

    file: Path
    before: str | None
    after: str | None
    edited: bool = False

    def diff(self) -> str:
        """As of `diff -u`."""
        before, after = (text.splitlines(keepends=True) if text else [] for text in (self.before, self.after))
        old, new = (str(self.file) if text is not None else "/dev/null" for text in (self.before, self.after))
        return "".join(difflib.unified_diff(before, after, old, new))


@dataclass(frozen=True)
class Changes:
    """All that is to be done, and the files that were edited by hand but need no change and so are kept."""

    changes: list[Change]
    kept: list[Path]

    @property
    def edited(self) -> list[Change]:
        """Those that would undo a person's work."""
        return [change for change in self.changes if change.edited]

    @property
    def configs(self) -> list[Change]:
        """Those of models, whose version folders go without saying."""
        return [change for change in self.changes if change.file.name == CONFIG]

    def diff(self) -> str:
        """As of `diff -ru`."""
        return "".join(change.diff() for change in self.changes)


def find_changes(files: Mapping[Path, str], folder: Path, *, force: bool = False) -> Changes:
    """What makes `folder` hold `files`, by their paths in it, and no model that was written before and is none of them.

    A model that a person has put there stays, and so does everything else. What was edited by hand is kept as it is if
    what would be written has not changed since, unless there is `force`.
    """
    changes: list[Change] = []
    kept: list[Path] = []
    for file, after in files.items():
        before = _read(folder / file)
        if before == after or (file.name == KEEP.name and before is not None):
            continue
        stamp = read_stamp(before or "")
        if stamp and stamp.edited and stamp.digest == digest_of(after) and not force:
            kept.append(file)
        else:
            edited = before is not None and (stamp is None or stamp.edited)
            changes.append(Change(file, before, after, edited))
    return Changes([*changes, *_leftovers(files, folder)], kept)


def _leftovers(files: Mapping[Path, str], folder: Path) -> Iterator[Change]:
    """A server would load them beside the others, with weights and cache of their own."""
    for config in sorted(folder.glob(f"*/{CONFIG}")):
        file, text = config.relative_to(folder), config.read_text(errors="replace")
        stamp = read_stamp(text)
        own = stamp and stamp.model == file.parent.name and not config.parent.is_symlink()
        if file not in files and stamp and own:
            inside = {path for path in config.parent.rglob("*") if path.is_file()}
            added = inside - {config, config.parent / KEEP}
            yield Change(file, text, None, edited=stamp.edited or bool(added))


def _read(file: Path) -> str | None:
    return file.read_text(errors="replace") if file.exists() else None
