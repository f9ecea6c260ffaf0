"""Options come from the command line, the environment, a file or their defaults, in this order, and say from where."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from conftest import Served
from corolla.cli import serve
from corolla.cli.main import COMMANDS, cli
from corolla.cli.settings import OTHER_VARIABLES, SettingsError, configure, key_of, settings_of, variables
from corolla.errors import CorollaError, InvalidValueError
from corolla.server.options import ServerOptions


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, without settings of this machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for variable in [name for name in os.environ if name.startswith("COROLLA_")]:
        monkeypatch.delenv(variable)
    return tmp_path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [*map(str, arguments)])


def settings(*arguments: object) -> dict[str, tuple[Any, str]]:
    """Value and source of each setting."""
    result = run("config", "--json", *arguments)
    assert result.exception is None, result.output
    return {key: (entry["value"], entry["source"]) for key, entry in json.loads(result.output).items()}


def error_of(result: Result, kind: type[CorollaError]) -> str:
    assert isinstance(result.exception, kind)
    return str(result.exception)


def leaves(command: click.Command, names: list[str]) -> Iterator[tuple[list[str], click.Command]]:
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from leaves(inner, [*names, name])
    else:
        yield names, command


def test_flag_before_variable_before_file_before_default(monkeypatch: pytest.MonkeyPatch) -> None:
    def grpc_port(*flags: str) -> tuple[Any, str]:
        return settings("serve", *flags)["grpc-port"]

    assert grpc_port() == (8001, "default")
    Path("corolla.toml").write_text("grpc-port = 9001")
    assert grpc_port() == (9001, "corolla.toml")
    Path("corolla.toml").write_text("grpc-port = 9001\n[serve]\ngrpc-port = 9002")
    assert grpc_port() == (9002, "corolla.toml")
    monkeypatch.setenv("COROLLA_GRPC_PORT", "9003")
    assert grpc_port() == (9003, "COROLLA_GRPC_PORT")
    monkeypatch.setenv("COROLLA_SERVE_GRPC_PORT", "9004")
    assert grpc_port() == (9004, "COROLLA_SERVE_GRPC_PORT")
    assert grpc_port("--grpc-port=9005") == (9005, "command line")


def test_what_config_prints_can_be_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COROLLA_ADAPTERS", "poet=./poet cook=./cook")
    monkeypatch.setenv("COROLLA_NO_WEIGHTS", "1")
    arguments = ["serve", "./a checkpoint", "--host=0.0.0.0", '--log-file=a "log".txt', "--log-verbose=1"]
    before = settings(*arguments)
    assert before["adapters"] == (["poet=./poet", "cook=./cook"], "COROLLA_ADAPTERS")
    assert before["tritonserver-flags"] == (["--log-verbose=1"], "command line")
    printed = run("config", *arguments).output
    monkeypatch.delenv("COROLLA_ADAPTERS")
    monkeypatch.delenv("COROLLA_NO_WEIGHTS")
    Path("corolla.toml").write_text(printed)
    after = settings("serve")
    assert {key: value for key, (value, _) in after.items()} == {key: value for key, (value, _) in before.items()}
    assert after["host"] == ("0.0.0.0", "corolla.toml")
    assert after["http-port"] == (8000, "default")


def test_a_token_is_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COROLLA_TOKEN", "hf_secret")
    printed = run("config", "init").output
    assert "hf_secret" not in printed
    assert "# token: COROLLA_TOKEN: set, but not shown" in printed


def test_a_misspelt_variable_is_pointed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COROLLA_GRPC_PROT", "9001")
    printed = run("config").output
    assert printed.splitlines()[-1] == "# COROLLA_GRPC_PROT: set, but no option of `corolla serve` has this name"


def test_init_takes_everything_from_the_file(grouped: Served) -> None:
    Path("corolla.toml").write_text(f'checkpoint = "{grouped.checkpoint}"\nout = "here"\nranges = "0:1,1:4"')
    assert run("init").exception is None
    assert Path("here/blocks_01_04/config.pbtxt").exists()


def test_another_file_is_named_by_a_flag_or_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("corolla.toml").write_text("threads = 1")
    Path("mine.toml").write_text("threads = 2")
    assert settings("init", "--config=mine.toml")["threads"] == (2, "mine.toml")
    monkeypatch.setenv("COROLLA_CONFIG", "mine.toml")
    assert settings("init")["threads"] == (2, "mine.toml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("grpc_port = 1", "corolla.toml: unknown key 'grpc_port'; did you mean 'grpc-port'? the file's top may hold: "),
        ("colour = 1", "corolla.toml: unknown key 'colour'; the file's top may hold: "),
        ("[init]\ngrpc-port = 1", "corolla.toml: unknown key 'grpc-port'; table [init] may hold: adapters, "),
        ("init = 1", "corolla.toml: init is the name of a command: write a table [init]"),
        ("threads = ", "corolla.toml: Invalid value (at "),
    ],
)
def test_a_file_that_says_something_unknown_is_refused(content: str, message: str) -> None:
    Path("corolla.toml").write_text(content)
    for arguments in (["init", "x", "--out=y"], ["config", "init"]):
        assert error_of(run(*arguments), SettingsError).startswith(message)


def test_a_file_that_is_not_there_is_refused() -> None:
    assert "none.toml" in error_of(run("init", "x", "--out=y", "--config=none.toml"), SettingsError)


@pytest.mark.parametrize(
    "content", ['threads = "two"', "threads = [2]", "threads = true", 'dtype = "int3"', 'adapters = [["a"]]'], ids=str
)
def test_a_wrong_value_in_the_file_is_named(content: str) -> None:
    Path("corolla.toml").write_text(content)
    key = content.split()[0]
    assert error_of(run("init", "x", "--out=y"), InvalidValueError).startswith(f"corolla.toml: {key}: ")


def test_a_wrong_value_in_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COROLLA_INIT_THREADS", "two")
    assert error_of(run("init", "x", "--out=y"), InvalidValueError).startswith("COROLLA_INIT_THREADS: 'two' ")


def test_other_commands_have_tables_and_variables_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("corolla.toml").write_text("threads = 3\n[generate]\nmax-tokens = 7\n[sessions.open]\nmax-length = 9")
    monkeypatch.setenv("COROLLA_GENERATE_TOP_K", "5")
    monkeypatch.setenv("COROLLA_MAX_TOKENS", "4")
    generate = cli.get_command(click.Context(cli), "generate")
    assert generate is not None
    context = generate.make_context("generate", ["text"])
    assert (context.params["max_tokens"], context.params["top_k"]) == (7, 5)
    sessions = cli.get_command(click.Context(cli), "sessions")
    assert isinstance(sessions, click.Group)
    assert sessions.commands["open"].make_context("open", []).params["max_length"] == 9


def test_the_registry_is_the_same_for_all_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("corolla.toml").write_text('registry = "sqlite:///file.db"\nthreads = 2')
    peers = cli.get_command(click.Context(cli), "peers")
    assert peers is not None
    assert peers.make_context("peers", []).params["registry"] == "sqlite:///file.db"
    monkeypatch.setenv("COROLLA_REGISTRY", "sqlite:///variable.db")
    assert peers.make_context("peers", []).params["registry"] == "sqlite:///variable.db"
    assert settings("serve")["registry"] == ("sqlite:///variable.db", "COROLLA_REGISTRY")


def test_no_variable_means_two_things() -> None:
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        for names, leaf in leaves(configure(command, [name]), [name]):
            keys = [key_of(param) for param in settings_of(leaf)]
            assert len(set(keys)) == len(keys)
            assert not {v for param in settings_of(leaf) for v in variables(param, names)} & {*OTHER_VARIABLES}


class TestServe:
    @pytest.fixture
    def served(self, monkeypatch: pytest.MonkeyPatch) -> list[ServerOptions]:
        """What would have been served."""
        options: list[ServerOptions] = []

        class NoSupervisor:
            def __init__(self, given: ServerOptions, *_: object) -> None:
                options.append(given)

            def run(self) -> None:
                """Ends at once."""

        monkeypatch.setattr(serve, "Supervisor", NoSupervisor)
        return options

    def test_a_checkpoint_is_planned_written_and_served(self, grouped: Served, served: list[ServerOptions]) -> None:
        first = run("serve", grouped.checkpoint, "--threads=1", "--dtype=float32", "--grpc-port=0", "--log-verbose=1")
        assert first.exception is None
        again = run("serve", grouped.checkpoint, "--threads=1", "--dtype=float32")
        other = run("serve", grouped.checkpoint, "--threads=2", "--dtype=float32")
        named = run("serve", grouped.checkpoint, "--dtype=float32", "--out=here")
        folders = [options.repository for options in served]
        assert folders[0] == folders[1]
        assert len({*folders}) == 3
        assert folders[3] == Path("here")
        assert all((folder / "chain" / "config.pbtxt").exists() for folder in folders)
        assert ["wrote" in result.output for result in (first, again, other, named)] == [True, False, True, True]
        assert (served[0].grpc_port, served[0].flags) == (0, ("--log-verbose=1",))
        assert folders[0].parent == Path("state/corolla/repositories").absolute()

    def test_a_repository_is_served_as_it_is(self, grouped: Served, served: list[ServerOptions]) -> None:
        run("init", grouped.checkpoint, "--out=here")
        Path("corolla.toml").write_text('checkpoint = "here"\nthreads = 2\n')
        assert run("serve").exception is None
        assert [options.repository for options in served] == [Path("here")]
        message = error_of(run("serve", "here", "--threads=2"), InvalidValueError)
        assert message.startswith("--threads: 2 is not allowed; allowed: only for a checkpoint; here is written")

    @pytest.mark.parametrize("argument", ["nowhere", "--log-verbose=1", "./no/where", "/no/where", "state"])
    def test_what_is_neither_is_refused(self, argument: str) -> None:
        Path("state").mkdir()
        message = error_of(run("serve", argument), InvalidValueError)
        assert message.startswith(f"CHECKPOINT|REPO: {argument!r} is not allowed; allowed: a checkpoint, ")

    def test_relative_paths_need_a_named_folder(self, grouped: Served) -> None:
        assert "--out" in error_of(run("serve", grouped.checkpoint, "--relative"), InvalidValueError)
