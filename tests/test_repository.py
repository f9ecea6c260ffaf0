"""`corolla init` writes a repository that a server can load, says what is wrong, and never disturbs what is there."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import TYPE_BF16, TYPE_FP32, ModelConfig

from checkpoints import GROUPED, random_prompt
from conftest import Served
from corolla.checkpoint.demo import DemoRecipe
from corolla.checkpoint.synthetic import make_checkpoint
from corolla.cli.main import cli
from corolla.dtypes import dtype_named
from corolla.errors import CheckpointError, CorollaError, InvalidValueError
from corolla.kv.layout import KVLayout
from corolla.repository.plan import RepositoryPlan, split_evenly
from corolla.repository.writer import repository_files
from corolla.serving.parameters import ServedModel, parse_blocks
from local_server import LocalServer, make_plan, served_model

PROJECT = Path(__file__).parents[1]
RANGES = [range(0, 2), range(2, 4)]


def init(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["init", *map(str, arguments)], catch_exceptions=True)


def read_models(repository: Path) -> dict[str, ModelConfig]:
    return {file.parent.name: text_format.Parse(file.read_text(), ModelConfig())
            for file in repository.glob("*/config.pbtxt")}  # fmt: skip


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture(scope="module")
def plan() -> RepositoryPlan:
    return RepositoryPlan(Path("/checkpoint"), GROUPED.model_config(), dtype_named("float32"), RANGES)


def test_repository_has_every_model_with_a_config_and_a_version(plan: RepositoryPlan) -> None:
    names = {"embed", "blocks_00_02", "blocks_02_04", "head", "ranges", "pipeline", "chain", "sessions", "generate"}
    expected = {Path(name) / part for name in names for part in ("config.pbtxt", "1/.gitkeep")}
    assert set(repository_files(plan)) == expected


def test_every_config_names_its_folder_and_can_be_read_back(plan: RepositoryPlan) -> None:
    for path, text in repository_files(plan).items():
        if path.name == "config.pbtxt":
            config = text_format.Parse(text, ModelConfig())
            assert config.name == path.parent.name
            assert bool(config.backend) != bool(config.platform)


def test_ensembles_lead_from_their_inputs_to_their_outputs_through_every_range(plan: RepositoryPlan) -> None:
    models = {str(p.parent): text_format.Parse(t, ModelConfig()) for p, t in repository_files(plan).items() if t}
    for name, ends in (("ranges", []), ("pipeline", ["embed", "head"])):
        config = models[name]
        known = {tensor.name for tensor in config.input}
        for step in config.ensemble_scheduling.step:
            assert set(step.input_map.values()) <= known, "read before it is written"
            assert set(step.input_map) <= {tensor.name for tensor in models[step.model_name].input}
            assert set(step.output_map) == {tensor.name for tensor in models[step.model_name].output}
            known |= set(step.output_map.values())
        assert {tensor.name for tensor in config.output} <= known
        steps = [step.model_name for step in config.ensemble_scheduling.step]
        assert steps == [*ends[:1], "blocks_00_02", "blocks_02_04", *ends[1:]]
        sessions = [set(step.input_map) >= {"session_id", "start_position"} for step in config.ensemble_scheduling.step]
        assert sessions == [name == "ranges"] * len(steps)


@pytest.mark.parametrize(("dtype", "data_type"), [("float32", TYPE_FP32), ("bfloat16", TYPE_BF16)])
def test_hidden_states_have_the_dtype_and_logits_are_float32(plan: RepositoryPlan, dtype: str, data_type: int) -> None:
    files = repository_files(replace(plan, dtype=dtype_named(dtype)))
    for name in ("embed", "chain", "ranges", "head", "pipeline", "blocks_00_02"):
        config = text_format.Parse(files[Path(name) / "config.pbtxt"], ModelConfig())
        for tensor in [*config.input, *config.output]:
            if "hidden_states" in tensor.name:
                assert (tensor.data_type, list(tensor.dims)) == (data_type, [-1, 128])
            if tensor.name == "logits":
                assert (tensor.data_type, list(tensor.dims)) == (TYPE_FP32, [-1, 301])


def test_no_model_uses_what_stalls_the_batcher(plan: RepositoryPlan) -> None:
    """Queue limits, timeouts and priorities turn prefetching off, a preferred batch of 1 turns batching off."""
    for text in repository_files(plan).values():
        for setting in ("max_queue_size", "timeout_microseconds", "allow_timeout_override", "priority_levels"):
            assert setting not in text.replace("max_queue_delay_microseconds", "")
        config = text_format.Parse(text, ModelConfig()) if text else ModelConfig()
        assert 1 not in config.dynamic_batching.preferred_batch_size


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranges": [range(0, 2), range(3, 4)]}, "ranges: '0:2,3:4' is not allowed; allowed: ranges that follow each"),
        ({"ranges": [range(0, 3), range(2, 4)]}, "ranges: '0:3,2:4' "),
        ({"ranges": [range(0, 2)]}, "ranges: '0:2' .* from 0 to 4"),
        ({"ranges": [range(0, 5)]}, "ranges: '0:5' "),
        ({"ranges": [range(2, 4), range(0, 2)]}, "ranges: '2:4,0:2' "),
        ({"ranges": []}, "ranges: '' "),
        ({"blocks": range(2, 5)}, "blocks: '2:5' is not allowed; allowed: a range inside 0:4, or none"),
        ({"blocks": range(2, 4)}, "ranges: '0:2,2:4' is not allowed; allowed: ranges that follow each other from 2 to"),
        ({"blocks": range(0), "ranges": [], "ends": False}, "blocks: 'none' is not allowed; allowed: a range inside"),
        (
            {"blocks": range(2, 4), "ranges": [range(2, 4)]},
            "registry: '' is not allowed; allowed: the URL of a registry, as `generate` needs other servers",
        ),
        ({"max_batch_size": 0}, "max_batch_size: 0 is not allowed; allowed: 1 to 1024"),
        ({"threads": -1}, "threads: -1 is not allowed; allowed: 0 to 1024"),
        ({"attn_cache_tokens": 15}, "attn_cache_tokens: 15 is not allowed; allowed: 16 to"),
        ({"attn_cache_tokens": -16}, "attn_cache_tokens: -16 "),
        ({"tensor_parallel": 3}, "tensor_parallel: 3 is not allowed; allowed: 1, 2, as the 8 attention heads"),
        (
            {"tensor_parallel": 2, "decoder": "eager", "adapters": {"poet": Path("/adapters/poet")}},
            "adapter: 'poet' is not allowed; allowed: none where tensor_parallel, 2 here, is above 1",
        ),
        ({"tensor_parallel": 2}, "decoder: 'compiled' is not allowed; allowed: eager where tensor_parallel, 2 here"),
        (
            {"tensor_parallel": 2, "decoder": "eager", "quant": "nf4"},
            "quant: 'nf4' is not allowed; allowed: none ",
        ),
    ],
    ids=str,
)
def test_plan_that_cannot_be_served_is_refused(plan: RepositoryPlan, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=f"^{message}"):
        replace(plan, **changes)


@pytest.mark.parametrize(
    ("blocks", "size", "expected"),
    [(4, 2, [(0, 2), (2, 4)]), (5, 2, [(0, 2), (2, 4), (4, 5)]), (5, 5, [(0, 5)]), (1, 1, [(0, 1)])],
)
def test_even_split_covers_every_block_once(blocks: int, size: int, expected: list[tuple[int, int]]) -> None:
    assert [(r.start, r.stop) for r in split_evenly(range(blocks), size)] == expected


@pytest.mark.parametrize("size", [0, 6, -1])
def test_range_size_beyond_the_model_is_refused(size: int) -> None:
    with pytest.raises(InvalidValueError, match=f"range_size: {size} is not allowed; allowed: 1 to 5"):
        split_evenly(range(5), size)


def test_init_writes_half_of_the_model_per_range_unless_told(grouped: Served, tmp_path: Path) -> None:
    result = init(grouped.checkpoint, "--out", tmp_path / "out")
    assert (result.exit_code, result.exception) == (0, None)
    assert {"blocks_00_02", "blocks_02_04"} <= set(read_models(tmp_path / "out"))
    assert "2 ranges in bfloat16; start it with: corolla serve" in result.output
    init(grouped.checkpoint, "--out", tmp_path / "threes", "--range-size", 3, "--dtype", "float32")
    assert {"blocks_00_03", "blocks_03_04"} <= set(read_models(tmp_path / "threes"))
    init(grouped.checkpoint, "--out", tmp_path / "own", "--ranges", "0:1,1:4")
    assert {"blocks_00_01", "blocks_01_04"} <= set(read_models(tmp_path / "own"))


@pytest.mark.parametrize(
    ("arguments", "blocks_models", "others"),
    [
        (["--blocks", "1:4"], {"blocks_01_03", "blocks_03_04"}, {"ranges", "chain", "sessions"}),
        (["--blocks", "3:4", "--span"], {"blocks_03_04"}, {"ranges", "chain", "span", "sessions"}),
        (
            ["--blocks", "0:2", "--ends", "--registry", "sqlite:///peers.db"],
            {"blocks_00_01", "blocks_01_02"},
            {"ranges", "chain", "span", "sessions", "embed", "head", "generate"},
        ),
        (
            ["--blocks", "none", "--ends", "--registry", "sqlite:///peers.db"],
            set(),
            {"sessions", "embed", "head", "generate"},
        ),
    ],
    ids=["part", "part for others", "part with ends", "ends alone"],
)
def test_init_for_a_part_of_the_model_leaves_out_what_it_cannot_serve(
    grouped: Served, tmp_path: Path, arguments: list[str], blocks_models: set[str], others: set[str]
) -> None:
    assert init(grouped.checkpoint, "--out", tmp_path, *arguments, "--model-name", "tiny").exception is None
    assert set(read_models(tmp_path)) == blocks_models | others
    start, stop = {"1:4": (1, 4), "3:4": (3, 4), "0:2": (0, 2), "none": (0, 0)}[arguments[1]]
    for name in others - {"ranges", "sessions", "embed", "head"}:
        model = served_model(tmp_path, name)
        assert list(model.blocks) == list(range(start, stop))
        assert (model.registry, model.model_id) == ("sqlite:///peers.db" if "--registry" in arguments else "", "tiny")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--ranges", "0:2"], InvalidValueError, "ranges: '0:2' is not allowed; allowed: .* from 0 to 4"),
        (["--ranges", "0-2,2-4"], InvalidValueError, "blocks: '0-2' is not allowed; allowed: start:end .* such as 0:4"),
        (["--ranges", ""], InvalidValueError, "blocks: '' "),
        (["--ranges", "0:4", "--range-size", "2"], InvalidValueError, "--range-size: 2 .* not both"),
        (["--range-size", "9"], InvalidValueError, "range_size: 9 is not allowed; allowed: 1 to 4"),
        (["--blocks", "2:5"], InvalidValueError, "blocks: '2:5' is not allowed; allowed: a range inside 0:4"),
        (["--blocks", "0:2", "--ranges", "0:4"], InvalidValueError, "ranges: '0:4' .* follow each other from 0 to 2"),
        (["--blocks", "none"], InvalidValueError, "blocks: 'none' .* unless the server has the ends"),
        (["--blocks", "0:2", "--ends"], InvalidValueError, "registry: '' .* that this one, with 0:2, does not host"),
        (["--max-batch-size", "0"], InvalidValueError, "max_batch_size: 0 "),
        (["--attn-cache-tokens", "3"], InvalidValueError, "attn_cache_tokens: 3 "),
        (["--threads", "-2"], InvalidValueError, "threads: -2 "),
    ],
    ids=str,
)
def test_init_refuses_and_writes_nothing(
    grouped: Served, tmp_path: Path, arguments: list[str], error: type[CorollaError], message: str
) -> None:
    result = init(grouped.checkpoint, "--out", tmp_path / "out", *arguments)
    assert isinstance(result.exception, error)
    with pytest.raises(error, match=f"^{message}"):
        raise result.exception
    assert not (tmp_path / "out").exists()


def test_init_without_a_checkpoint_says_what_it_wants(tmp_path: Path) -> None:
    result = init(tmp_path / "nowhere", "--out", tmp_path / "out")
    assert isinstance(result.exception, CheckpointError)
    assert "give a folder in Hugging Face format" in str(result.exception)


def test_dtype_auto_keeps_half_precision_and_turns_float32_into_bfloat16(tmp_path: Path) -> None:
    for stored, device, served in (
        ("float16", "cuda", "float16"), ("float16", "cpu", "bfloat16"), ("bfloat16", "cpu", "bfloat16"),
        ("float32", "cpu", "bfloat16"),
    ):  # fmt: skip
        checkpoint, out = tmp_path / f"{stored}-{device}", tmp_path / f"{stored}-{device}-out"
        make_checkpoint(GROUPED.model_config(), dtype_named(stored), 0, checkpoint)
        init(checkpoint, "--out", out, "--device", device)
        assert read_models(out)["chain"].parameters["dtype"].string_value == served


@pytest.mark.parametrize("decoder", ["compiled", "eager"])
def test_float16_on_a_cpu_is_refused_with_the_reason(grouped: Served, tmp_path: Path, decoder: str) -> None:
    refused = init(grouped.checkpoint, "--out", tmp_path / "out", "--dtype", "float16", "--decoder", decoder).exception
    assert isinstance(refused, InvalidValueError)
    assert "dtype: 'float16' is not allowed; allowed: auto, float32, bfloat16 on CPUs, which have no" in str(refused)
    assert not (tmp_path / "out").exists()


def test_dtype_is_found_under_its_old_name_too(grouped: Served, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(grouped.checkpoint, tmp_path / "checkpoint"))
    config = checkpoint / "config.json"
    config.write_text(config.read_text().replace('"dtype": "float32"', '"torch_dtype": "float16"'))
    init(checkpoint, "--out", tmp_path / "out", "--device", "cuda")
    assert read_models(tmp_path / "out")["chain"].parameters["dtype"].string_value == "float16"


def test_dtype_that_cannot_be_served_must_be_replaced_by_name(grouped: Served, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(grouped.checkpoint, tmp_path / "checkpoint"))
    config = checkpoint / "config.json"
    config.write_text(config.read_text().replace('"dtype": "float32"', '"dtype": "float64"'))
    refused = init(checkpoint, "--out", tmp_path / "out").exception
    assert isinstance(refused, InvalidValueError)
    assert "config.json: dtype: 'float64' is not allowed; allowed: float32, float16, bfloat16" in str(refused)
    assert init(checkpoint, "--out", tmp_path / "out", "--dtype", "float32").exit_code == 0


def test_repository_moved_together_with_its_checkpoint_still_works(grouped: Served, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "elsewhere" / "second"
    shutil.copytree(grouped.checkpoint, first / "models" / "llama")
    plan = make_plan(first / "models" / "llama", GROUPED.ranges, attn_cache_tokens=64)
    init(plan.checkpoint, "--out", first / "repository", "--dtype", "float32", "--relative", "--attn-cache-tokens", 64)
    second.parent.mkdir()
    first.rename(second)
    model = served_model(second / "repository", "chain")
    assert model.checkpoint == second / "models" / "llama"
    assert model.blocks == range(0, 4)
    server = LocalServer(replace(plan, checkpoint=Path("../models/llama")), second)
    input_ids = torch.tensor([random_prompt(20, seed=20)])
    logits = server.head(server.run_ranges(server.embedding(input_ids)))
    torch.testing.assert_close(logits, grouped.reference.logits(input_ids), rtol=0, atol=1e-4)


def test_absolute_checkpoint_is_found_from_a_repository_anywhere(grouped: Served, tmp_path: Path) -> None:
    init(os.path.relpath(grouped.checkpoint), "--out", tmp_path / "here", "--dtype", "float32")
    (tmp_path / "here").rename(tmp_path / "there")
    assert served_model(tmp_path / "there", "generate").checkpoint == grouped.checkpoint


def test_config_without_a_parameter_is_refused_with_what_to_do(grouped: Served, tmp_path: Path) -> None:
    init(grouped.checkpoint, "--out", tmp_path)
    file = tmp_path / "chain" / "config.pbtxt"
    config = text_format.Parse(file.read_text(), ModelConfig())
    del config.parameters["page_size"]
    file.write_text(text_format.MessageToString(config))
    with pytest.raises(CorollaError, match=r"chain/config.pbtxt: parameter 'page_size' is missing; .*corolla init"):
        served_model(tmp_path, "chain")


@pytest.mark.parametrize(
    ("parameter", "value", "message"),
    [
        ("threads", "two", "threads: 'two' is not allowed; allowed: a whole number, 0 or more"),
        ("attn_cache_tokens", "-1", "attn_cache_tokens: '-1' "),
        ("dtype", "int8", "dtype: 'int8' is not allowed; allowed: float32, float16, bfloat16"),
        ("blocks", "4", "blocks: '4' is not allowed; allowed: start:end"),
        ("decoder", "quick", "decoder: 'quick' is not allowed; allowed: compiled, eager"),
        ("decoder_batch_sizes", "17,1", "decoder_batch_sizes: '17,1' .* from 1 to max_batch_size 16"),
        ("batch_channel_capacity", "-1", "batch_channel_capacity: '-1' "),
    ],
)
def test_config_with_a_wrong_parameter_is_refused(
    grouped: Served, tmp_path: Path, parameter: str, value: str, message: str
) -> None:
    init(grouped.checkpoint, "--out", tmp_path)
    file = tmp_path / "chain" / "config.pbtxt"
    config = text_format.Parse(file.read_text(), ModelConfig())
    config.parameters[parameter].string_value = value
    file.write_text(text_format.MessageToString(config))
    with pytest.raises(InvalidValueError, match=f"^{message}"):
        served_model(tmp_path, "chain")


def test_config_without_parameters_at_all_is_refused_with_what_to_do() -> None:
    arguments = {"model_config": '{"name": "chain", "parameters": {}}', "model_repository": "/repository/chain"}
    with pytest.raises(CorollaError, match=r"chain/config.pbtxt: parameter .* is missing; .*corolla init"):
        ServedModel.from_arguments(arguments)


@pytest.mark.parametrize("text", ["", "3", ":", "1:", ":2", "2:2", "3:1", "-1:2", "a:b", "0:1:2", "0.0:1"])
def test_blocks_that_are_no_range_are_refused(text: str) -> None:
    with pytest.raises(InvalidValueError, match="such as 0:4"):
        parse_blocks(text)


def test_committed_repository_is_what_init_writes_for_the_demo_checkpoint(tmp_path: Path) -> None:
    """corolla init .cache/demo-checkpoint --out model_repository --dtype float32 --relative"""
    make_checkpoint(DemoRecipe().config(), dtype_named("float32"), 0, tmp_path / ".cache" / "demo-checkpoint")
    out = tmp_path / "model_repository"
    result = init(tmp_path / ".cache" / "demo-checkpoint", "--out", out, "--dtype", "float32", "--relative")
    assert result.exit_code == 0
    assert contents(PROJECT / "model_repository") == contents(out)


@pytest.mark.parametrize("model", ["chain", "blocks_00_02"])
@pytest.mark.parametrize(
    "change",
    [
        lambda config: config.parameters["decoder_batch_sizes"].__setattr__("string_value", "16,2"),
        lambda config: config.dynamic_batching.preferred_batch_size.append(2),
        lambda config: config.dynamic_batching.preferred_batch_size.pop(),
        lambda config: config.dynamic_batching.ClearField("max_queue_delay_microseconds"),
        lambda config: config.__setattr__("max_batch_size", 32),
    ],
    ids=["sizes", "another preferred", "fewer preferred", "no delay", "max_batch_size"],
)
def test_config_that_disagrees_with_its_decoders_is_refused(
    grouped: Served, tmp_path: Path, model: str, change: Callable[[ModelConfig], None]
) -> None:
    init(grouped.checkpoint, "--out", tmp_path)
    file = tmp_path / model / "config.pbtxt"
    config = text_format.Parse(file.read_text(), ModelConfig())
    assert served_model(tmp_path, model).decoder_batch_sizes == (16, 8, 4, 1)
    assert list(config.dynamic_batching.preferred_batch_size) == [4, 8, 16]
    change(config)
    file.write_text(text_format.MessageToString(config))
    with pytest.raises(CorollaError, match=rf"{model}/config.pbtxt: decoder_batch_sizes .* want max_batch_size 16"):
        served_model(tmp_path, model)


def test_a_maximum_of_one_loads_with_the_preferred_size_that_triton_fills_in(grouped: Served, tmp_path: Path) -> None:
    init(grouped.checkpoint, "--out", tmp_path, "--max-batch-size", "1")
    file = tmp_path / "chain" / "config.pbtxt"
    config = text_format.Parse(file.read_text(), ModelConfig())
    config.dynamic_batching.preferred_batch_size.append(1)
    file.write_text(text_format.MessageToString(config))
    assert served_model(tmp_path, "chain").decoder_batch_sizes == (1,)


def test_the_eager_decoder_prefers_no_sizes_and_packs_nothing(grouped: Served, tmp_path: Path) -> None:
    init(grouped.checkpoint, "--out", tmp_path, "--decoder", "eager")
    assert list(read_models(tmp_path)["chain"].dynamic_batching.preferred_batch_size) == []
    model = served_model(tmp_path, "chain")
    assert (model.decoder_batch_sizes, model.packed) == ((), False)


def test_shards_take_the_eager_decoder_and_a_part_of_the_cache(grouped: Served, tmp_path: Path) -> None:
    assert init(grouped.checkpoint, "--out", tmp_path, "--dtype", "float32", "--tensor-parallel", 2).exit_code == 0
    model = served_model(tmp_path, "chain")
    assert (model.tensor_parallel, model.decoder_batch_sizes) == (2, ())
    whole, part = (KVLayout.of(GROUPED.model_config(), "float32", 64, 16, shards) for shards in (1, 2))
    assert 2 * part.bytes_per_block == whole.bytes_per_block


def test_init_adds_the_maximum_to_the_sizes_and_says_so(
    grouped: Served, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = init(grouped.checkpoint, "--out", tmp_path, "--max-batch-size", 8, "--decoder-batch-sizes", "1,4")
    assert result.exit_code == 0
    assert "added max_batch_size 8" in caplog.text
    assert served_model(tmp_path, "generate").decoder_batch_sizes == (8, 4, 1)
