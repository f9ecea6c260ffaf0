"""Servers that host a part of the blocks, one after the other, compute what one with all blocks does."""

from pathlib import Path

import pytest
import torch

from checkpoints import GROUPED, random_prompt
from conftest import Served
from corolla.kv.steps import PositionError
from local_server import LocalServer, make_plan


@pytest.fixture(scope="module")
def parts(grouped: Served, tmp_path_factory: pytest.TempPathFactory, suite_cache: Path) -> list[LocalServer]:
    """Servers of the blocks 0 and 1, and 2 and 3, the second one in ranges of one block."""
    plans = [
        make_plan(grouped.checkpoint, ranges, blocks=blocks, ends=False, attn_cache_tokens=256)
        for blocks, ranges in ((range(0, 2), [range(0, 2)]), (range(2, 4), [range(2, 3), range(3, 4)]))
    ]
    return [LocalServer(plan, tmp_path_factory.mktemp("part"), suite_cache) for plan in plans]


def test_parts_after_each_other_give_exactly_the_whole(grouped: Served, parts: list[LocalServer]) -> None:
    hidden_states = grouped.server.embedding(torch.tensor([random_prompt(30, seed=3)]))
    session = grouped.server.open(30)
    own = [part.open(30) for part in parts]
    for start, stop in ((0, 20), (20, 21), (11, 12), (12, 17)):  # a prompt, a token, one taken back, a few more
        chunk = hidden_states[:, start:stop]
        expected = grouped.server.run_chain(chunk, [session], [start])
        through_chains, through_ranges = chunk, chunk
        for part, part_session in zip(parts, own, strict=True):
            through_ranges = part.run_ranges(through_ranges, [part_session], [start])
        for part, part_session in zip(parts, own, strict=True):
            through_chains = part.run_chain(through_chains, [part_session], [start])
        assert torch.equal(through_chains, expected)
        assert torch.equal(through_ranges, expected)
    for server, server_session in zip((grouped.server, *parts), (session, *own), strict=True):
        assert server.table.sessions()[-1].length == 17
        server.table.close(server_session)


def test_a_part_keeps_only_the_cache_of_its_blocks(parts: list[LocalServer]) -> None:
    files = [sorted(file.name for file in (part.run_directory / "kv").iterdir()) for part in parts]
    assert files == [["block_000", "block_001"], ["block_002", "block_003"]]


def test_a_gap_in_a_part_is_an_error(grouped: Served, parts: list[LocalServer]) -> None:
    hidden_states = torch.zeros(1, 1, GROUPED.model_config().hidden_size)
    session = parts[1].open(8)
    with pytest.raises(PositionError, match="start_position: 1 is not allowed; allowed: 0 to 0"):
        parts[1].run_chain(hidden_states, [session], [1])
    parts[1].table.close(session)
