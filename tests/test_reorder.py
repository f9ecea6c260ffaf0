"""Beam search on the shared cache: rows take over each other's caches."""

import random
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch

from conftest import Served
from corolla.errors import InvalidValueError
from corolla.kv.steps import PositionError

TOLERANCE = 1e-4
"""Between a step and a plain forward of the same tokens, float32."""

VOCABULARY = 300


class Beams:
    """Three rows that are reordered and stepped; each step is compared with a plain forward of the row's tokens."""

    def __init__(self, served: Served, prompt_length: int = 24) -> None:
        self._server = served.server
        self._random = random.Random(0)
        prompt = [self._random.randrange(VOCABULARY) for _ in range(prompt_length)]
        self.tokens = [list(prompt) for _ in range(3)]
        self.ids = [self._server.open(120) for _ in range(3)]
        self._server.run_chain(self._embed(self.tokens), self.ids, [0, 0, 0])

    def close(self) -> None:
        for session_id in self.ids:
            self._server.table.close(session_id)

    def step(
        self,
        sources: list[int],
        way: str,
        repetitions: int = 1,
        before: Callable[[int], None] = lambda repetition: None,
    ) -> None:
        start = len(self.tokens[0])
        new = [[self._random.randrange(VOCABULARY)] for _ in self.ids]
        run = self._server.run_chain if way == "chain" else self._server.run_ranges
        for repetition in range(repetitions):
            before(repetition)
            with suppress(ZeroDivisionError):
                output = run(self._embed(new), self.ids, [start] * 3, sources)
        self.tokens = [[*self.tokens[source], *token] for source, token in zip(sources, new, strict=True)]
        expected = self._server.run_chain(self._embed(self.tokens))[:, -1:]
        torch.testing.assert_close(output, expected, atol=TOLERANCE, rtol=0)

    def _embed(self, tokens: list[list[int]]) -> torch.Tensor:
        return self._server.embedding(torch.tensor(tokens))


@pytest.fixture
def beams(grouped: Served):
    beams = Beams(grouped)
    yield beams
    beams.close()


def test_reordered_rows_continue_their_sources_in_any_process(beams: Beams) -> None:
    chosen = random.Random(1)
    for _ in range(40):
        beams.step([chosen.randrange(3) for _ in range(3)], chosen.choice(("chain", "ranges")))


def test_repeated_reordering_step_is_not_applied_twice(beams: Beams) -> None:
    beams.step([1, 0, 2], "chain")
    for sources in ([1, 0, 2], [2, 2, 0], [1, 2, 0]):
        beams.step(sources, "chain", repetitions=3)


def test_repeated_reordering_that_was_cut_off_is_not_applied_twice(
    grouped: Served, beams: Beams, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(repetition: int) -> None:
        if repetition == 1:
            monkeypatch.setattr(grouped.server.chain.blocks, "step", lambda *_: 1 / 0)
        elif repetition == 2:
            monkeypatch.undo()

    beams.step([1, 0, 2], "chain")
    beams.step([1, 0, 2], "chain", repetitions=3, before=cut_off)


def test_pages_that_rows_have_in_common_are_not_copied_again(grouped: Served, beams: Beams) -> None:
    reorderer = grouped.server.chain.reorderer
    beams.step([0, 0, 0], "chain")
    before = reorderer.copied_pages
    for _ in range(20):
        beams.step([2, 0, 0], "chain")
    assert reorderer.copied_pages - before <= 20 * 3 * 2  # the last page, and the one before where it was just begun


def test_sources_outside_the_request_are_refused(grouped: Served, beams: Beams) -> None:
    hidden = torch.zeros(3, 1, grouped.case.model_config().hidden_size)
    with pytest.raises(InvalidValueError, match="hypo_ids: 3 is not allowed; allowed: 0 to 2"):
        grouped.server.run_chain(hidden, beams.ids, [24, 24, 24], [0, 1, 3])


def test_start_beyond_what_the_source_has_is_refused(grouped: Served, beams: Beams) -> None:
    short = grouped.server.open(64)
    hidden = torch.zeros(2, 1, grouped.case.model_config().hidden_size)
    with pytest.raises(PositionError, match="start_position: 24 is not allowed; allowed: 0 to 0"):
        grouped.server.run_chain(hidden, [beams.ids[0], short], [24, 24], [1, 0])
    grouped.server.table.close(short)
