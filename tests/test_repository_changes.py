"""`corolla init` on a folder that holds a repository: the same inputs change nothing, others only what is its own."""

import os
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from checkpoints import GROUPED
from conftest import Served
from corolla.cli.main import cli
from corolla.dtypes import dtype_named
from corolla.errors import EnvironmentProblemError
from corolla.repository.models import all_models
from corolla.repository.plan import RepositoryPlan
from corolla.repository.writer import EditedRepositoryError, repository_files, write_repository

PLAN = RepositoryPlan(Path("/checkpoint"), GROUPED.model_config(), dtype_named("float32"), [range(0, 2), range(2, 4)])
OTHER = replace(PLAN, ranges=[range(0, 4)])
CHAIN = Path("chain", "config.pbtxt")


def contents(folder: Path) -> dict[str, tuple[str, int]]:
    return {str(file.relative_to(folder)): (file.read_text(), file.stat().st_mtime_ns)
            for file in folder.rglob("*") if file.is_file()}  # fmt: skip


def edit(file: Path) -> str:
    """Takes one parameter in hand; returns the new text."""
    text = file.read_text().replace('"threads" value { string_value: "0"', '"threads" value { string_value: "1"')
    assert text != file.read_text()
    file.write_text(text)
    return text


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write_repository(PLAN, tmp_path)
    return tmp_path


def test_comments_take_nothing_from_the_config() -> None:
    files = repository_files(PLAN)
    for model in all_models(PLAN):
        assert text_format.Parse(files[Path(model.name, "config.pbtxt")], ModelConfig()) == model


def test_every_line_fits_and_every_file_says_what_it_is() -> None:
    for file, text in repository_files(PLAN).items():
        if file.name == "config.pbtxt":
            assert max(map(len, text.splitlines())) <= 120
            assert text.startswith(f"# {file.parent.name}: ")
            assert "corolla init /checkpoint --out . " in text


def test_the_same_inputs_change_nothing(repository: Path) -> None:
    (repository / "notes.txt").write_text("mine")
    before = contents(repository)
    assert write_repository(PLAN, repository).changes == []
    assert contents(repository) == before


@pytest.mark.parametrize(
    "options",
    [
        ["--range-size", "3", "--decoder", "eager", "--max-batch-size", "4", "--relative"],
        ["--blocks", "1:4", "--ends", "--registry", "sqlite:///my peers.db", "--model-name", "tiny", "--threads", "2"],
        ["--model-name", "tiny", "--span"],
        ["--blocks", "none", "--ends", "--registry", "sqlite:///peers.db", "--decoder-batch-sizes", "8,2"],
    ],
    ids=["all blocks", "some blocks", "all blocks among others", "no blocks"],
)
def test_the_command_in_the_comments_writes_the_same_files(
    grouped: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    checkpoint, folder = os.path.relpath(grouped.checkpoint), tmp_path / "my repository"
    assert CliRunner().invoke(cli, ["init", checkpoint, "--out", str(folder), *options]).exit_code == 0
    lines = (folder / "sessions" / "config.pbtxt").read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("#   corolla init"))
    command = " ".join(line[1:].rstrip("\\") for line in lines[first : lines.index("#", first)])
    before = contents(folder)
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(cli, shlex.split(command)[1:])
    assert (result.exit_code, result.exception) == (0, None)
    assert contents(folder) == before


def test_models_no_longer_wanted_are_removed_and_those_of_a_person_stay(repository: Path) -> None:
    own = repository / "my_model" / "config.pbtxt"
    copied = repository / "chain_copy" / "config.pbtxt"
    for file, text in ((own, 'name: "my_model"'), (copied, (repository / CHAIN).read_text())):
        file.parent.mkdir()
        file.write_text(text)
    changes = write_repository(OTHER, repository)
    assert {str(c.file) for c in changes.changes if c.after is None} == {
        "blocks_00_02/config.pbtxt",
        "blocks_02_04/config.pbtxt",
    }
    models = {file.parent.name for file in repository.glob("*/config.pbtxt")}
    assert models == {model.name for model in all_models(OTHER)} | {"my_model", "chain_copy"}
    assert not (repository / "blocks_00_02").exists()


def test_what_a_person_edited_is_kept_while_nothing_else_would_be_written(repository: Path) -> None:
    edited = edit(repository / CHAIN)
    changes = write_repository(PLAN, repository)
    assert (changes.changes, changes.kept) == ([], [CHAIN])
    assert (repository / CHAIN).read_text() == edited
    write_repository(PLAN, repository, force=True)
    assert (repository / CHAIN).read_text() == repository_files(PLAN)[CHAIN]


@pytest.mark.parametrize("hand", ["edits", "replaces", "adds a comment", "adds a file", "edits what is to go"])
def test_a_persons_work_is_not_undone_without_force(repository: Path, hand: str) -> None:
    named = CHAIN
    if hand == "edits":
        edit(repository / CHAIN)
    elif hand == "replaces":
        (repository / CHAIN).write_text('name: "chain"')
    elif hand == "adds a comment":
        (repository / CHAIN).write_text("# mine\n" + (repository / CHAIN).read_text())
    elif hand == "adds a file":
        named = Path("blocks_00_02", "config.pbtxt")
        (repository / "blocks_00_02" / "1" / "notes.txt").write_text("mine")
    else:
        named = Path("blocks_02_04", "config.pbtxt")
        edit(repository / named)
    before = contents(repository)
    with pytest.raises(EditedRepositoryError) as refused:
        write_repository(OTHER, repository)
    assert f"{repository / named}\n" in str(refused.value)
    assert f"--- {named}" in str(refused.value)
    assert contents(repository) == before
    write_repository(OTHER, repository, force=True)
    written = {str(path): text for path, text in repository_files(OTHER).items()}
    assert {path: text for path, (text, _) in contents(repository).items()} == written


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(EnvironmentProblemError, match=r"file/repository: cannot be written .*name another folder"):
        write_repository(PLAN, tmp_path / "file" / "repository")


def test_diff_shows_what_would_change_and_writes_nothing(grouped: Served, tmp_path: Path) -> None:
    arguments = ["init", str(grouped.checkpoint), "--out", str(tmp_path)]
    CliRunner().invoke(cli, arguments)
    before = contents(tmp_path)
    assert CliRunner().invoke(cli, [*arguments, "--diff"]).output == f"{tmp_path}: nothing would change\n"
    shown = CliRunner().invoke(cli, [*arguments, "--ranges", "0:1,1:2,2:4", "--threads", "2", "--diff"]).output
    for line in (
        '+parameters { key: "threads" value { string_value: "2" } }',
        "--- /dev/null\n+++ blocks_00_01/config.pbtxt",
        "--- blocks_00_02/config.pbtxt\n+++ /dev/null",
    ):
        assert line in shown
    assert contents(tmp_path) == before
