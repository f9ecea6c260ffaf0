"""Every check of `corolla doctor` fails when it should, and says what to do."""

import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from corolla.cli.doctor import command
from corolla.errors import EnvironmentProblemError
from corolla.server import checks, installation, libpython
from corolla.server.checks import Check
from corolla.server.installation import Installation
from corolla.server.options import ServerOptions
from corolla.server.supervisor import Supervisor

PROGRAM = Path("tritonserver/bin/tritonserver")


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with a tritonserver to be written by the test, and without stubs."""
    (tmp_path / PROGRAM).parent.mkdir(parents=True)
    monkeypatch.setattr(checks, "find_wheel", lambda: tmp_path)
    return tmp_path


def write_program(wheel: Path, script: str) -> None:
    (wheel / PROGRAM).write_text(f"#!/bin/sh\n{script}\n")
    (wheel / PROGRAM).chmod(0o755)


def failed(check: Check, *words: str) -> bool:
    """Whether the check failed and its line has these words."""
    return not check.ok and all(word in checks.describe(check) for word in words)


def test_this_machine_is_fit() -> None:
    result = CliRunner().invoke(command)
    assert result.exit_code == 0, result.output
    assert len(result.output.splitlines()) == len(checks.run_checks()) + 1
    assert Installation.find().stub.exists()


def test_any_failure_is_told_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_libpython", lambda: None)
    result = CliRunner().invoke(command)
    assert result.exit_code == 1
    (line,) = [line for line in result.output.splitlines() if line.startswith("MISSING")]
    assert "apt-get install libpython3.11" in line


def test_a_missing_compiler_is_told_and_does_not_keep_servers_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    assert failed(checks.check_compiler(), "no-such-compiler not found", "apt-get install g++", "--decoder eager")
    assert CliRunner().invoke(command).exit_code == 1
    checks.require_checks()


def test_help_has_an_example() -> None:
    assert "corolla doctor" in CliRunner().invoke(command, ["--help"]).output


def test_serve_refuses_an_unfit_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.1.0")
    with pytest.raises(EnvironmentProblemError, match=r"numpy: 2\.1\.0; .*numpy>=1\.26,<2"):
        Supervisor(ServerOptions(tmp_path)).run()


@pytest.mark.parametrize(("system", "machine"), [("Linux", "aarch64"), ("Darwin", "x86_64")])
def test_platform(system: str, machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert failed(checks.check_platform(), system, machine, "Linux on x86_64")


@pytest.mark.parametrize("check", [checks.check_wheel, checks.check_tritonserver, checks.check_stub])
def test_without_wheel(check: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_wheel", lambda: None)
    assert callable(check)
    assert failed(check())


def test_stub_of_another_python(wheel: Path) -> None:
    (wheel / "tritonserver/python_backend_stubs/3.99").mkdir(parents=True)
    assert failed(checks.check_stub(), "no stub for Python 3.11", "3.99", "make setup PYTHON=")


def test_tritonserver_that_lacks_a_library(wheel: Path) -> None:
    write_program(wheel, "echo error while loading shared libraries: libz.so.1 >&2; exit 127")
    assert failed(checks.check_tritonserver(), "libz.so.1", "apt-get install")


def test_tritonserver_that_is_killed(wheel: Path) -> None:
    write_program(wheel, "kill -ILL $$")
    assert failed(checks.check_tritonserver(), "does not start", "signal 4")


@pytest.mark.parametrize(("version", "ok"), [("1.26.4", True), ("2.0.0", False), ("10.1", False)])
def test_numpy(version: str, ok: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    assert checks.check_numpy().ok == ok


def test_bash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert failed(checks.check_bash(), "install bash")


def test_shared_memory_too_small() -> None:
    assert failed(checks.check_shared_memory(2**60), "--shm-size", "needed")
    assert checks.check_shared_memory(2**20).ok


def test_shared_memory_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "SHARED_MEMORY", tmp_path / "none")
    assert failed(checks.check_shared_memory(0), "mount a tmpfs")


def test_temporary_folder_without_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC))
    assert failed(checks.check_temporary_folder(), "noexec", "TMPDIR")


def test_libpython_is_found_in_the_virtual_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "libpython" / "usr" / "lib" / "x86_64-linux-gnu"
    folder.mkdir(parents=True)
    (folder / installation.LIBPYTHON).touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    monkeypatch.setattr(
        installation.sysconfig, "get_config_var", {"LIBDIR": "/none", "MULTIARCH": "x86_64-linux-gnu"}.get
    )
    assert installation.find_libpython() == folder / installation.LIBPYTHON


def test_libpython_that_cannot_be_provided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libpython, "find_libpython", lambda: None)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(EnvironmentProblemError, match=r"apt-get install libpython3\.11"):
        libpython.provide_libpython()
