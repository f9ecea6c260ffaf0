"""The plan that a repository was written by, from what its files say."""

import json
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

from corolla.checkpoint.hub import SCHEME, HubModel
from corolla.checkpoint.source import Source, open_checkpoint, written_source
from corolla.dtypes import dtype_named
from corolla.errors import CheckpointError
from corolla.model.batch_sizes import parse_batch_sizes
from corolla.repository.plan import RepositoryPlan
from corolla.serving.parameters import parse_blocks


def written_plan(repository: Path) -> RepositoryPlan:
    """CheckpointError for a repository that is none of Corolla's, or damaged, or without its checkpoint.

    InvalidValueError where it was edited to something that cannot be served.
    """
    try:
        models = {file.parent.name: text_format.Parse(file.read_text(), ModelConfig())
                  for file in repository.glob("*/config.pbtxt")}  # fmt: skip
        return _plan(repository, models)
    except (text_format.ParseError, KeyError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{repository}: no model repository of Corolla, or of another version of it ({error}); write one with "
            "`corolla init`"
        ) from error


def _plan(repository: Path, models: dict[str, ModelConfig]) -> RepositoryPlan:
    values = {key: value.string_value for key, value in models["sessions"].parameters.items()}
    blocks = [parse_blocks(model.parameters["blocks"].string_value)
              for name, model in models.items() if name.startswith("blocks_")]  # fmt: skip
    ranges = sorted(blocks, key=lambda hosted: hosted.start)
    kinds = {group.kind for model in models.values() for group in model.instance_group}
    max_batch_size = int(values["max_batch_size"])
    return RepositoryPlan(
        checkpoint=_as_written(values["checkpoint"]),
        config=open_checkpoint(written_source(values["checkpoint"], repository)).config,
        dtype=dtype_named(values["dtype"]),
        ranges=ranges,
        device="cuda" if ModelInstanceGroup.KIND_GPU in kinds else "cpu",
        max_batch_size=max_batch_size,
        threads=int(values["threads"]),
        attn_cache_tokens=int(values["attn_cache_tokens"]),
        page_size=int(values["page_size"]),
        max_short_tokens=int(values["max_short_tokens"]),
        decoder=values["decoder"],
        decoder_batch_sizes=parse_batch_sizes(values["decoder_batch_sizes"], max_batch_size),
        batch_channel_capacity=int(values["batch_channel_capacity"]),
        mirror=values["mirror"] == "true",
        quant=values["quant"],
        tensor_parallel=int(values["tensor_parallel"]),
        adapters={name: _as_written(source) for name, source in json.loads(values["adapters"]).items()},
        blocks=range(ranges[0].start, ranges[-1].stop) if ranges else range(0),
        ends="embed" in models,
        span="span" in models,
        registry=values["registry"],
        model_id=values["model_id"],
        revision=values["revision"],
    )


def _as_written(text: str) -> Source:
    """Relative paths stay relative to the repository."""
    return HubModel.parse(text) if text.startswith(SCHEME) else Path(text)
