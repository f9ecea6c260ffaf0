"""Blocks are run to see what they take, once, in a process that served ones are like; the network by real transfers."""

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import PretrainedConfig

from checkpoints import GROUPED, SERVED
from conftest import Remote, Served
from corolla.checkpoint.resolution import Hardware, explained_dtype, explained_quant
from corolla.checkpoint.synthetic import make_checkpoint
from corolla.cli.serve import _throughput as announced
from corolla.dtypes import dtype_named
from corolla.errors import CorollaError, InvalidValueError
from corolla.peers.membership import DEFAULT_THROUGHPUT
from corolla.peers.record import Throughput
from corolla.planning import measurement
from corolla.planning.dry_run import DryRun, Outcome, dry_run
from corolla.planning.machine import DeviceMemory
from corolla.planning.measurement import Conditions, known, measured, process_memory
from corolla.planning.network import tokens_of_mbps, tokens_to_peer
from corolla.planning.plan import Setup, make_plan
from corolla.planning.throughput import Network, ServerSpeed, known_throughput, measured_throughput, speed_of
from corolla.quantization import INT8, NF4, NONE
from corolla.repository.plan import RepositoryPlan
from corolla.repository.writer import write_repository
from local_server import make_plan as plan_of

OUTCOME = Outcome(
    blocks=2, private=10, work=20, libraries=30, weights=40, cache=50, pss=60,
    step=0.5, forward=4.0, forward_positions=1000, ends=0.25,
)  # fmt: skip


@pytest.fixture
def repository(grouped: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository, and a disk cache in which nothing was measured."""
    monkeypatch.setenv("COROLLA_CACHE", str(tmp_path / "cache"))
    write_repository(plan_of(grouped.checkpoint, GROUPED.ranges), tmp_path / "repository")
    return tmp_path / "repository"


def test_a_served_range_takes_the_memory_that_was_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a tenth, of weights, cache and process together; weights and cache to the page."""
    monkeypatch.setenv("COROLLA_CACHE", str(tmp_path / "cache"))
    config = replace(GROUPED, config=GROUPED.config | {"hidden_size": 768, "intermediate_size": 2048}).model_config()
    make_checkpoint(config, dtype_named("bfloat16"), 0, tmp_path / "checkpoint")
    plan = plan_of(tmp_path / "checkpoint", [range(0, 4)], dtype="bfloat16", ends=False)
    write_repository(plan, tmp_path / "repository")
    process = process_memory(dry_run(tmp_path / "repository", DryRun(0, 4, steps=1, forwards=1, ends=False)))
    given = {"attn_cache_tokens": 32768}
    setup = Setup(config, plan.dtype, range(4), packed=False, ends=False, process=process)
    (device,) = make_plan(setup, [DeviceMemory("cpu", 2**40, 2**40, "plenty")], 2**40, given).devices
    each = device.number("block_bytes") + device.number("cache_bytes")
    expected = 4 * each + sum(device.number(name) for name in ("process_bytes", "work_bytes", "library_bytes"))

    run = DryRun(0, 4, cache_tokens=32768, steps=1, forwards=1, touch=True, ends=False)
    found = dry_run(tmp_path / "repository", run)
    alone = found.private + found.work + found.libraries + found.weights + found.cache
    assert found.pss <= alone, "libraries may be those of others as well"
    assert abs(expected / alone - 1) < 0.1
    assert found.cache == 4 * device.number("cache_bytes")
    assert abs(found.weights - 4 * device.number("block_bytes")) < 8 * 4096, "the files have headers"
    assert found.step > 0 < found.forward


def test_what_was_measured_is_remembered(repository: Path, monkeypatch: pytest.MonkeyPatch, grouped: Served) -> None:
    runs: list[DryRun] = []

    def run(_: Path, what: DryRun) -> Outcome:
        runs.append(what)
        return replace(OUTCOME, step=1 / len(runs))

    monkeypatch.setattr(measurement, "dry_run", run)
    monkeypatch.setattr(measurement, "prepare", lambda *_: None)
    conditions = Conditions.of_repository(repository)
    assert conditions.key() == Conditions.of_plan(plan_of(grouped.checkpoint, GROUPED.ranges)).key()
    assert known(conditions) is None
    assert known_throughput(repository) is None
    first = measured(repository)
    assert measured(repository) == known(conditions) == first == replace(OUTCOME, step=1.0)
    assert measured_throughput(repository, Network(mbps=8)) == known_throughput(repository, Network(mbps=8))
    assert runs == [DryRun(0, 4)]
    assert measured(repository, again=True).step == 0.5
    assert known(conditions) != first
    for other in (
        replace(conditions, quant=NF4), replace(conditions, dtype="bfloat16"), replace(conditions, ends=False),
        replace(conditions, decoder_batch_sizes=(1,)), replace(conditions, config=SERVED.model_config()),
    ):  # fmt: skip
        assert known(other) is None


def test_a_server_announces_what_was_measured(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "dry_run", lambda *_: OUTCOME)
    monkeypatch.setattr(measurement, "prepare", lambda *_: None)
    assert announced(repository, "sqlite:///peers.db", measure=False) == DEFAULT_THROUGHPUT
    assert announced(repository, "", measure=True) == DEFAULT_THROUGHPUT, "to nobody, so nothing is measured"
    first = announced(repository, "sqlite:///peers.db", measure=True)
    assert first == announced(repository, "sqlite:///peers.db", measure=False) == known_throughput(repository)
    assert first.inference == OUTCOME.blocks / OUTCOME.step
    assert announced(repository.parent, "sqlite:///peers.db", measure=True) == DEFAULT_THROUGHPUT, "it has no blocks"


def test_a_dry_run_that_fails_leaves_nothing(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise CorollaError("no")

    monkeypatch.setattr(measurement, "prepare", fail)
    with pytest.raises(CorollaError):
        measured(repository)
    assert known(Conditions.of_repository(repository)) is None


def test_throughput_is_that_of_one_block_and_effective_that_of_half_of_them() -> None:
    speed = speed_of(OUTCOME, 300.0, 3)
    assert speed.throughput == Throughput(inference=4.0, forward=500.0, network=300.0)
    assert (speed.compute, speed.effective) == (250.0, 250.0)
    assert replace(speed, throughput=replace(speed.throughput, network=20.0)).effective == 20.0
    assert speed.session == pytest.approx(1 / (3 / 4 + 0.25 + speed.stream))
    assert ServerSpeed(speed.throughput, 1, 0.0).compute == 500.0


def test_megabits_become_tokens() -> None:
    assert tokens_of_mbps(1000, hidden_size=4096, itemsize=2) == pytest.approx(15258.8, abs=0.1)
    assert Network(mbps=8).tokens(hidden_size=1000, itemsize=4) == 250
    with pytest.raises(InvalidValueError, match="network_mbps"):
        tokens_of_mbps(0, 4096, 2)


def test_the_network_is_measured_by_hidden_states_to_a_server(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COROLLA_CACHE", str(tmp_path))
    network = Network(peer=remote.server.grpc)
    first = network.tokens(128, 4)
    assert 100 < first == network.tokens(128, 4), "remembered"
    with pytest.raises(CorollaError, match=f"{remote.server.grpc}: .*hidden_states.* of this model"):
        tokens_to_peer(remote.server.grpc, 96)
    with pytest.raises(CorollaError, match=r"127.0.0.1:9: .*gRPC endpoint of a running server"):
        tokens_to_peer("127.0.0.1:9", 128)


def config_in(stored: str) -> PretrainedConfig:
    config = GROUPED.model_config()
    config.dtype = dtype_named(stored).torch
    return config


@pytest.mark.parametrize(
    ("stored", "hardware", "dtype", "reason"),
    [
        ("float32", Hardware("cpu"), "bfloat16", "stored in float32; a step reads half as much; products are float32"),
        ("bfloat16", Hardware("cpu", bfloat16_products=True), "bfloat16", "as it is stored; this processor multiplies"),
        ("float16", Hardware("cpu"), "bfloat16", "stored in float16, for which CPUs have no arithmetic"),
        ("float16", Hardware("cuda", (9, 0)), "float16", "as it is stored"),
        ("bfloat16", Hardware("cuda", (7, 5)), "float16", "older than compute capability 8.0"),
        ("bfloat16", Hardware("cuda"), "bfloat16", "as it is stored"),
    ],
)
def test_a_dtype_is_chosen_by_what_the_hardware_can_do(
    stored: str, hardware: Hardware, dtype: str, reason: str
) -> None:
    chosen = explained_dtype("auto", config_in(stored), hardware)
    assert chosen.value.name == dtype
    assert reason in chosen.reason


def test_quantization_is_chosen_by_what_the_hardware_can_do() -> None:
    config = GROUPED.model_config()
    old, older = Hardware("cuda", (7, 0)), Hardware("cuda", (5, 2))
    for hardware, quant, reason in (
        (Hardware("cpu"), NONE, "exact"), (Hardware("cuda"), NF4, "quarter"), (old, NF4, "quarter"),
        (older, NONE, "too old for nf4"),
    ):  # fmt: skip
        chosen = explained_quant(None, config, hardware)
        assert (chosen.value, reason in chosen.reason) == (quant, True)
    assert explained_quant(None, config, Hardware("cuda"), 2).value == NONE
    assert explained_quant(INT8, config, Hardware("cuda", (7, 5))).value == INT8
    for wanted, hardware in ((INT8, old), (NF4, older)):
        with pytest.raises(InvalidValueError, match=r"quant: .*none on a GPU below compute capability"):
            explained_quant(wanted, config, hardware)
    with pytest.raises(InvalidValueError, match=r"dtype: .*older than compute capability 8.0"):
        explained_dtype("bfloat16", config, old)


def test_threads_never_oversubscribe_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    from corolla.planning.choices import explained_choices
    from corolla.threads import thread_count

    for module in ("corolla.threads", "corolla.planning.choices"):
        monkeypatch.setattr(f"{module}.usable_cores", lambda: 6)
    assert [thread_count(wanted) for wanted in (0, 2, 6, 7)] == [6, 2, 6, 6]
    assert [thread_count(0, shards) for shards in (2, 4, 9)] == [3, 1, 1]
    config = config_in("float32")
    dtype, quant = explained_dtype("auto", config, Hardware("cpu")), explained_quant(None, config, Hardware("cpu"))
    for wanted, words in ((0, "6 cores: one process computes at a time"), (9, "9 would oversubscribe"), (2, "of 6")):
        choices = {c.name: c for c in explained_choices(dtype, quant, "compiled", "cpu", wanted, 1)}
        assert words in choices["threads"].reason


def test_a_plan_knows_what_was_measured(repository: Path, grouped: Served) -> None:
    plan: RepositoryPlan = plan_of(grouped.checkpoint, GROUPED.ranges)
    setup = Setup(plan.config, plan.dtype, range(4), process=process_memory(OUTCOME))
    (device,) = make_plan(setup, [DeviceMemory("cpu", 2**40, 2**40, "plenty")], 2**40).devices
    assert (device.number("process_bytes"), device.number("work_bytes")) == (10, 20)
    assert device.number("reserve_bytes") == device.number("server_bytes") + 30 + 7 * 10 + 4 * 20
