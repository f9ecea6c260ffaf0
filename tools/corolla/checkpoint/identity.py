"""What a model is called among servers, and which weights it has: both are equal where blocks of it fit together."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corolla.checkpoint.hub import HubModel
from corolla.checkpoint.source import Source
from corolla.checkpoint.weight_files import FORMATS

SAMPLES, SAMPLE_BYTES = 64, 4096
"""Of a file that every server has whole, so much is read."""

_SAYS_NOTHING_OF_WEIGHTS = ("_name_or_path", "transformers_version")


@dataclass(frozen=True)
class ModelIdentity:
    """`name` is org/name, or that of the folder; `revision` a commit of the hub, or a digest."""

    name: str
    revision: str

    @classmethod
    def of(cls, source: Source, name: str = "") -> "ModelIdentity":
        """That of a checkpoint, called `name` unless it is empty.

        Of a folder with an index of weight files, the digest goes by config and index, as a server may have some of
        the files only. Of a folder with a single file it goes by config, size and samples of the content.
        """
        if isinstance(source, HubModel):
            return cls(name or source.id, source.commit)
        return cls(name or source.resolve().name, _digest(source))


def _digest(folder: Path) -> str:
    config = _json(folder / "config.json")
    digest = hashlib.sha256(_canonical({key: config[key] for key in config if key not in _SAYS_NOTHING_OF_WEIGHTS}))
    for kind in FORMATS:
        if (folder / kind.index).is_file():
            digest.update(_canonical(_json(folder / kind.index)))
            break
        if (folder / kind.single).is_file():
            _add_samples(digest, folder / kind.single)
            break
    return digest.hexdigest()[:16]


def _add_samples(digest: Any, file: Path) -> None:
    size = file.stat().st_size
    digest.update(f"{file.name}:{size}".encode())
    with file.open("rb") as content:
        for sample in range(SAMPLES):
            content.seek(size * sample // SAMPLES)
            digest.update(content.read(SAMPLE_BYTES))


def _json(file: Path) -> Any:
    return json.loads(file.read_text())


def _canonical(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True).encode()
