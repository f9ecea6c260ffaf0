"""What a server for a written model repository has of which model."""

from dataclasses import dataclass
from pathlib import Path

from corolla.errors import CheckpointError
from corolla.repository.reading import parameters_of


@dataclass(frozen=True)
class HostedModel:
    """`registry`, `model_id` and `revision` are empty where nobody else was to know of the server."""

    registry: str
    model_id: str
    revision: str
    blocks: range
    dtype: str
    quant: str
    generates: bool

    @classmethod
    def of(cls, repository: Path) -> "HostedModel | None":
        """None when the repository is none of Corolla's; a server may have other models."""
        try:
            values = parameters_of(repository, "sessions")
        except CheckpointError:
            return None
        chain = parameters_of(repository, "chain") if (repository / "chain").is_dir() else {}
        start, _, end = chain.get("blocks", "0:0").partition(":")
        return cls(
            registry=values.get("registry", ""),
            model_id=values.get("model_id", ""),
            revision=values.get("revision", ""),
            blocks=range(int(start), int(end)),
            dtype=values["dtype"],
            quant=values["quant"],
            generates=(repository / "generate" / "config.pbtxt").is_file(),
        )
