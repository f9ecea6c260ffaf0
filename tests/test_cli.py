"""The `corolla` command: every part explains itself, and errors are one line."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from checkpoints import random_prompt, text_of
from conftest import Remote
from corolla.cli.main import COMMANDS, cli, main


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_explains_itself_with_an_example(name: str) -> None:
    result = CliRunner().invoke(cli, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert "Example" in result.output
    assert result.output.count(f"corolla {name}") >= 1


def test_help_lists_every_command_and_loads_no_heavy_library() -> None:
    code = "import sys; from corolla.cli.main import cli; cli(['--help'], standalone_mode=False); " \
           "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'tritonclient')))"  # fmt: skip
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(f"  {name} " in result.stdout for name in ("generate", "init", "make-checkpoint", "serve"))


def test_unknown_command_is_an_error() -> None:
    assert "No such command 'dance'" in CliRunner().invoke(cli, ["dance"]).output


def test_error_for_a_user_is_one_line_and_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["corolla", "init", str(tmp_path / "nowhere"), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    message = capsys.readouterr().err
    assert message.startswith("corolla: checkpoint: no folder ")
    assert message.count("\n") == 1


def test_generate_prints_the_text_and_what_follows(remote: Remote) -> None:
    prompt = random_prompt(6, seed=6)
    arguments = ["generate", text_of(prompt), "--address", remote.server.grpc, "--max-tokens", "20"]
    result = CliRunner().invoke(cli, arguments)
    added = remote.reference.text(prompt, remote.reference.generate(prompt, max_new_tokens=20))
    assert result.output == f"{text_of(prompt)}{added}\n"


def test_generate_passes_its_options_on(remote: Remote) -> None:
    prompt = random_prompt(6, seed=6)
    options = ["--temperature", "0.8", "--top-k", "9", "--top-p", "0.9", "--random-seed", "3", "--max-tokens", "20"]
    result = CliRunner().invoke(cli, ["generate", text_of(prompt), "--address", remote.server.grpc, *options])
    new_ids = remote.reference.generate(prompt, seed=3, temperature=0.8, top_k=9, top_p=0.9, max_new_tokens=20)
    assert result.output == f"{text_of(prompt)}{remote.reference.text(prompt, new_ids)}\n"
