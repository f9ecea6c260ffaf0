"""How many blocks a server of a checkpoint hosts when nobody says it."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from checkpoints import GROUPED
from corolla.cli.own_blocks import blocks_that_fit
from corolla.planning import repository
from corolla.planning.machine import DeviceMemory
from corolla.planning.plan import PlanError
from corolla.repository.choices import Choices


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    GROUPED.write(tmp_path / "checkpoint")
    return str(tmp_path / "checkpoint")


def choices(registry: str = "sqlite:///registry.sqlite", **more: Any) -> dict[str, Any]:
    """Of a server whose cache takes 256 MiB per block and more."""
    return asdict(Choices(registry=registry, attn_cache_tokens=2**21, **more))


def give_memory(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    memory = DeviceMemory("cpu", free, free, "as the test says")
    monkeypatch.setattr(repository, "device_memories", lambda device: (memory,))
    monkeypatch.setattr(repository, "shared_memory_free", lambda: 2**40)


def test_a_server_hosts_as_many_blocks_as_fit(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fitting = []
    for free in range(2**30, 2**33, 2**27):
        give_memory(monkeypatch, free)
        try:
            fitting.append(blocks_that_fit(checkpoint, None, choices()))
        except PlanError:
            assert not fitting, "more memory never holds less"
    assert fitting[-1] is None, "all fit"
    parts = fitting[: fitting.index(None)]
    assert parts == sorted(parts)
    assert set(parts) == set(range(1, GROUPED.blocks))


@pytest.mark.parametrize("said", [{"blocks": "0:2"}, {"ranges": "0:2"}, {"range_size": 1}, {"registry": ""}])
def test_what_is_said_holds(checkpoint: str, said: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    give_memory(monkeypatch, 0)
    assert blocks_that_fit(checkpoint, None, choices(**said)) is None
    assert blocks_that_fit(checkpoint, Path("out"), choices()) is None
