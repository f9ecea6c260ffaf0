"""What a written model repository says."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from google.protobuf import json_format, text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

from corolla.checkpoint.source import Source, written_source
from corolla.errors import CheckpointError

if TYPE_CHECKING:
    from corolla.serving.parameters import ServedModel


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


def served_model(repository: Path, name: str) -> "ServedModel":
    """A model as its backend finds it in its `initialize`, on the CPU or the first GPU.

    CheckpointError when the repository has no such model.
    """
    from corolla.serving.parameters import ServedModel

    config = _config(repository, name)
    on_gpu = config.instance_group[0].kind == ModelInstanceGroup.KIND_GPU
    return ServedModel.from_arguments(
        {
            "model_config": json.dumps(json_format.MessageToDict(config, preserving_proto_field_name=True)),
            "model_repository": str(repository / name),
            "model_instance_kind": "GPU" if on_gpu else "CPU",
            "model_instance_device_id": "0",
        }
    )


def parameters_of(repository: Path, model: str) -> dict[str, str]:
    """What the config of a model tells its backend; CheckpointError when the repository has no such model."""
    return {name: found.string_value for name, found in _config(repository, model).parameters.items()}


def _parameter(repository: Path, name: str) -> str:
    return parameters_of(repository, "sessions").get(name, "")


def _config(repository: Path, model: str) -> ModelConfig:
    file = repository / model / "config.pbtxt"
    if not file.is_file():
        raise CheckpointError(f"{repository}: no model repository of Corolla; write one with `corolla init`")
    return text_format.Parse(file.read_text(), ModelConfig())
