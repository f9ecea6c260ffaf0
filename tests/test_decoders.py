"""Compiled decoders compute what transformers computes, whatever the number of rows, and count what they run.

Tolerance as in test_exactness: 1e-4 absolute on logits, float32.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from checkpoints import CASES, Case, random_prompt
from conftest import Served, serve_locally
from corolla.errors import CorollaError, InvalidValueError
from corolla.model.attention import PagedRows
from corolla.model.batch_sizes import default_batch_sizes, parse_batch_sizes, preferred_batch_sizes, size_for
from corolla.model.decoders import EagerChain
from corolla.model.graphs import GraphedChain
from corolla.serving.blocks import BlocksRequest
from local_server import run

ABSOLUTE = 1e-4
SIZES = (4, 1)
COMPILED_CASES = [case for case in CASES if case.name.startswith(("multi-query", "biases"))]
"""Multi-query and grouped attention, odd sizes, biases, tied and untied."""


@pytest.fixture(scope="module", params=COMPILED_CASES, ids=lambda case: case.name)
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, suite_cache: Path
) -> Iterator[Served]:
    case: Case = request.param
    options = {"decoder": "compiled", "max_batch_size": SIZES[0], "decoder_batch_sizes": SIZES}
    served = serve_locally(case, tmp_path_factory.mktemp(case.name), suite_cache, **options)
    yield served
    assert served.server.table.status().open_sessions == 0


def step_all(served: Served, prompts: list[list[int]], chunks: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of steps of all prompts at once, and of transformers."""
    server = served.server
    input_ids = torch.tensor(prompts)
    hidden_states, start, outputs = server.embedding(input_ids), 0, []
    ids = [server.open(input_ids.shape[1]) for _ in prompts]
    for chunk in chunks:
        requests = [
            BlocksRequest(row[None, start : start + chunk], [session_id], [start])
            for row, session_id in zip(hidden_states, ids, strict=True)
        ]
        outputs.append(torch.cat(server.chain.run(requests)))  # type: ignore[arg-type]
        start += chunk
    for session_id in ids:
        server.table.close(session_id)
    return server.head(torch.cat(outputs, dim=1)), served.reference.logits(input_ids)


def test_parts_of_the_blocks_after_each_other_equal_all_of_them(compiled: Served) -> None:
    """Single rows and a prompt, on the programs of all blocks; their rows are counted together."""
    server = compiled.server
    count = len(server.chain.blocks.blocks)
    parts = [server.chain.part(range(0, 1)), server.chain.part(range(1, count))]
    hidden_states = server.embedding(torch.tensor([random_prompt(12, seed=5)]))
    whole, in_parts = server.open(12), server.open(12)
    assert server.chain.decoders is not None
    before = server.chain.decoders.rows.total()
    for start, stop in ((0, 1), (1, 2), (2, 5), (5, 12)):
        expected = server.run_chain(hidden_states[:, start:stop], [whole], [start])
        output = hidden_states[:, start:stop]
        for part in parts:
            output = run(part, output, [in_parts], [start])
        assert torch.equal(output, expected)
    assert server.chain.decoders.rows.total() == before + 3 * (1 + 1 + 3)  # 7 positions run on the program for any
    for session_id in (whole, in_parts):
        server.table.close(session_id)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 9])
def test_any_number_of_rows_equals_the_whole(compiled: Served, rows: int) -> None:
    prompts = [random_prompt(22, seed) for seed in range(rows)]
    got, expected = step_all(compiled, prompts, [1, 1, 3, 12, *[1] * 5])
    torch.testing.assert_close(got, expected, rtol=0, atol=ABSOLUTE)


def test_short_steps_of_different_lengths_and_positions_share_a_decoder(compiled: Served) -> None:
    server = compiled.server
    prompts = [torch.tensor([random_prompt(12, seed)]) for seed in range(3)]
    hidden = [server.embedding(prompt) for prompt in prompts]
    ids = [server.open(12) for _ in prompts]
    try:
        for index in (1, 2):
            server.run_chain(hidden[index][:, : 4 * index], [ids[index]], [0])
        decoders = server.chain.decoders
        assert decoders is not None
        before = decoders.rows[4]
        lengths, starts = [1, 2, 1], [0, 4, 8]
        parts = zip(hidden, ids, starts, lengths, strict=True)
        outputs = server.chain.run([BlocksRequest(h[:, s : s + n], [i], [s]) for h, i, s, n in parts])
        assert decoders.rows[4] == before + 4
        for prompt, output, start, length in zip(prompts, outputs, starts, lengths, strict=True):
            assert isinstance(output, torch.Tensor)
            expected = compiled.reference.logits(prompt)[:, start : start + length]
            torch.testing.assert_close(server.head(output), expected, rtol=0, atol=ABSOLUTE)
    finally:
        for session_id in ids:
            server.table.close(session_id)


def test_a_bad_row_fails_alone(compiled: Served) -> None:
    server = compiled.server
    hidden = server.embedding(torch.tensor([[5]]))
    good = server.open(4)
    try:
        results = server.chain.run(
            [
                BlocksRequest(hidden, [good], [0]),
                BlocksRequest(hidden, ["nobody"], [0]),
                BlocksRequest(hidden, [good], [3]),
            ]
        )
    finally:
        server.table.close(good)
    assert isinstance(results[0], torch.Tensor)
    assert isinstance(results[1], CorollaError)
    assert isinstance(results[2], InvalidValueError)


def test_rows_and_padding_are_counted_per_size(compiled: Served) -> None:
    decoders = compiled.server.chain.decoders
    assert decoders is not None
    decoders.rows.clear()
    decoders.padding.clear()
    for rows in (1, 3, 6):
        step_all(compiled, [random_prompt(1, seed) for seed in range(rows)], [1])
    assert dict(decoders.rows) == {1: 1, 4: 3 + 4 + 2}
    assert dict(decoders.padding) == {1: 0, 4: 1 + 0 + 2}


def test_programs_are_compiled_once_for_all_blocks_ranges_and_starts(
    compiled: Served, suite_cache: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("compiled again")

    stored = set(suite_cache.glob("programs/*"))
    monkeypatch.setattr("corolla.model.programs._compile", refuse)
    options = {"decoder": "compiled", "max_batch_size": SIZES[0], "decoder_batch_sizes": SIZES}
    serve_locally(compiled.case, tmp_path_factory.mktemp("again"), suite_cache, **options)
    assert set(suite_cache.glob("programs/*")) == stored


def test_graphs_replay_on_their_own_memory(compiled: Served) -> None:
    """The logic of the CUDA path, with a capture that runs the step again at each replay."""
    server = compiled.server
    decoders = server.chain.decoders
    assert decoders is not None

    def capture(function):  # type: ignore[no-untyped-def]
        output = function()
        return lambda: output.copy_(function()), output

    chain = GraphedChain(EagerChain(server.chain.blocks, server.chain.arena), capture)
    hidden = server.embedding(torch.tensor([random_prompt(2, 1)])).transpose(0, 1)
    for step in range(3):
        pages = torch.tensor([[1, 4, 5], [2, 7, 3]], dtype=torch.int32)
        rows = PagedRows(pages, torch.full((2,), step))
        cosines, sines = server.chain.blocks.rotary(rows.positions[:, None])
        with torch.inference_mode():
            graphed = chain(hidden + step, cosines, sines, rows)
        torch.testing.assert_close(graphed, decoders.step(hidden + step, rows), rtol=0, atol=ABSOLUTE)


@pytest.mark.parametrize(
    ("text", "maximum", "sizes"), [("8,4,1", 8, (8, 4, 1)), ("1, 4", 8, (8, 4, 1)), ("4,4", 4, (4,)), ("2", 3, (3, 2))]
)
def test_sizes_are_sorted_and_the_maximum_is_added(
    text: str, maximum: int, sizes: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    assert parse_batch_sizes(text, maximum) == sizes
    assert ("added max_batch_size" in caplog.text) == (str(maximum) not in text)


@pytest.mark.parametrize("text", ["", "0", "9", "-1", "4,,1", "4;1", "two", "1.5"])
def test_bad_sizes_are_refused(text: str) -> None:
    with pytest.raises(InvalidValueError, match=r"decoder_batch_sizes.*whole numbers from 1 to max_batch_size 8"):
        parse_batch_sizes(text, 8)


def test_the_smallest_size_that_holds_the_rows_is_taken() -> None:
    assert [size_for(rows, (8, 4, 1)) for rows in (1, 2, 3, 4, 5, 7, 8)] == [1, 4, 4, 4, 8, 8, 8]
    assert default_batch_sizes(8) == (8, 4, 1)
    assert default_batch_sizes(1) == (1,)
    assert default_batch_sizes(20) == (20, 16, 8, 4, 1)
    assert preferred_batch_sizes((8, 4, 1)) == [4, 8]
