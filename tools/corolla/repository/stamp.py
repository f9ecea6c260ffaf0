"""The line of a written file that tells whether somebody has edited it since."""

import hashlib
import re
from dataclasses import dataclass

_STAMP = re.compile(r"^# written: (?P<model>\S+) (?P<digest>[0-9a-f]{16})\n", re.MULTILINE)


@dataclass(frozen=True)
class Stamp:
    """What was written: the model, and a digest of all of the file but this line."""

    model: str
    digest: str
    edited: bool
    """Whether the file is no longer what was written."""


def stamped(model: str, comments: str, body: str) -> str:
    """A file of both, with its stamp as the last line of the comments."""
    return f"{comments}# written: {model} {_digest(comments + body)}\n{body}"


def read_stamp(text: str) -> Stamp | None:
    """None for a file that has none, which a person has made."""
    match = _STAMP.search(text)
    if match is None:
        return None
    rest = text[: match.start()] + text[match.end() :]
    return Stamp(match["model"], match["digest"], edited=_digest(rest) != match["digest"])


def digest_of(text: str) -> str | None:
    """What the stamp says; None without one."""
    stamp = read_stamp(text)
    return stamp.digest if stamp else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
