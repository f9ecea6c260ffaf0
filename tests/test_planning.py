"""A plan never takes more than there is, and leaves no room for one more block; what does not fit says what would."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from checkpoints import GROUPED
from conftest import Served
from corolla.cgroups import memory_limits, usable_cores
from corolla.cli.main import cli
from corolla.dtypes import dtype_named
from corolla.errors import InvalidValueError
from corolla.kernels.compact_packing import is_compact
from corolla.planning.fitting import Needs, Room, blocks_that_fit, shortage
from corolla.planning.machine import DeviceMemory, device_memories
from corolla.planning.plan import MachinePlan, PlanError, Setup, make_plan
from corolla.planning.quantity import Origin, bytes_text, parse_bytes
from corolla.quantization import INT8, NF4, NONE

MIB, GIB = 2**20, 2**30
sizes = st.integers(0, 2**33)


@given(
    block=sizes, cache=sizes, adapters=sizes, ends=sizes, base=sizes, step=st.integers(0, 2**28),
    usable=st.integers(0, 2**40), shared=st.none() | st.integers(0, 2**38), most=st.integers(1, 200),
)  # fmt: skip
def test_what_fits_fits_and_one_more_block_would_not(
    block: int, cache: int, adapters: int, ends: int, base: int, step: int, usable: int, shared: int | None, most: int
) -> None:
    needs = Needs(block, cache, adapters, ends, lambda blocks: base + step * blocks)
    room = Room(usable, shared)
    count = blocks_that_fit(needs, room, most)
    assert 0 <= count <= most
    if count:
        assert needs.total(count) <= usable
        assert shared is None or count * cache <= shared
        assert shortage(needs, room, count) == 0
    if count < most:
        missing = shortage(needs, room, count + 1)
        assert missing > 0
        assert shortage(needs, Room(usable + missing, shared and shared + missing), count + 1) == 0 or shared == 0


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    """Of small models with attention of all kinds, in every form."""
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    blocks = draw(st.integers(1, 40))
    config = AutoConfig.for_model(
        "llama", hidden_size=draw(st.sampled_from([64, 192])), intermediate_size=draw(st.sampled_from([96, 150])),
        num_attention_heads=4, num_key_value_heads=kv_heads, num_hidden_layers=blocks, vocab_size=301,
    )  # fmt: skip
    device = draw(st.sampled_from(["cpu", "cuda"]))
    return Setup(
        config=config,
        dtype=dtype_named(draw(st.sampled_from(["float32", "bfloat16"]))),
        blocks=range(blocks)[draw(st.integers(0, blocks - 1)) :],
        quant=draw(st.sampled_from([NONE, INT8, NF4])),
        device=device,
        packed=device == "cpu" and draw(st.booleans()),
        range_size=draw(st.integers(0, 6)),
        ends=draw(st.booleans()),
        adapter_bytes=draw(st.sampled_from([0, 10_000])),
    )


@given(setup=setups(), gigabytes=st.lists(st.floats(0.1, 9), min_size=1, max_size=3), tokens=st.integers(1, 200_000))
@settings(deadline=None, max_examples=40)
def test_a_plan_never_exceeds_the_memory_of_any_device(setup: Setup, gigabytes: list[float], tokens: int) -> None:
    count = 1 if setup.device == "cpu" else len(gigabytes)
    memories = [DeviceMemory(f"{setup.device}:{n}", 0, round(g * GIB), "") for n, g in enumerate(gigabytes[:count])]
    try:
        plan = make_plan(setup, memories, GIB, {"attn_cache_tokens": tokens})
    except PlanError:
        with pytest.raises(PlanError, match="too much; what would fit:"):
            make_plan(setup, memories, GIB, {"attn_cache_tokens": tokens, "num_blocks": 1})
        return
    free = {memory.device: memory.free for memory in memories}
    hosted = [block for device in plan.devices for block in device.blocks]
    assert hosted == list(setup.blocks[: len(hosted)]), "the blocks follow each other from device to device"
    for device in plan.devices:
        number = device.number
        each = number("block_bytes") + number("cache_bytes") + number("adapter_bytes")
        parts = len(device.blocks) * each + number("ends_bytes") + number("reserve_bytes")
        assert device.needed == parts <= device.usable <= 0.9 * free[device.device]
        assert number("num_blocks") == len(device.blocks)
        if device.device == "cpu":
            assert len(device.blocks) * number("cache_bytes") <= number("shared_memory")
    if len(hosted) < len(setup.blocks) and len(plan.devices) == len(memories):
        assert_full(plan, setup, GIB)


def assert_full(plan: MachinePlan, setup: Setup, shared: int) -> None:
    """One more block would be too much for the last device."""
    device = plan.devices[-1]
    each = sum(device.number(name) for name in ("block_bytes", "cache_bytes", "adapter_bytes"))
    process = device.number("process_bytes") + device.number("work_bytes")
    count = len(device.blocks)
    more = each + process * (setup.ranges(count + 1) - setup.ranges(count))
    assert device.needed + more > device.usable or (
        setup.device == "cpu" and (count + 1) * device.number("cache_bytes") > shared
    )


def plan(
    given: dict[str, int] | None = None, memory: int = 64 * GIB, shared: int = 64 * GIB, **options: Any
) -> MachinePlan:
    config = AutoConfig.for_model(
        "llama", hidden_size=1024, intermediate_size=2816, num_attention_heads=16, num_key_value_heads=8,
        num_hidden_layers=32, vocab_size=8192, max_position_embeddings=4096,
    )  # fmt: skip
    setup = Setup(config, dtype_named("bfloat16"), range(32), **options)
    count = 2 if options.get("device") == "cuda" else 1
    memories = [
        DeviceMemory(f"{setup.device}:{n}" if count > 1 else setup.device, memory, memory, "free") for n in range(count)
    ]
    return make_plan(setup, memories, shared, given)


def test_every_number_has_a_formula_and_can_be_given() -> None:
    (device,) = plan().devices
    for quantity in device.numbers:
        assert quantity.formula, quantity.name
        if quantity.name == "num_blocks":
            continue
        (other,) = plan({quantity.name: quantity.value + 1}).devices
        found = next(q for q in other.numbers if q.name == quantity.name)
        assert (found.value, found.origin) == (quantity.value + 1, Origin.GIVEN)
        assert found.formula == f"--{quantity.name.replace('_', '-')}"


def test_a_plan_that_does_not_fit_says_by_how_much_and_what_would() -> None:
    block, cache, reserve = 22 * MIB, 32 * MIB, 500 * MIB
    given = {"usable_memory": reserve + 20 * (block + cache), "ends_bytes": 0, "reserve_bytes": reserve}
    (device,) = plan(given | {"block_bytes": block}).devices
    assert len(device.blocks) == 20
    with pytest.raises(PlanError) as refused:
        plan(given | {"block_bytes": block, "num_blocks": 32})
    message = str(refused.value)
    assert f"{bytes_text(12 * (block + cache))} too much" in message
    tokens = (20 * (block + cache) - 32 * block) // (32 * 2048) // 16 * 16
    assert f"20 blocks (--blocks 0:20); 32 blocks with --attn-cache-tokens {tokens}" in message
    (fits,) = plan(given | {"block_bytes": block, "num_blocks": 32, "attn_cache_tokens": tokens}).devices
    assert len(fits.blocks) == 32
    with pytest.raises(PlanError):
        plan(given | {"block_bytes": block, "num_blocks": 32, "attn_cache_tokens": tokens + 16})


def test_quantization_is_offered_with_what_it_makes_room_for() -> None:
    usable = 1050 if is_compact(torch.bfloat16) else 1200
    given = {"usable_memory": usable * MIB, "ends_bytes": 0, "reserve_bytes": 500 * MIB, "attn_cache_tokens": 1024}
    with pytest.raises(PlanError, match=r"28 blocks \(--blocks 0:28\); 32 blocks with --quant int8; 32 .* nf4"):
        plan(given | {"num_blocks": 32})
    assert len(plan(given, quant=INT8).blocks) == 32


def test_a_small_dev_shm_bounds_the_cache() -> None:
    """Docker gives 64 MiB unless told otherwise."""
    (device,) = plan(shared=64 * MIB).devices
    assert len(device.blocks) == 2
    with pytest.raises(PlanError, match=r"64.0 MiB of /dev/shm for the cache.*--attn-cache-tokens 1024"):
        plan({"num_blocks": 32}, shared=64 * MIB)


def test_devices_without_shards_take_the_blocks_in_turn_and_the_first_one_the_ends() -> None:
    first, second = plan({"memory": 5 * GIB}, device="cuda", packed=False).devices
    assert (first.blocks.start, first.blocks.stop, second.blocks.stop) == (0, second.blocks.start, 32)
    assert (first.ends, second.ends) == (True, False)
    assert second.number("ends_bytes") == 0 < first.number("ends_bytes")


def test_shards_are_planned_on_each_device_of_a_group() -> None:
    whole = plan(device="cuda", packed=False).devices[0]
    (group,) = plan(device="cuda", packed=False, shards=2).devices
    assert (group.device, len(group.blocks)) == ("cuda:0..cuda:1", 32)
    assert group.number("token_cache_bytes") * 2 == whole.number("token_cache_bytes")
    assert whole.number("block_bytes") / 2 < group.number("block_bytes") < whole.number("block_bytes") * 0.51


def test_shards_on_cpus_share_the_same_memory() -> None:
    (whole,), (shards,) = plan(packed=False).devices, plan(packed=False, shards=2).devices
    assert shards.number("token_cache_bytes") == whole.number("token_cache_bytes")
    assert shards.number("block_bytes") >= whole.number("block_bytes")
    assert shards.number("working_processes") == 2 * whole.number("working_processes")


@pytest.mark.parametrize(
    ("text", "value"),
    [("1048576", MIB), ("12GiB", 12 * GIB), ("1.5 GiB", 3 * GIB // 2), ("500MB", 5 * 10**8), ("2k", 2000)],
)
def test_bytes_are_read_as_people_write_them(text: str, value: int) -> None:
    assert parse_bytes("memory", text) == value


@pytest.mark.parametrize("text", ["", "much", "-1", "1e400", "5 apples", "nan"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(InvalidValueError, match=r"memory: .*12GiB"):
        parse_bytes("memory", text)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["plan", *map(str, arguments)])


def test_the_command_shows_what_its_json_holds(grouped: Served) -> None:
    arguments = (grouped.checkpoint, "--memory", "8GiB", "--attn-cache-tokens", 1000, "--quant", "nf4")
    text, content = run(*arguments), json.loads(run(*arguments, "--json").output)
    (device,) = content["devices"]
    assert (content["blocks"], content["quant"]) == ([0, 4], NF4)
    for quantity in device["numbers"]:
        assert quantity["formula"] in text.output, quantity["name"]
    assert {choice["name"] for choice in content["choices"]} == {"dtype", "quant", "decoder", "threads", "instances"}
    assert all(choice["reason"] in text.output for choice in content["choices"])
    numbers = {quantity["name"]: quantity["value"] for quantity in device["numbers"]}
    assert numbers["cache_bytes"] == 1008 * 2 * 2 * 16 * 2, "63 pages of 16 tokens, 2 KV heads of 16, bfloat16"


def test_the_command_refuses_what_does_not_fit(grouped: Served) -> None:
    refused = run(grouped.checkpoint, "--memory", "500MiB")
    assert isinstance(refused.exception, PlanError)
    assert "nothing smaller on this machine" in str(refused.exception)
    assert isinstance(run(grouped.checkpoint, "--blocks", "2:9").exception, InvalidValueError)
    assert isinstance(run(grouped.checkpoint, "--device", "cuda", "--devices", 9).exception, InvalidValueError)


def init(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["init", *map(str, arguments)])


def test_init_says_what_a_server_takes_and_refuses_what_does_not_fit(
    grouped: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "cpu: blocks 0:4, " in init(grouped.checkpoint, "--out", tmp_path / "fits").output
    little = DeviceMemory("cpu", GIB, GIB, "little")
    monkeypatch.setattr("corolla.planning.repository.device_memories", lambda device: (little,))
    refused = init(grouped.checkpoint, "--out", tmp_path / "out")
    assert isinstance(refused.exception, PlanError)
    assert "too much" in str(refused.exception)
    assert "--overcommit" in str(refused.exception)
    assert not (tmp_path / "out").exists()
    written = init(grouped.checkpoint, "--out", tmp_path / "out", "--overcommit")
    assert (written.exit_code, (tmp_path / "out" / "chain" / "config.pbtxt").exists()) == (0, True)
    assert "too much" in written.stderr


def test_init_for_a_device_of_another_machine_checks_nothing(grouped: Served, tmp_path: Path) -> None:
    result = init(grouped.checkpoint, "--out", tmp_path / "out", "--device", "cuda")
    assert "cuda: not on this machine, so its memory is not checked" in result.output


def group(root: Path, path: str, **files: str) -> None:
    """A control group's folder."""
    folder = root / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_the_limits_of_containers_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own"
    own.write_text("0::/pod/container\n")
    stat = "anon 5\ninactive_file 300\n"
    group(
        tmp_path / "v2",
        "pod/container",
        memory__max="max\n",
        memory__current="1000\n",
        memory__stat=stat,
        cpu__max="max 100000",
    )
    group(
        tmp_path / "v2",
        "pod",
        memory__max="5000\n",
        memory__current="1300\n",
        memory__stat=stat,
        cpu__max="50000 100000",
    )
    assert memory_limits(tmp_path / "v2", own) == [(5000, 1000)]
    assert usable_cores(tmp_path / "v2", own) == 1

    own.write_text("4:memory:/box\n3:cpu,cpuacct:/box\n1:name=systemd:/\n")
    stat = "total_inactive_file 100\n"
    limit = {"memory__usage_in_bytes": "900", "memory__stat": stat}
    group(tmp_path / "v1", "memory/box", memory__limit_in_bytes="4000", **limit)
    group(tmp_path / "v1", "memory", memory__limit_in_bytes=str(2**63 - 4096), **limit)
    group(tmp_path / "v1", "cpu/box", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert memory_limits(tmp_path / "v1", own) == [(4000, 800)]
    assert memory_limits(tmp_path / "nothing", own) == []

    monkeypatch.setattr("corolla.planning.machine.memory_limits", lambda: [(4 * MIB, MIB)])
    (memory,) = device_memories("cpu")
    assert (memory.total, memory.free) == (4 * MIB, 3 * MIB)
    assert "container" in memory.limit


def test_devices_that_are_not_there_are_refused() -> None:
    with pytest.raises(InvalidValueError, match=r"devices: 2 is not allowed; allowed: at most 1"):
        device_memories("cpu", 2)


def test_half_of_the_blocks_are_a_range_unless_told() -> None:
    setup = Setup(GROUPED.model_config(), dtype_named("float32"), range(4))
    assert [setup.ranges(blocks) for blocks in (0, 1, 2, 3, 9)] == [0, 1, 2, 2, 2]
