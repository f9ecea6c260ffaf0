"""The plan of a server's memory: which blocks go to which device, and every number that says so."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from transformers import PretrainedConfig

from corolla.dtypes import DType
from corolla.errors import CorollaError, InvalidValueError
from corolla.kernels.compact_packing import is_compact
from corolla.kv.layout import DEFAULT_PAGE_SIZE, KVLayout, default_attn_cache_tokens
from corolla.planning.fitting import Needs, Room, blocks_that_fit, shortage
from corolla.planning.machine import DeviceMemory
from corolla.planning.quantity import BLOCKS, BYTES, COUNT, TOKENS, Numbers, Origin, Quantity, bytes_text
from corolla.planning.reserve import SERVER_BYTES, Processes, ProcessMemory, usual_memory
from corolla.planning.sizes import WeightForm, block_bytes, ends_bytes, token_cache_bytes, token_cache_formula
from corolla.quantization import INT8, NF4, NONE

USABLE_PERCENT = 90
"""Of a device; the rest is for whatever else runs there."""

OVERRIDES = {
    "memory": "Bytes of each device that are free for a server.",
    "usable_memory": f"Bytes of each device that it may take. [default: {USABLE_PERCENT} % of --memory]",
    "shared_memory": "Bytes of /dev/shm that the KV cache may take, on CPUs.",
    "block_bytes": "Bytes of the weights of one block.",
    "token_cache_bytes": "Bytes of the keys and values of one token in one block.",
    "cache_bytes": "Bytes of the KV cache of one block. [default: --attn-cache-tokens x --token-cache-bytes]",
    "adapter_bytes": "Bytes of all LoRA adapters in one block.",
    "ends_bytes": "Bytes of embedding and head.",
    "server_bytes": "Bytes of tritonserver and `corolla serve`.",
    "library_bytes": "Bytes of the libraries that all processes share.",
    "process_bytes": "Bytes of each process of a model for itself.",
    "work_bytes": "Bytes that each process that runs blocks takes besides: activations, decoders.",
    "working_processes": "Processes that run blocks.",
    "idle_processes": "Other processes of models.",
    "reserve_bytes": "Bytes of everything that is neither weights nor KV cache.",
}
"""The numbers of a plan that may be given instead, and what they are. So may `attn_cache_tokens` and `num_blocks`."""


@dataclass(frozen=True)
class Setup:
    """What decides how much memory a server takes; see corolla.repository.plan.RepositoryPlan.

    `blocks` are those it may host, the first ones first. Ranges are of `range_size` blocks, or of half of them with 0;
    `ends` are hosted by the server of the first device. With `span`, others can run the blocks.
    """

    config: PretrainedConfig
    dtype: DType
    blocks: range
    quant: str = NONE
    device: str = "cpu"
    packed: bool = True
    shards: int = 1
    page_size: int = DEFAULT_PAGE_SIZE
    range_size: int = 0
    ends: bool = True
    span: bool = False
    adapter_bytes: int = 0
    process: ProcessMemory | None = None
    """As measured by a dry step; None for the usual."""

    @property
    def form(self) -> WeightForm:
        """How its weights lie in memory."""
        return WeightForm(self.dtype.torch, self.quant, self.packed, self.shards)

    def ranges(self, blocks: int) -> int:
        """The number of ranges that so many blocks are served in."""
        return math.ceil(blocks / (self.range_size or max(1, math.ceil(blocks / 2))))


class PlanError(CorollaError):
    """A server does not fit; the message says by how much, and what would."""


@dataclass(frozen=True)
class DevicePlan:
    """What one device holds, or each of a group of devices that hold a shard each.

    The server takes `needed` of its `usable` bytes. `ends` tells that it hosts embedding and head as well.
    """

    device: str
    blocks: range
    ends: bool
    needed: int
    usable: int
    numbers: tuple[Quantity, ...]

    def number(self, name: str) -> int:
        """The value of one of its numbers."""
        return next(quantity.value for quantity in self.numbers if quantity.name == name)


@dataclass(frozen=True)
class MachinePlan:
    """Which blocks go to which device; a device without shards is a server of its own."""

    setup: Setup
    devices: tuple[DevicePlan, ...]

    @property
    def blocks(self) -> range:
        """All blocks that this machine hosts."""
        return range(self.devices[0].blocks.start, self.devices[-1].blocks.stop)

    def to_json(self) -> dict[str, Any]:
        """For --json."""
        return {
            "blocks": [self.blocks.start, self.blocks.stop],
            "dtype": self.setup.dtype.name,
            "quant": self.setup.quant,
            "devices": [
                asdict(device) | {"blocks": [device.blocks.start, device.blocks.stop]} for device in self.devices
            ],
        }


@dataclass(frozen=True)
class _Fit:
    """A device's plan and what it was made of."""

    plan: DevicePlan
    needs: Needs
    room: Room


Given = Mapping[str, int]


def make_plan(
    setup: Setup, memories: Sequence[DeviceMemory], shared: int, given: Given | None = None
) -> MachinePlan:
    """As many of the blocks as fit, device by device; exactly `num_blocks` of them where that is given.

    `shared` are the bytes that files in /dev/shm may take. PlanError when not one block fits, or fewer than given.
    """
    given = dict(given or {})
    exact = "num_blocks" in given
    wanted = given.pop("num_blocks", len(setup.blocks))
    if not 1 <= wanted <= len(setup.blocks):
        raise InvalidValueError("num_blocks", wanted, f"1 to {len(setup.blocks)}")
    setup = replace(setup, blocks=setup.blocks[:wanted])
    fits = _assign(setup, memories, shared, given)
    hosted = _hosted(fits)
    if hosted < (wanted if exact else 1):
        raise PlanError(_advice(setup, memories, shared, given, fits))
    return MachinePlan(setup, tuple(fit.plan for fit in fits if fit.plan.blocks))


def _hosted(fits: Sequence[_Fit]) -> int:
    return sum(len(fit.plan.blocks) for fit in fits)


def _assign(setup: Setup, memories: Sequence[DeviceMemory], shared: int, given: Given) -> list[_Fit]:
    """Device by device, as many of the blocks that are left as it holds. With shards, all devices are one group."""
    left, fits = setup.blocks, list[_Fit]()
    for group in [memories] if setup.shards > 1 else [[memory] for memory in memories]:
        ends = setup.ends and not _hosted(fits)
        fits.append(_fit(replace(setup, ends=ends), left, group, shared, given))
        left = left[len(fits[-1].plan.blocks) :]
    return fits


def _fit(setup: Setup, blocks: range, group: Sequence[DeviceMemory], shared: int, given: Given) -> _Fit:
    numbers = Numbers(given)
    room = _room(setup, group, shared, numbers)
    needs = _needs(setup, numbers)
    fitting = blocks_that_fit(needs, room, len(blocks))
    reserve = _add_reserve(setup, fitting, numbers)
    most = f"at most {len(blocks)}"
    if room.shared is not None and needs.cache:
        most += f" and {room.shared // needs.cache}, whose cache fits into /dev/shm"
    parts = " + ".join(map(bytes_text, (needs.block, needs.cache, needs.adapters)))
    numbers.add(
        "num_blocks", fitting, BLOCKS,
        f"floor(({bytes_text(room.usable)} - {bytes_text(reserve)} - {bytes_text(needs.ends)}) / ({parts})), {most}",
        Origin.COMPUTED,
    )  # fmt: skip
    name = group[0].device if len(group) == 1 else f"{group[0].device}..{group[-1].device}"
    needed = needs.total(fitting) if fitting else 0
    return _Fit(DevicePlan(name, blocks[:fitting], setup.ends, needed, room.usable, numbers.all()), needs, room)


def _room(setup: Setup, group: Sequence[DeviceMemory], shared: int, numbers: Numbers) -> Room:
    smallest = min(group, key=lambda memory: memory.free)
    free = numbers.add("memory", smallest.free, BYTES, smallest.limit, Origin.MACHINE)
    usable = numbers.add(
        "usable_memory", free * USABLE_PERCENT // 100, BYTES, f"{USABLE_PERCENT} % of memory", Origin.COMPUTED
    )
    if setup.device != "cpu":
        return Room(usable)
    return Room(usable, numbers.add("shared_memory", shared, BYTES, "free in /dev/shm", Origin.MACHINE))


def _needs(setup: Setup, numbers: Numbers) -> Needs:
    """Of one device. On CPUs, all shards are on the same one."""
    config, form, dtype = setup.config, setup.form, setup.dtype.name
    ranks = range(setup.shards) if setup.device == "cpu" else range(1)
    kind = "plain" if not setup.packed else "compact" if is_compact(form.dtype) else "packed"
    in_words = f"{dtype}, {kind}" if setup.quant == NONE else f"{setup.quant} and {dtype}, {kind}"
    if setup.shards > 1:
        in_words += f", {len(ranks)} of {setup.shards} shards"
    block = numbers.add(
        "block_bytes", sum(block_bytes(config, form, rank) for rank in ranks), BYTES,
        f"sum over the tensors of a block, {in_words}", Origin.TENSORS,
    )  # fmt: skip
    token = numbers.add(
        "token_cache_bytes", token_cache_bytes(config, dtype, setup.shards) * len(ranks), BYTES,
        token_cache_formula(config, dtype, setup.shards, len(ranks)), Origin.TENSORS,
    )  # fmt: skip
    tokens = numbers.add(
        "attn_cache_tokens", default_attn_cache_tokens(config), TOKENS,
        "16384 with grouped or multi-query attention, else 4096", Origin.DEFAULT,
    )  # fmt: skip
    slots = KVLayout.of(config, dtype, tokens, setup.page_size).slots
    cache = numbers.add(
        "cache_bytes", slots * token, BYTES, f"{slots} tokens in whole pages x {token} bytes", Origin.COMPUTED
    )
    adapters = numbers.add(
        "adapter_bytes", setup.adapter_bytes, BYTES, "the adapters' tensors in one block, float32", Origin.TENSORS
    )
    ends = numbers.add(
        "ends_bytes", ends_bytes(config, form) if setup.ends else 0, BYTES,
        "embedding and head" if setup.ends else "embedding and head are elsewhere", Origin.TENSORS,
    )  # fmt: skip
    given = numbers.given
    return Needs(block, cache, adapters, ends, lambda blocks: _add_reserve(setup, blocks, Numbers(given)))


def _add_reserve(setup: Setup, blocks: int, numbers: Numbers) -> int:
    """What the processes of a server with so many blocks take."""
    usual = setup.process or usual_memory(setup.config, setup.dtype.torch.itemsize, setup.device)
    origin = usual.origin
    ranges = setup.ranges(blocks)
    processes = Processes.of(ranges, setup.shards, setup.device, ends=setup.ends, span=setup.span)
    on_host = setup.device == "cpu"
    server = numbers.add(
        "server_bytes", SERVER_BYTES if on_host else 0, BYTES, "tritonserver, corolla serve", Origin.CONSTANT
    )
    libraries = numbers.add("library_bytes", usual.libraries, BYTES, "mapped by every process", origin)
    private = numbers.add("process_bytes", usual.private, BYTES, "of each process before its first step", origin)
    work = numbers.add("work_bytes", usual.work, BYTES, usual.formula, origin)
    models = f"{ranges} ranges, chain" + (", span" if setup.span else "") + (", generate" if setup.ends else "")
    shards = f", each in {setup.shards} shards" if setup.shards > 1 and on_host else ""
    working = numbers.add("working_processes", processes.working, COUNT, models + shards, Origin.COMPUTED)
    others = ", ".join([*(["embed", "head"] if setup.ends else []), *(["sessions"] if on_host else [])])
    idle = numbers.add("idle_processes", processes.idle, COUNT, others or "none", Origin.COMPUTED)
    return numbers.add(
        "reserve_bytes", server + libraries + (working + idle) * private + working * work, BYTES,
        "server + library + (working + idle) x process + working x work", Origin.COMPUTED,
    )  # fmt: skip


def _advice(
    setup: Setup, memories: Sequence[DeviceMemory], shared: int, given: Given, fits: Sequence[_Fit]
) -> str:
    """That the blocks do not fit, by how much, and what would fit instead, each by one flag."""
    last, blocks, hosted = fits[-1], setup.blocks, _hosted(fits)
    on_last = len(last.plan.blocks) + len(blocks) - hosted
    missing = bytes_text(shortage(last.needs, last.room, on_last))
    where = f"{last.plan.device}, of which {bytes_text(last.room.usable)} are usable"
    if last.room.shared is not None and on_last * last.needs.cache > last.room.shared:
        where += f", and {bytes_text(last.room.shared)} of /dev/shm for the cache"
    text = (
        f"blocks {blocks.stop - on_last}:{blocks.stop} need {bytes_text(last.needs.total(on_last))} on {where}: "
        f"{missing} too much"
    )
    fewer = blocks[:hosted]
    found = [f"{hosted} blocks (--blocks {fewer.start}:{fewer.stop})"] if hosted else []
    if setup.quant == NONE and setup.shards == 1 and "block_bytes" not in given:
        for quant in (INT8, NF4):
            count = _hosted(_assign(replace(setup, quant=quant), memories, shared, given))
            found += [f"{count} blocks with --quant {quant}"] if count > hosted else []
    if tokens := _tokens_that_fit(setup, memories, shared, given, last.plan.number("attn_cache_tokens")):
        found.append(f"{len(blocks)} blocks with --attn-cache-tokens {tokens}")
    return f"{text}; what would fit: {'; '.join(found) or 'nothing smaller on this machine'}"


def _tokens_that_fit(
    setup: Setup, memories: Sequence[DeviceMemory], shared: int, given: Given, most: int
) -> int:
    """The largest cache below `most` tokens with which all blocks fit, in whole pages; 0 if there is none."""

    def fits(pages: int) -> bool:
        smaller = {**given, "attn_cache_tokens": pages * setup.page_size}
        return _hosted(_assign(setup, memories, shared, smaller)) == len(setup.blocks)

    low, high = 0, most // setup.page_size
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low * setup.page_size
