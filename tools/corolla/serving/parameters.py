"""What a model's config.pbtxt tells its backend."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from corolla.dtypes import DType, dtype_named
from corolla.errors import CorollaError, InvalidValueError


@dataclass(frozen=True)
class ServedModel:
    """One model of the repository, as its backend finds it.

    `blocks` is empty where the model hosts none; `threads` 0 means one per core of the machine.
    """

    name: str
    checkpoint: Path
    device: torch.device
    dtype: DType
    blocks: range
    threads: int
    attn_cache_tokens: int
    page_size: int
    max_short_tokens: int

    @classmethod
    def from_arguments(cls, arguments: dict[str, str]) -> "ServedModel":
        """From the `args` of a Python backend's `initialize`; relative paths start at the repository's folder."""
        config = json.loads(arguments["model_config"])
        values = {key: value["string_value"] for key, value in config["parameters"].items()}
        repository = Path(arguments["model_repository"]).parent
        try:
            return cls(
                name=config["name"],
                checkpoint=(repository / values["checkpoint"]).resolve(),
                device=_device(arguments),
                dtype=dtype_named(values["dtype"]),
                blocks=parse_blocks(values["blocks"]) if "blocks" in values else range(0),
                threads=_natural(values, "threads"),
                attn_cache_tokens=_natural(values, "attn_cache_tokens"),
                page_size=_natural(values, "page_size"),
                max_short_tokens=_natural(values, "max_short_tokens"),
            )
        except KeyError as error:
            raise CorollaError(
                f"{config['name']}/config.pbtxt: parameter {error} is missing; write the repository with `corolla init`"
            ) from error


def _device(arguments: dict[str, str]) -> torch.device:
    """The device that Triton assigned to the instance."""
    if arguments["model_instance_kind"] == "GPU":
        return torch.device("cuda", int(arguments["model_instance_device_id"]))
    return torch.device("cpu")


def parse_blocks(text: str) -> range:
    """The blocks of `start:end`, end exclusive."""
    start, colon, end = text.partition(":")
    if not (colon and start.isdecimal() and end.isdecimal() and int(start) < int(end)):
        raise InvalidValueError("blocks", text, "start:end with start < end, such as 0:4")
    return range(int(start), int(end))


def _natural(values: dict[str, Any], name: str) -> int:
    text = values[name]
    if not text.isdecimal():
        raise InvalidValueError(name, text, "a whole number, 0 or more")
    return int(text)
