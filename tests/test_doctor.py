"""Every check of `corolla doctor` fails when it should, and says what to do."""

import importlib.metadata
import os
import platform
import shutil
import socket
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from checkpoints import GROUPED
from conftest import Served
from corolla.cli.doctor import command
from corolla.errors import EnvironmentProblemError
from corolla.planning import machine
from corolla.planning.machine import DeviceMemory
from corolla.reachability.address import Address
from corolla.reachability.asking import HealthListener, Verdict
from corolla.repository.changes import find_changes
from corolla.repository.writer import repository_files, write_repository
from corolla.repository.written_plan import written_plan
from corolla.server import checks, installation, libpython, machine_checks, model_checks
from corolla.server.checks import Check
from corolla.server.installation import Installation
from corolla.server.options import ServerOptions
from corolla.server.supervisor import Supervisor
from local_server import make_plan
from servers import free_port

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


PORTS = ["--http-port=0", "--grpc-port=0", "--metrics-port=0"]


def doctor(*arguments: object) -> tuple[int, list[str]]:
    """Exit status and lines; on any free ports unless the arguments say otherwise."""
    result = CliRunner().invoke(command, [*PORTS, *map(str, arguments)])
    assert isinstance(result.exception, SystemExit | None), result.exception
    return result.exit_code, result.output.splitlines()


def problems(lines: list[str]) -> list[str]:
    return [line.removeprefix("PROBLEM ") for line in lines if not line.startswith("ok ")]


def test_this_machine_is_fit() -> None:
    status, lines = doctor()
    assert (status, problems(lines)) == (0, [])
    assert Installation.find().stub.exists()
    for subject in ("versions: corolla ", "memory: ", "grpc port: any free one", "C++ compiler: ", "GPU: "):
        assert any(line.startswith(f"ok      {subject}") for line in lines)


def test_any_failure_is_told_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_libpython", lambda: None)
    status, lines = doctor()
    assert status == 1
    (line,) = problems(lines)
    assert "apt-get install libpython3.11" in line


def test_a_missing_compiler_is_told_and_does_not_keep_servers_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    assert failed(checks.check_compiler(), "no-such-compiler not found", "apt-get install g++", "--decoder eager")
    assert doctor()[0] == 1
    checks.require_checks()


def test_help_has_an_example() -> None:
    assert "corolla doctor" in CliRunner().invoke(command, ["--help"]).output


def test_versions_that_were_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", {"numpy": "2.1.0", "torch": "2.13.0+cpu"}.get)
    check = machine_checks.check_versions()
    assert failed(check, "numpy 2.1.0, wanted <2,>=1.26", "click is missing", "make setup")
    assert "torch" not in check.detail


def test_a_taken_port_is_named_with_who_has_it() -> None:
    port = free_port()
    assert machine_checks.check_port("grpc", "127.0.0.1", port).ok
    with socket.create_server(("127.0.0.1", port)):
        check = machine_checks.check_port("grpc", "127.0.0.1", port)
    assert failed(check, str(os.getpid()), "--grpc-port (0: any free one)")


def test_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    little = DeviceMemory("cpu", 2**34, 2**29, "limit of the container")
    monkeypatch.setattr(machine, "device_memories", lambda device: (little,))
    assert failed(machine_checks.check_memory(), "512.0 MiB free of 16.00 GiB (limit of the container)")


@pytest.mark.parametrize(
    ("script", "torch_cuda", "words"),
    [
        (None, None, ["no nvidia-smi", "install NVIDIA's driver"]),
        ("echo 'NVIDIA-SMI has failed'; exit 9", None, ["NVIDIA-SMI has failed", "install NVIDIA's driver"]),
        ("echo 'A100, 40 GiB, 550.1'", None, ["A100, 40 GiB, 550.1", "for CPUs only", "a torch with CUDA"]),
        ("echo 'A100, 40 GiB, 550.1'", "13.0", ["does not work with it", "a newer driver"]),
    ],
)
def test_gpu_is_missed_only_where_it_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, torch_cuda: str | None, words: list[str]
) -> None:
    if script:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert failed(machine_checks.check_gpu("cuda"), *words)
    assert machine_checks.check_gpu("cpu").ok


class TestModel:
    @pytest.fixture
    def repository(self, grouped: Served, tmp_path: Path) -> Path:
        """With the checkpoint beside it."""
        shutil.copytree(grouped.checkpoint, tmp_path / "checkpoint")
        plan = make_plan(tmp_path / "checkpoint", GROUPED.ranges, attn_cache_tokens=64)
        write_repository(replace(plan, checkpoint=Path("../checkpoint")), tmp_path / "repository")
        return tmp_path / "repository"

    def test_the_plan_of_a_repository_is_what_it_was_written_by(self, grouped: Served, repository: Path) -> None:
        assert find_changes(repository_files(written_plan(repository)), repository).changes == []
        part = make_plan(grouped.checkpoint, [range(1, 3)], blocks=range(1, 3), ends=False, span=True)
        write_repository(part, repository, force=True)
        assert find_changes(repository_files(written_plan(repository)), repository).changes == []

    def test_checkpoint_and_repository_that_can_be_served(self, grouped: Served, repository: Path) -> None:
        for argument in (repository, grouped.checkpoint):
            status, lines = doctor(argument, "--dtype=float32")
            assert (status, problems(lines)) == (0, [])
            assert any(f"model: {argument}: llama, 4 of 4 blocks in float32" in line for line in lines)
            assert any(line.startswith("ok      room for the model: cpu: blocks 0:4, ") for line in lines)

    def test_edits_by_hand_are_told(self, repository: Path) -> None:
        file = repository / "head" / "config.pbtxt"
        file.write_text(file.read_text() + "# mine\n")
        assert "ok      repository: edited by hand: head/config.pbtxt" in doctor(repository)[1]

    def test_damaged_weights(self, repository: Path) -> None:
        file = next(repository.parent.glob("checkpoint/*.safetensors"))
        file.write_bytes(file.read_bytes()[:100])
        status, lines = doctor(repository)
        assert status == 1
        assert f"{file}: cannot be read" in problems(lines)[0]

    def test_damaged_repository(self, repository: Path) -> None:
        (repository / "sessions" / "config.pbtxt").write_text("nonsense")
        assert "write one with `corolla init`" in problems(doctor(repository)[1])[0]

    def test_no_model_at_all(self) -> None:
        assert problems(doctor("/nowhere")[1])[0].startswith("model: checkpoint: no folder '/nowhere'; give ")

    def test_no_room(self, grouped: Served) -> None:
        status, lines = doctor(grouped.checkpoint, "--attn-cache-tokens", 2**30)
        assert status == 1
        assert problems(lines)[0].startswith("room for the model: ")


def test_registry_and_reachability(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'peers.db'}"
    lines = doctor("--registry", url)[1]
    assert f"ok      registry: {url}: 0 servers of 0 models" in lines
    assert "ok      reachability: not checked with --grpc-port 0" in lines
    listed = problems(doctor("--registry", "etcd://127.0.0.1:1", "--grpc-port", free_port(), "--host", "127.0.0.1")[1])
    assert [line.partition(":")[0] for line in listed] == ["registry"]
    assert "give its URL with --registry" in listed[0]


def test_reachability_is_asked_of_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def ask(announced: Address, peers: list[str], listener: HealthListener | None) -> Verdict:
        asked.append((str(announced), peers, listener is not None))
        return Verdict(False, "nobody answered", "open the port")

    monkeypatch.setattr(model_checks, "ask_peers", ask)
    port = free_port()
    arguments = ["--peer=a:1", "--peer=b:2", f"--grpc-port={port}", "--announce-address=203.0.113.5"]
    assert problems(doctor(*arguments)[1]) == ["reachability: nobody answered; open the port"]
    assert asked == [(f"203.0.113.5:{port}", ["a:1", "b:2"], True)]
    assert "--announce-address: '0.0.0.0'" in problems(doctor(*arguments, "--announce-address=0.0.0.0")[1])[0]


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
