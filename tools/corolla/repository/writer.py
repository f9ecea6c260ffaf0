"""Writes a model repository: one folder with config.pbtxt and an empty version folder per model."""

from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from corolla.repository.models import all_models
from corolla.repository.plan import RepositoryPlan

KEEP = ".gitkeep"


def repository_files(plan: RepositoryPlan) -> dict[Path, str]:
    """Every file of the repository by its path inside it."""
    files: dict[Path, str] = {}
    for model in all_models(plan):
        files[Path(model.name) / "config.pbtxt"] = config_text(model)
        files[Path(model.name) / "1" / KEEP] = ""
    return files


def write_repository(plan: RepositoryPlan, out: Path) -> list[Path]:
    """Writes what differs from what is there; returns the changed files. Other files are left alone."""
    changed = []
    for relative, text in repository_files(plan).items():
        file = out / relative
        if file.exists() and file.read_text() == text:
            continue
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        changed.append(file)
    return changed


def config_text(model: ModelConfig) -> str:
    """config.pbtxt of a model; parameters come in the order of their names."""
    text: str = text_format.MessageToString(model, use_short_repeated_primitives=True)
    return text
