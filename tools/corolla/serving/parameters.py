"""What a model's config.pbtxt tells its backend."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from corolla.checkpoint.source import Source, written_source
from corolla.dtypes import DType, dtype_named
from corolla.errors import CorollaError, InvalidValueError
from corolla.model.batch_sizes import EAGER, check_decoder, joined, parse_batch_sizes, preferred_batch_sizes
from corolla.quantization import check_quant
from corolla.remote.patience import FAILOVER_TIMEOUT, STEP_TIMEOUT


@dataclass(frozen=True)
class ServedModel:
    """One model of the repository, as its backend finds it.

    `blocks` is empty where the model hosts none; `threads` 0 means one per core of the machine.
    `decoder_batch_sizes`, descending, is empty with the eager decoder. Block ranges run in `tensor_parallel` shards.
    `adapters` are loaded when the server starts. `registry` is where other servers of the same model, `model_id` and
    `revision`, are found; empty without others. For `generate` alone, `wire` is how hidden
    states travel to them; see RepositoryPlan.
    """

    name: str
    checkpoint: Source
    device: torch.device
    dtype: DType
    blocks: range
    threads: int
    attn_cache_tokens: int
    page_size: int
    max_short_tokens: int
    decoder_batch_sizes: tuple[int, ...]
    batch_channel_capacity: int
    quant: str
    tensor_parallel: int
    adapters: dict[str, Source]
    registry: str = ""
    model_id: str = ""
    revision: str = ""
    wire: str = ""
    step_timeout: float = STEP_TIMEOUT
    failover_timeout: float = FAILOVER_TIMEOUT

    @property
    def packed(self) -> bool:
        """Whether weights lie in memory as the CPU kernels of compiled decoders read them."""
        return bool(self.decoder_batch_sizes) and self.device.type == "cpu"

    @classmethod
    def from_arguments(cls, arguments: dict[str, str]) -> "ServedModel":
        """From the `args` of a Python backend's `initialize`; relative paths start at the repository's folder."""
        config = json.loads(arguments["model_config"])
        values = {key: value.get("string_value", "") for key, value in config["parameters"].items()}
        repository = Path(arguments["model_repository"]).parent
        try:
            return cls(
                name=config["name"],
                checkpoint=written_source(values["checkpoint"], repository),
                device=_device(arguments),
                dtype=dtype_named(values["dtype"]),
                blocks=parse_blocks(values["blocks"]) if "blocks" in values else range(0),
                threads=_natural(values, "threads"),
                attn_cache_tokens=_natural(values, "attn_cache_tokens"),
                page_size=_natural(values, "page_size"),
                max_short_tokens=_natural(values, "max_short_tokens"),
                decoder_batch_sizes=_decoder_batch_sizes(config, values),
                batch_channel_capacity=_natural(values, "batch_channel_capacity"),
                quant=check_quant(values["quant"], _natural(values, "tensor_parallel")),
                tensor_parallel=_natural(values, "tensor_parallel"),
                adapters=_adapters(values["adapters"], repository),
                registry=values["registry"],
                model_id=values["model_id"],
                revision=values["revision"],
                wire=values.get("wire", ""),
                step_timeout=float(values.get("step_timeout", STEP_TIMEOUT)),
                failover_timeout=float(values.get("failover_timeout", FAILOVER_TIMEOUT)),
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


def _decoder_batch_sizes(config: dict[str, Any], values: dict[str, str]) -> tuple[int, ...]:
    """The sizes to compile for; CorollaError where the dynamic batcher of a block range aims at others."""
    check_decoder(values["decoder"], _natural(values, "tensor_parallel"))
    if values["decoder"] == EAGER:
        return ()
    sizes = parse_batch_sizes(values["decoder_batch_sizes"], _natural(values, "max_batch_size"))
    if "dynamic_batching" in config and "blocks" in values and values["mirror"] == "true":
        batching = config["dynamic_batching"]
        preferred = sorted(map(int, batching.get("preferred_batch_size", [])))
        if sizes[0] == 1 and preferred == [1]:
            preferred = []  # Triton fills in the maximum where no size is preferred
        found = (config["max_batch_size"], preferred)
        delay = int(batching.get("max_queue_delay_microseconds", 0))
        if found != (sizes[0], preferred_batch_sizes(sizes)) or delay == 0:
            raise CorollaError(
                f"{config['name']}/config.pbtxt: decoder_batch_sizes {joined(sizes)} want max_batch_size {sizes[0]}, "
                f"preferred_batch_size {preferred_batch_sizes(sizes)} and max_queue_delay_microseconds above 0, but "
                f"it says {found[0]}, {found[1]} and {delay}; write the repository with `corolla init`"
            )
    return sizes


def parse_blocks(text: str) -> range:
    """The blocks of `start:end`, end exclusive."""
    start, colon, end = text.partition(":")
    if not (colon and start.isdecimal() and end.isdecimal() and int(start) < int(end)):
        raise InvalidValueError("blocks", text, "start:end with start < end, such as 0:4")
    return range(int(start), int(end))


def _adapters(text: str, repository: Path) -> dict[str, Source]:
    """Of a JSON object of sources by name."""
    return {name: written_source(source, repository) for name, source in json.loads(text).items()}


def _natural(values: dict[str, Any], name: str) -> int:
    text = values[name]
    if not text.isdecimal():
        raise InvalidValueError(name, text, "a whole number, 0 or more")
    return int(text)
