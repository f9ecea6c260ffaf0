"""Blocks in shards give what whole ones give; sharded models can be cut as they are asked to be."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import CASES, Case
from corolla.errors import InvalidValueError
from corolla.model.family import supported_families
from corolla.model.shape import ModelShape
from corolla.model.sharding import Shard, check_shards
from tensor_parallel_cases import CASES_OF_SHARDS

TOLERANCE = 1e-5
"""Of hidden states up to 13: sums of a layer are added up in another order."""


@pytest.fixture(scope="module")
def differences(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What the ranks found, by the number of shards and the checkpoint."""
    folder = tmp_path_factory.mktemp("shards")
    for case in CASES_OF_SHARDS:
        case.write(folder / "checkpoints" / case.name)
    script = Path(__file__).parent / "tensor_parallel_ranks.py"
    subprocess.run([sys.executable, script, folder], check=True, timeout=200)
    return {count: json.loads((folder / f"{count}.json").read_text()) for count in (2, 4)}


def test_every_family_is_tested() -> None:
    assert {case.model_type for case in CASES_OF_SHARDS} == set(supported_families())


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("case", CASES_OF_SHARDS, ids=lambda case: case.name)
def test_shards_together_give_what_whole_blocks_give(
    differences: dict[int, dict[str, Any]], case: Case, count: int
) -> None:
    found = differences[count][case.name]
    assert found["forward"] <= TOLERANCE
    assert found["steps"] <= TOLERANCE
    kv_heads = ModelShape.of(case.model_config()).kv_heads
    assert found["kv_heads"] == [max(1, kv_heads // count), kv_heads], "a shard holds its own heads only"


@pytest.mark.parametrize(
    ("config", "count", "message"),
    [
        (CASES[0].config, 3, r"3 is not allowed; allowed: 1, 2, as the 8 attention heads"),
        (CASES[0].config | {"intermediate_size": 152}, 16, r"16 is not allowed; allowed: 1, 2, 4, 8, as the 8 attent"),
        (CASES[0].config, 4, r"4 is not allowed; allowed: 1, 2, as the 150 inputs of mlp.down_proj"),
        (CASES[3].config, 2, r"2 is not allowed; allowed: 1, 3, 6, as the 3 key-value heads"),
        (CASES[0].config, 0, r"0 is not allowed"),
    ],
)
def test_number_of_shards_that_does_not_fit_is_refused(config: dict[str, Any], count: int, message: str) -> None:
    with pytest.raises(InvalidValueError, match=f"tensor_parallel: {message}"):
        check_shards(replace(CASES[0], config=config).model_config(), count)


def test_shards_are_disjoint_and_complete() -> None:
    tensor = torch.arange(24).view(4, 6)
    for count in (1, 2):
        assert torch.equal(torch.cat([Shard(rank, count).of(tensor, 1) for rank in range(count)], dim=1), tensor)
