"""What a written model repository says."""

from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from corolla.checkpoint.source import Source, written_source
from corolla.dtypes import DType, dtype_named
from corolla.errors import CheckpointError


def is_repository(folder: Path) -> bool:
    """Whether there are models in it, whoever wrote them."""
    return any(folder.glob("*/config.pbtxt"))


def checkpoint_of(repository: Path) -> Source:
    """The checkpoint that a repository serves; CheckpointError when it is none of Corolla's."""
    return written_source(_parameter(repository, "checkpoint"), repository)


def registry_of(repository: Path) -> str:
    """The URL of the registry that the server takes part in; empty for none, and where it is none of Corolla's."""
    try:
        return _parameter(repository, "registry")
    except CheckpointError:
        return ""


def dtype_of(repository: Path) -> DType:
    """The dtype that a repository serves in; CheckpointError when it is none of Corolla's."""
    return dtype_named(_parameter(repository, "dtype"))


def _parameter(repository: Path, name: str) -> str:
    file = repository / "sessions" / "config.pbtxt"
    if not file.is_file():
        raise CheckpointError(f"{repository}: no model repository of Corolla; write one with `corolla init`")
    value: str = text_format.Parse(file.read_text(), ModelConfig()).parameters[name].string_value
    return value
