"""Checkpoints on the hub: one commit, only what is needed, once; against a hub on 127.0.0.1."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import huggingface_hub
import pytest
import torch
from click.testing import CliRunner, Result
from huggingface_hub import constants, file_download

from checkpoints import GROUPED, random_prompt
from conftest import Served
from corolla.bench.serving import local_folder
from corolla.bench.serving import make_plan as bench_plan
from corolla.checkpoint.disk_cache import DiskCache
from corolla.checkpoint.hub import HubModel, resolve
from corolla.checkpoint.lora import AdapterFolder
from corolla.checkpoint.parts import EMBEDDING, block_part
from corolla.checkpoint.prepared import PreparedParts
from corolla.checkpoint.source import find_source, open_checkpoint, written_source
from corolla.cli.main import cli
from corolla.errors import CheckpointError, EnvironmentProblemError, InvalidValueError
from hub_server import Hub, hub_server
from local_server import LocalServer, make_plan, served_model
from lora_adapters import write_adapter
from test_checkpoint_folder import single_torch_file, torch_files

ID = "flowers/daisy"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """An empty hub, and an empty cache."""
    with hub_server() as hub:
        use(hub.url, monkeypatch)
        use_cache(tmp_path / "hub-cache", monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield hub
        huggingface_hub.close_session()


def use(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What HF_ENDPOINT does, which is read once per process."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


def use_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))


def go_offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    huggingface_hub.close_session()
    hub.asked.clear()


def init(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["init", *map(str, arguments)])


def parts_of(model: HubModel, cache: Path) -> PreparedParts:
    checkpoint = open_checkpoint(model)
    return PreparedParts(checkpoint, torch.float32, DiskCache(cache, None))


def shards_of(checkpoint: Path, prefix: str) -> list[str]:
    (index,) = checkpoint.glob("*.index.json")
    weight_map = json.loads(index.read_text())["weight_map"]
    return sorted({file for name, file in weight_map.items() if name.startswith(prefix)})


def test_repository_of_a_model_on_the_hub_serves_its_commit(hub: Hub, grouped: Served, tmp_path: Path) -> None:
    commit = hub.add(ID, grouped.checkpoint)
    result = init(ID, "--out", tmp_path / "repository", "--dtype", "float32")
    assert (result.exit_code, result.exception) == (0, None)
    source = served_model(tmp_path / "repository", "chain").checkpoint
    assert source == HubModel(ID, commit)
    assert str(source) == f"hf://{ID}@{commit}"

    hub.asked.clear()
    server = LocalServer(make_plan(source, GROUPED.ranges, attn_cache_tokens=64), tmp_path / "server")
    input_ids = torch.tensor([random_prompt(20, seed=20)])
    logits = server.head(server.run_ranges(server.embedding(input_ids)))
    torch.testing.assert_close(logits, grouped.reference.logits(input_ids), rtol=0, atol=1e-4)
    server.engine().stop()  # it has opened the tokenizer
    assert hub.asked == [], "what a server needs was fetched before"


def test_adapters_on_the_hub_and_in_folders(hub: Hub, grouped: Served, tmp_path: Path) -> None:
    """Beside a checkpoint whose path is relative; what the repository says can be opened."""
    path = write_adapter(grouped.checkpoint, tmp_path / "adapter", 1, r=2, target_modules=["q_proj"])
    commit = hub.add(ID, path)
    options = ("--out", tmp_path / "repository", "--adapters", f"far={ID}", "--adapters", f"near={path}", "--relative")
    result = init(grouped.checkpoint, *options)
    assert (result.exit_code, result.exception) == (0, None)
    adapters = served_model(tmp_path / "repository", "sessions").adapters
    assert adapters == {"far": HubModel(ID, commit), "near": path}
    config = open_checkpoint(grouped.checkpoint).config
    far, near = (AdapterFolder(source, config).prepared() for source in adapters.values())
    assert all(torch.equal(far[name], near[name]) for name in far | near)


def test_adapters_that_init_refuses(grouped: Served, tmp_path: Path) -> None:
    for text, message in (("nothing", "--adapters: 'nothing' is not"), (f"a={tmp_path}", "holds no adapter_config")):
        result = init(grouped.checkpoint, "--out", tmp_path / "repository", "--adapters", text)
        assert message in str(result.exception)
    assert not (tmp_path / "repository").exists()


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_only_the_shards_of_the_blocks_that_are_loaded_are_fetched(
    hub: Hub, grouped: Served, tmp_path: Path, suffix: str
) -> None:
    checkpoint = Path(shutil.copytree(grouped.checkpoint, tmp_path / "checkpoint"))
    if suffix == "bin":
        torch_files(checkpoint)
    hub.add(ID, checkpoint)
    assert init(ID, "--out", tmp_path / "repository", "--no-weights").exit_code == 0
    assert hub.fetched(suffix) == []
    model = served_model(tmp_path / "repository", "chain").checkpoint
    assert isinstance(model, HubModel)
    parts_of(model, tmp_path / "cache").load(block_part(0))
    first = shards_of(checkpoint, "model.layers.0.")
    assert hub.fetched(suffix) == first
    parts_of(model, tmp_path / "cache").load(block_part(1))
    assert hub.fetched(suffix) == sorted({*first, *shards_of(checkpoint, "model.layers.1.")})
    assert hub.fetched(suffix) != shards_of(checkpoint, "")


def test_init_for_a_part_of_the_model_fetches_only_the_shards_of_its_blocks(
    hub: Hub, grouped: Served, tmp_path: Path
) -> None:
    hub.add(ID, grouped.checkpoint)
    assert init(ID, "--out", tmp_path / "repository", "--blocks", "2:4").exit_code == 0
    fetched = hub.fetched("safetensors")
    assert set(shards_of(grouped.checkpoint, "model.layers.2.")) <= set(fetched)
    assert len(fetched) < len(shards_of(grouped.checkpoint, ""))


def test_single_file_is_fetched_when_a_part_is_loaded(hub: Hub, grouped: Served, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(grouped.checkpoint, tmp_path / "checkpoint"))
    single_torch_file(checkpoint)
    hub.add(ID, checkpoint)
    parts = parts_of(resolve(ID, None, None), tmp_path / "cache")
    assert hub.fetched(".bin") == []
    parts.load(EMBEDDING)
    assert hub.fetched(".bin") == ["pytorch_model.bin"]


def test_second_machine_serves_the_commit_that_init_resolved(
    hub: Hub, grouped: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the branch has become. What is prepared goes by the commit, not by the place of the cache."""
    commit = hub.add(ID, grouped.checkpoint)
    init(ID, "--out", tmp_path / "repository", "--dtype", "float32")
    first = parts_of(HubModel(ID, commit), tmp_path / "cache").load(block_part(1))

    changed = Path(shutil.copytree(grouped.checkpoint, tmp_path / "changed"))
    (changed / "config.json").write_text((changed / "config.json").read_text().replace("301", "302"))
    moved = hub.add(ID, changed)
    use_cache(tmp_path / "cache-of-second-machine", monkeypatch)
    model = served_model(tmp_path / "repository", "embed").checkpoint
    assert isinstance(model, HubModel)
    second = parts_of(model, tmp_path / "second").load(block_part(1))
    assert all(torch.equal(tensor, first[name]) for name, tensor in second.items())
    assert stored(tmp_path / "cache") == stored(tmp_path / "second")
    assert resolve(ID, None, None).commit == moved
    assert open_checkpoint(HubModel(ID, moved)).fingerprint() != open_checkpoint(model).fingerprint()


def stored(cache: Path) -> list[Path]:
    return sorted(file.relative_to(cache) for file in cache.glob("*/*.safetensors"))


def test_second_start_needs_no_weights(hub: Hub, grouped: Served, tmp_path: Path) -> None:
    model = HubModel(ID, hub.add(ID, grouped.checkpoint))
    parts_of(model, tmp_path / "cache").load(block_part(0))
    for blob in (tmp_path / "hub-cache").glob("models--*/snapshots/*/*.safetensors"):
        blob.resolve().unlink()
        blob.unlink()
    hub.asked.clear()
    parts_of(model, tmp_path / "cache").load(block_part(0))
    assert hub.asked == []


def test_connection_that_is_cut_goes_on_where_it_was(
    hub: Hub, grouped: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
    model = HubModel(ID, hub.add(ID, grouped.checkpoint))
    (shard, *_) = shards_of(grouped.checkpoint, "model.layers.0.")
    hub.cut[shard] = 100_000
    checkpoint = open_checkpoint(model)
    checkpoint.fetch()
    assert [asked.range for asked in hub.asked if asked.path.endswith(shard) and asked.method == "GET"] == [
        None, "bytes=100000-",
    ]  # fmt: skip
    for file in grouped.checkpoint.glob("*.safetensors"):
        assert (checkpoint.path / file.name).read_bytes() == file.read_bytes()


def test_revisions_have_names(hub: Hub, grouped: Served) -> None:
    first, second = hub.add(ID, grouped.checkpoint), hub.add(ID, grouped.checkpoint, branch="v2")
    for text, revision, commit in (
        (ID, None, first), (ID, "v2", second), (f"{ID}@v2", None, second), (f"hf://{ID}@{first}", None, first),
        (f"hf://{ID}", "main", first),
    ):  # fmt: skip
        assert find_source(text, revision) == HubModel(ID, commit)


def test_folder_goes_before_the_hub(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ID).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert find_source(ID) == Path(ID)
    assert hub.asked == []


def test_model_that_does_not_exist_is_named(hub: Hub, grouped: Served, tmp_path: Path) -> None:
    hub.add(ID, grouped.checkpoint)
    for arguments, message in (
        (["flowers/rose"], f"'flowers/rose' of {hub.url} does not exist, or is private; there is no folder of that"),
        (["flowers/rose", "--token", "hf_any"], "'flowers/rose' of .* does not exist, or is private"),
        ([ID, "--revision", "v3"], "has no revision 'v3'; give a branch, a tag or a commit"),
    ):
        error = init(*arguments, "--out", tmp_path / "out").exception
        with pytest.raises(CheckpointError, match=message):
            raise error or AssertionError
    assert not (tmp_path / "out").exists()


def test_gated_model_wants_a_token_which_is_written_nowhere(hub: Hub, grouped: Served, tmp_path: Path) -> None:
    hub.add(ID, grouped.checkpoint, token="hf_secret")
    for arguments in ([], ["--token", "hf_other"]):
        error = init(ID, "--out", tmp_path / "out", *arguments).exception
        with pytest.raises(CheckpointError, match=r"is gated; accept its terms on .*HF_TOKEN"):
            raise error or AssertionError
    assert init(ID, "--out", tmp_path / "out", "--token", "hf_secret").exit_code == 0
    written = [file for folder in ("out", "hub-cache") for file in (tmp_path / folder).rglob("*") if file.is_file()]
    assert written
    assert not any(b"hf_secret" in file.read_bytes() for file in written)
    assert "hf_secret" not in repr(find_source(ID, token="hf_secret"))


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "compressed-tensors", "mxfp4", "hqq"])
def test_quantization_that_is_not_supported_is_refused_before_weights_are_fetched(
    hub: Hub, grouped: Served, tmp_path: Path, method: str
) -> None:
    folder = Path(shutil.copytree(grouped.checkpoint, tmp_path / "checkpoint"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": method}}))
    hub.add(ID, folder)
    error = init(ID, "--out", tmp_path / "out").exception
    with pytest.raises(InvalidValueError, match=f"quant_method: '{method}' is not allowed; allowed: bitsandbytes"):
        raise error or AssertionError
    assert not (tmp_path / "out").exists()
    assert hub.fetched(".safetensors") == []


def test_offline_what_was_fetched_is_enough(
    hub: Hub, grouped: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.add(ID, grouped.checkpoint)
    online = init(ID, "--out", tmp_path / "repository").output
    go_offline(hub, monkeypatch)
    offline = init(ID, "--out", tmp_path / "repository").output
    assert "wrote" not in offline
    assert offline.splitlines()[-1:] == online.splitlines()[-1:]
    assert find_source(ID) == HubModel(ID, commit)
    assert parts_of(HubModel(ID, commit), tmp_path / "cache").load(block_part(3))
    assert hub.asked == []


def test_offline_what_was_not_fetched_is_named(
    hub: Hub, grouped: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.add(ID, grouped.checkpoint)
    init(ID, "--out", tmp_path / "repository", "--no-weights")
    go_offline(hub, monkeypatch)
    with pytest.raises(CheckpointError, match=r"is not in the cache .*hub-cache, and HF_HUB_OFFLINE forbids"):
        find_source("flowers/rose")
    with pytest.raises(CheckpointError, match=rf"revision '{commit}', is not in the cache .*; fetch it online first"):
        parts_of(HubModel(ID, commit), tmp_path / "cache").load(block_part(0))
    assert stored(tmp_path / "cache") == []


def test_hub_that_cannot_be_reached_is_named(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    use("http://127.0.0.1:1", monkeypatch)
    with pytest.raises(CheckpointError, match=r"of http://127.0.0.1:1, .*cannot be fetched \(.*refused\).*HF_ENDPOINT"):
        find_source(ID)


def test_index_that_names_a_file_the_hub_does_not_have_is_an_error(hub: Hub, grouped: Served, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(grouped.checkpoint, tmp_path / "checkpoint"))
    (shard, *_) = shards_of(checkpoint, "model.layers.2.")
    (checkpoint / shard).unlink()
    hub.add(ID, checkpoint)
    error = init(ID, "--out", tmp_path / "out").exception
    with pytest.raises(CheckpointError, match=f"names files that do not exist: {shard}"):
        raise error or AssertionError
    assert not (tmp_path / "out").exists()


def test_disk_that_is_full_while_a_file_is_fetched_is_named(
    hub: Hub, grouped: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = HubModel(ID, hub.add(ID, grouped.checkpoint))
    checkpoint = open_checkpoint(model)

    def full(url: str, file: BinaryIO, **_: object) -> None:
        file.write(b"as much as fits")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(file_download, "http_get", full)
    with pytest.raises(EnvironmentProblemError, match=r"hub-cache: cannot be written \(No space left.*HF_HOME"):
        checkpoint.fetch()
    assert list(tmp_path.rglob("*.incomplete")) == []
    assert list(checkpoint.path.glob("*.safetensors")) == []


def test_benchmarks_take_models_on_the_hub(hub: Hub, grouped: Served) -> None:
    commit = hub.add(ID, grouped.checkpoint)
    plan = bench_plan(find_source(ID), "auto", threads=1)
    assert (plan.checkpoint, plan.checkpoint.name, plan.dtype.name) == (HubModel(ID, commit), "daisy", "bfloat16")
    assert hub.fetched(".safetensors") == shards_of(grouped.checkpoint, "")
    assert (local_folder(plan) / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([".", "--revision", "v1"], "--revision: 'v1' is not allowed; allowed: none, as . is no model on the hub"),
        ([f"{ID}@v1", "--revision", "v2"], f"--revision: 'v2' is not allowed; allowed: none beside that of {ID}@v1"),
        ([ID, "--relative"], "--relative: .* only with a local folder"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    hub: Hub, grouped: Served, tmp_path: Path, arguments: list[str], message: str
) -> None:
    hub.add(ID, grouped.checkpoint)
    error = init(*arguments, "--out", tmp_path / "out").exception
    with pytest.raises(InvalidValueError, match=message):
        raise error or AssertionError


@pytest.mark.parametrize("text", ["hf://flowers/daisy", "hf://flowers/daisy@main", "hf://daisy@" + "0" * 40])
def test_repository_names_a_whole_commit(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidValueError, match=r"checkpoint: .* a whole commit, as `corolla init` writes it"):
        written_source(text, tmp_path)


def test_environment_of_the_hub_holds_for_the_command(hub: Hub, grouped: Served, tmp_path: Path) -> None:
    commit = hub.add(ID, grouped.checkpoint, token="hf_secret")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "hf_secret", "HF_ENDPOINT": hub.url}
    command = [Path(sys.prefix, "bin", "corolla"), "init", ID, "--out", tmp_path / "out"]
    subprocess.run([*map(str, command)], env=environment, check=True, capture_output=True)
    assert served_model(tmp_path / "out", "chain").checkpoint == HubModel(ID, commit)
    assert list((tmp_path / "home").rglob("*.safetensors"))
