"""Steps with sessions compute what one pass over the whole sequence computes, whoever takes them.

Tolerance as in test_exactness: 1e-4 absolute on logits, float32.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, pairwise

import pytest
import torch

from checkpoints import random_prompt
from conftest import Served
from corolla.errors import InvalidValueError
from corolla.kv.steps import PositionError
from corolla.kv.table import UnknownSessionError
from corolla.serving.blocks import BlocksRequest

ABSOLUTE = 1e-4


@contextmanager
def sessions(served: Served, *max_lengths: int) -> Iterator[list[str]]:
    """Sessions that are closed at the end."""
    opened = [served.server.open(length) for length in max_lengths]
    try:
        yield opened
    finally:
        for session_id in opened:
            served.server.table.close(session_id)


def hidden_of(served: Served, length: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Embedded random tokens [1, T, H] and the logits [1, T, V] that transformers gives for them."""
    input_ids = torch.tensor([random_prompt(length, seed)])
    return served.server.embedding(input_ids), served.reference.logits(input_ids)


def assert_logits(served: Served, hidden_states: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(served.server.head(hidden_states), expected, rtol=0, atol=ABSOLUTE)


@pytest.mark.parametrize("chunks", [[60], [1] * 40, [17, 1, 1, 30, 2, 16, 1], [15, 1, 1, 15, 32, 3]], ids=str)
@pytest.mark.parametrize("way", ["chain", "ranges", "alternating"])
def test_steps_of_any_sizes_equal_the_whole(served: Served, chunks: list[int], way: str) -> None:
    server = served.server
    runs = {"chain": [server.run_chain], "ranges": [server.run_ranges],
            "alternating": [server.run_chain, server.run_ranges]}[way]  # fmt: skip
    hidden_states, expected = hidden_of(served, sum(chunks))
    outputs, start = [], 0
    with sessions(served, sum(chunks)) as ids:
        for chunk, run in zip(chunks, cycle(runs), strict=False):
            outputs.append(run(hidden_states[:, start : start + chunk], ids, [start]))
            start += chunk
    assert_logits(served, torch.cat(outputs, dim=1), expected)


def test_steps_without_a_position_go_on_where_the_session_is(served: Served) -> None:
    hidden_states, expected = hidden_of(served, 20)
    with sessions(served, 20) as ids:
        outputs = [served.server.run_ranges(part, ids) for part in hidden_states.split([7, 1, 12], dim=1)]
    assert_logits(served, torch.cat(outputs, dim=1), expected)


@pytest.mark.parametrize("new_tokens", [1, 5])
def test_rows_of_a_batch_stand_at_different_positions(served: Served, new_tokens: int) -> None:
    starts = [0, 1, 16, 47, 100]
    rows = [hidden_of(served, start + new_tokens, seed) for seed, start in enumerate(starts)]
    with sessions(served, *(start + new_tokens for start in starts)) as ids:
        for session_id, start, (hidden_states, _) in zip(ids, starts, rows, strict=True):
            if start:
                served.server.run_chain(hidden_states[:, :start], [session_id], [0])
        last = torch.cat([hidden_states[:, -new_tokens:] for hidden_states, _ in rows])
        outputs = served.server.run_ranges(last, ids, starts)
    for output, (_, expected) in zip(outputs, rows, strict=True):
        assert_logits(served, output[None], expected[:, -new_tokens:])


def test_requests_of_many_clients_in_one_batch_do_not_touch_each_other(served: Served) -> None:
    """Different lengths, with and without sessions, two steps of one session, and one that is wrong."""
    a, expected_a = hidden_of(served, 12, seed=1)
    b, expected_b = hidden_of(served, 9, seed=2)
    with sessions(served, 12, 9) as (first, second):
        results = served.server.chain.run(
            [
                BlocksRequest(a[:, :8], [first], [0]),
                BlocksRequest(b),
                BlocksRequest(a[:, 8:], [first], [8]),
                BlocksRequest(b[:, :4], [second], [4]),
                BlocksRequest(b, [second], [0]),
                BlocksRequest(b[:, :4], ["nobody"], [0]),
            ]
        )
    outputs = [result for result in results if isinstance(result, torch.Tensor)]
    assert [type(result) for result in results if isinstance(result, Exception)] == [PositionError, UnknownSessionError]
    assert_logits(served, torch.cat([outputs[0], outputs[2]], dim=1), expected_a)
    assert_logits(served, outputs[1], expected_b)
    assert_logits(served, outputs[3], expected_b)


def test_repeated_step_changes_nothing(grouped: Served) -> None:
    hidden_states, expected = hidden_of(grouped, 30)
    with sessions(grouped, 30) as ids:
        grouped.server.run_chain(hidden_states[:, :20], ids, [0])
        first = grouped.server.run_chain(hidden_states[:, 20:25], ids, [20])
        again = grouped.server.run_ranges(hidden_states[:, 20:25], ids, [20])
        rest = grouped.server.run_chain(hidden_states[:, 25:], ids, [25])
    assert_logits(grouped, torch.cat([first, rest], dim=1), expected[:, 20:])
    torch.testing.assert_close(again, first, rtol=0, atol=ABSOLUTE)


def test_start_before_the_cached_length_rolls_back(grouped: Served) -> None:
    (kept, _), (other, _) = hidden_of(grouped, 30, seed=1), hidden_of(grouped, 30, seed=2)
    mixed_ids = random_prompt(30, 1)[:11] + random_prompt(30, 2)[11:]
    with sessions(grouped, 30) as ids:
        grouped.server.run_chain(kept, ids, [0])
        output = grouped.server.run_ranges(other[:, 11:], ids, [11])
        assert grouped.server.table.sessions()[-1].length == 30
    assert_logits(grouped, output, grouped.reference.logits(torch.tensor([mixed_ids]))[:, 11:])


def test_rollback_is_a_rollback_for_every_range(grouped: Served) -> None:
    """After a step at 5, nobody may go on at 20, where the chain once was."""
    hidden_states, _ = hidden_of(grouped, 30)
    with sessions(grouped, 30) as ids:
        grouped.server.run_chain(hidden_states[:, :20], ids, [0])
        grouped.server.run_chain(hidden_states[:, 5:6], ids, [5])
        for run in (grouped.server.run_chain, grouped.server.run_ranges):
            with pytest.raises(PositionError, match="start_position: 20 is not allowed; allowed: 0 to 6"):
                run(hidden_states[:, 20:21], ids, [20])


def test_ranges_that_lag_behind_the_first_are_noticed(grouped: Served) -> None:
    """As when a process died between two ranges: the first has the step, the next one lacks it."""
    hidden_states, expected = hidden_of(grouped, 10)
    with sessions(grouped, 10) as ids:
        grouped.server.run_ranges(hidden_states[:, :4], ids, [0])
        served_first_only = grouped.server.ranges[0].run([BlocksRequest(hidden_states[:, 4:6], ids, [4])])
        assert isinstance(served_first_only[0], torch.Tensor)
        with pytest.raises(PositionError, match="0 to 4, "):
            grouped.server.run_chain(hidden_states[:, 6:], ids, [6])
        output = grouped.server.run_chain(hidden_states[:, 4:], ids, [4])
    assert_logits(grouped, output, expected[:, 4:])


@pytest.mark.parametrize(
    ("start", "length", "allowed"),
    [(-1, 1, "0 to"), (6, 1, "0 to 5"), (5, 6, "max_length 10"), (11, 1, "max_length 10"), (0, 11, "max_length 10")],
)
def test_positions_outside_the_session_are_refused_and_nothing_changes(
    grouped: Served, start: int, length: int, allowed: str
) -> None:
    hidden_states, expected = hidden_of(grouped, 20)
    with sessions(grouped, 10) as ids:
        grouped.server.run_chain(hidden_states[:, :5], ids, [0])
        with pytest.raises(PositionError, match=f"start_position: {start} is not allowed; allowed: .*{allowed}"):
            grouped.server.run_chain(hidden_states[:, :length], ids, [start])
        output = grouped.server.run_chain(hidden_states[:, 5:10], ids, [5])
    assert_logits(grouped, output, expected[:, 5:10])


def test_one_wrong_row_refuses_its_whole_request_before_any_row_ran(grouped: Served) -> None:
    hidden_states, _ = hidden_of(grouped, 8)
    with sessions(grouped, 8, 8) as ids:
        with pytest.raises(PositionError):
            grouped.server.run_chain(torch.cat([hidden_states, hidden_states]), ids, [0, 3])
        assert [grouped.server.chain.steps.length(session_id) for session_id in ids] == [0, 0]


def test_session_twice_in_a_request_is_refused(grouped: Served) -> None:
    hidden_states, _ = hidden_of(grouped, 4)
    with sessions(grouped, 8) as (session_id,), pytest.raises(InvalidValueError, match="each session once in a batch"):
        grouped.server.run_chain(torch.cat([hidden_states, hidden_states]), [session_id, session_id], [0, 4])


def test_start_position_without_session_is_refused(grouped: Served) -> None:
    with pytest.raises(InvalidValueError, match=r"start_position: .* only together with session_id"):
        grouped.server.run_chain(hidden_of(grouped, 4)[0], None, [0])


def test_empty_sequence_is_refused_without_a_session_and_a_no_op_with_one(grouped: Served) -> None:
    hidden_states, expected = hidden_of(grouped, 4)
    with pytest.raises(InvalidValueError, match="a sequence of 0 positions"):
        grouped.server.run_chain(hidden_states[:, :0])
    with sessions(grouped, 4) as ids:
        grouped.server.run_chain(hidden_states[:, :3], ids, [0])
        assert grouped.server.run_chain(hidden_states[:, :0], ids, [3]).shape == hidden_states[:, :0].shape
        assert_logits(grouped, grouped.server.run_chain(hidden_states[:, 3:], ids, [3]), expected[:, 3:])


def test_closed_session_is_unknown_to_every_process(grouped: Served) -> None:
    hidden_states, _ = hidden_of(grouped, 4)
    with sessions(grouped, 8) as ids:
        grouped.server.run_chain(hidden_states, ids, [0])
        grouped.server.run_ranges(hidden_states, ids, [4])
    for run in (grouped.server.run_chain, grouped.server.run_ranges):
        with pytest.raises(UnknownSessionError, match="open a new session"):
            run(hidden_states, ids, [0])


def test_rows_never_read_slots_of_other_sessions(grouped: Served) -> None:
    """Every slot of the arena that is not the rows' own is poisoned; NaN would spread to any output that saw it."""
    server = grouped.server
    starts = [3, 0, 40]
    rows = [hidden_of(grouped, start + 4, seed) for seed, start in enumerate(starts)]
    hole = server.open(16)
    with sessions(grouped, 16, 48) as (first, long):
        server.table.close(hole)
        with sessions(grouped, 1, 33) as (_, scattered):
            ids = [first, scattered, long]
            for session_id, start, (hidden_states, _) in zip(ids, starts, rows, strict=True):
                if start:
                    server.run_chain(hidden_states[:, :start], [session_id], [0])
            poison_all_but(grouped, ids)
            new = torch.cat([hidden_states[:, -4:] for hidden_states, _ in rows])
            together = server.run_chain(new, ids, starts)
            alone = [server.run_ranges(new[i : i + 1], [ids[i]], [starts[i]]) for i in range(3)]
    for output, single, (_, expected) in zip(together, alone, rows, strict=True):
        assert_logits(grouped, output[None], expected[:, -4:])
        assert_logits(grouped, single, expected[:, -4:])


def poison_all_but(served: Served, ids: list[str]) -> None:
    """NaN in every slot that does not belong to these sessions, in all blocks."""
    own = torch.cat([torch.as_tensor(served.server.table.find(session_id).slots) for session_id in ids])
    for block in range(served.case.blocks):
        cache = served.server.chain.arena[block]
        for slots in (cache.keys, cache.values):
            saved = slots[own].clone()
            slots.fill_(torch.nan)
            slots[own] = saved


def test_slots_full_of_nan_are_harmless_to_the_next_session(grouped: Served) -> None:
    hidden_states, expected = hidden_of(grouped, 12)
    with sessions(grouped, 16) as ids:
        grouped.server.run_chain(torch.full_like(hidden_states, torch.nan), ids, [0])
    with sessions(grouped, 16) as ids:
        outputs = [grouped.server.run_chain(part, ids) for part in hidden_states.split(3, dim=1)]
    assert_logits(grouped, torch.cat(outputs, dim=1), expected)


def test_fragmented_pages_change_nothing(grouped: Served) -> None:
    server = grouped.server
    hidden_states, expected = hidden_of(grouped, 100)
    total = server.table.layout.pages
    small = [server.open(1) for _ in range(total)]
    for session_id in small[::2]:
        server.table.close(session_id)
    with sessions(grouped, 100) as ids:
        slots = server.table.find(ids[0]).slots
        assert any(after - before > 1 for before, after in pairwise(slots.tolist()))
        outputs = [server.run_chain(part, ids) for part in hidden_states.split([50, 1, 49], dim=1)]
    for session_id in small[1::2]:
        server.table.close(session_id)
    assert_logits(grouped, torch.cat(outputs, dim=1), expected)
