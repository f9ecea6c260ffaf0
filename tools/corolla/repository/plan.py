"""What a model repository is to contain, checked before anything is written."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from transformers import PretrainedConfig

from corolla.checkpoint.source import Source
from corolla.checkpoint.stored_quant import check_fits
from corolla.dtypes import DType
from corolla.errors import InvalidValueError
from corolla.kernels.packing import GROUPS
from corolla.kv.adapters import check_adaptable, check_name
from corolla.kv.layout import DEFAULT_PAGE_SIZE, default_attn_cache_tokens
from corolla.model.batch_sizes import COMPILED, check_decoder, default_batch_sizes
from corolla.model.family import family_of
from corolla.model.sharding import check_shards
from corolla.quantization import NF4, NONE, check_quant
from corolla.remote.patience import FAILOVER_TIMEOUT, STEP_TIMEOUT
from corolla.wire.states import ENCODINGS

DEFAULT_MAX_SHORT_TOKENS = 128
DEFAULT_MAX_BATCH_SIZE = 16
DEFAULT_BATCH_CHANNEL_CAPACITY = 1
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class RepositoryPlan:
    """One server's models for one checkpoint.

    `checkpoint` is written as it is: a commit on the hub, a path, or a path relative to the repository's folder.
    `threads` 0 means one per core of the machine that serves. `decoder_batch_sizes` is as parse_batch_sizes gives it,
    empty for the default. With `mirror`, the dynamic batchers prefer these sizes; without it, which is for benchmarks,
    they prefer none. `max_short_tokens` 0 means the default for `quant` and device. Each block range runs in
    `tensor_parallel` shards. `adapters`, written like the checkpoint, are loaded when the server starts.

    `blocks` are those that the server hosts, None for all; `ranges` follow each other through them. With `ends` it has
    embedding and head, and generates text. `registry` is where servers of the same model, `model_id` and `revision`,
    find each other; empty for a server by itself. Others can run its blocks with a `registry` or with `span`. Its
    generations reach others in the encoding `wire`, empty for that of the dtype; a step there may take `step_timeout`
    seconds, and the search for another server when one failed `failover_timeout`.
    """

    checkpoint: Source
    config: PretrainedConfig
    dtype: DType
    ranges: list[range]
    device: str = "cpu"
    max_batch_size: int = DEFAULT_MAX_BATCH_SIZE
    threads: int = 0
    attn_cache_tokens: int = 0
    page_size: int = DEFAULT_PAGE_SIZE
    max_short_tokens: int = 0
    decoder: str = COMPILED
    decoder_batch_sizes: tuple[int, ...] = ()
    batch_channel_capacity: int = DEFAULT_BATCH_CHANNEL_CAPACITY
    mirror: bool = True
    quant: str = NONE
    tensor_parallel: int = 1
    adapters: Mapping[str, Source] = field(default_factory=dict)
    blocks: range | None = None
    ends: bool = True
    span: bool = False
    registry: str = ""
    model_id: str = ""
    revision: str = ""
    wire: str = ""
    step_timeout: float = STEP_TIMEOUT
    failover_timeout: float = FAILOVER_TIMEOUT

    def __post_init__(self) -> None:
        family_of(self.config)
        check_shards(self.config, self.tensor_parallel)
        check_decoder(self.decoder, self.tensor_parallel)
        check_fits(check_quant(self.quant, self.tensor_parallel), self.config)
        if self.decoder == COMPILED and self.device == "cpu" and self.dtype.torch not in GROUPS:
            raise InvalidValueError("dtype", self.dtype.name, "float32, bfloat16 with the compiled decoder on CPUs")
        for name in self.adapters:
            check_name(name)
            check_adaptable(name, self.tensor_parallel)
        _check_between("batch_channel_capacity", self.batch_channel_capacity, 0, 1024)
        self._check_blocks()
        if self.wire and self.wire not in ENCODINGS:
            raise InvalidValueError("wire", self.wire, ", ".join(ENCODINGS))
        for name in ("step_timeout", "failover_timeout"):
            if not 0 < getattr(self, name) <= 3600:
                raise InvalidValueError(name, getattr(self, name), "more than 0, up to 3600 seconds")
        if self.device not in DEVICES:
            raise InvalidValueError("device", self.device, ", ".join(DEVICES))
        _check_between("max_batch_size", self.max_batch_size, 1, 1024)
        _check_between("threads", self.threads, 0, 1024)
        _check_between("attn_cache_tokens", self.cache_tokens, self.page_size, 2**31)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The decoder batch sizes, descending; the largest is max_batch_size."""
        return self.decoder_batch_sizes or default_batch_sizes(self.max_batch_size)

    @property
    def short_tokens(self) -> int:
        """Rows times new positions of a step up to which it is merged. On CUDA, kernels for NF4 are not batched."""
        unbatched = self.quant == NF4 and self.device != "cpu"
        return self.max_short_tokens or (1 if unbatched else DEFAULT_MAX_SHORT_TOKENS)

    @property
    def hosted(self) -> range:
        """All blocks of the server; empty for one that has only the ends of the model."""
        return range(self.config.num_hidden_layers) if self.blocks is None else self.blocks

    @property
    def whole(self) -> bool:
        """Whether the server hosts all blocks of the model."""
        return self.hosted == range(self.config.num_hidden_layers)

    @property
    def cache_tokens(self) -> int:
        """Token positions of the KV cache."""
        return self.attn_cache_tokens or default_attn_cache_tokens(self.config)

    def _check_blocks(self) -> None:
        count, hosted = self.config.num_hidden_layers, self.hosted
        written = f"{hosted.start}:{hosted.stop}"
        if hosted and (hosted.start < 0 or hosted.stop > count):
            raise InvalidValueError("blocks", written, f"a range inside 0:{count}, or none")
        if [block for blocks in self.ranges for block in blocks] != list(hosted):
            ranges = ",".join(f"{r.start}:{r.stop}" for r in self.ranges)
            raise InvalidValueError(
                "ranges", ranges, f"ranges that follow each other from {hosted.start} to {hosted.stop}"
            )
        if not hosted and not self.ends:
            raise InvalidValueError("blocks", "none", f"a range inside 0:{count}, unless the server has the ends")
        if self.ends and not self.whole and not self.registry:
            raise InvalidValueError(
                "registry", self.registry, "the URL of a registry, as `generate` needs other servers for the blocks "
                f"that this one, with {written}, does not host"
            )


def split_evenly(blocks: range, range_size: int) -> list[range]:
    """Ranges of `range_size` blocks, the last one maybe shorter; none for no blocks."""
    if not blocks:
        return []
    _check_between("range_size", range_size, 1, len(blocks))
    return [blocks[start : start + range_size] for start in range(0, len(blocks), range_size)]


def _check_between(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidValueError(name, value, f"{low} to {high}")
