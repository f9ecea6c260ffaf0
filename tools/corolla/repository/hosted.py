"""What a server for a written model repository has of which model."""

from dataclasses import dataclass
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig


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
        values = _parameters(repository, "sessions")
        if not values:
            return None
        start, _, end = _parameters(repository, "chain").get("blocks", "0:0").partition(":")
        return cls(
            registry=values.get("registry", ""),
            model_id=values.get("model_id", ""),
            revision=values.get("revision", ""),
            blocks=range(int(start), int(end)),
            dtype=values["dtype"],
            quant=values["quant"],
            generates=(repository / "generate" / "config.pbtxt").is_file(),
        )


def _parameters(repository: Path, model: str) -> dict[str, str]:
    file = repository / model / "config.pbtxt"
    if not file.is_file():
        return {}
    config = text_format.Parse(file.read_text(), ModelConfig())
    return {name: parameter.string_value for name, parameter in config.parameters.items()}
