"""The generate loop with a model of uniform logits: who steps with whom, and who leaves when."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import Queue
from threading import Semaphore
from typing import cast

import pytest
import torch

from corolla.generate.loop import GenerateLoop, LoopLimits
from corolla.generate.request import GenerationRequest
from corolla.generate.sampling import Prediction, TokenChooser
from corolla.generate.sequence import Finished, Sequence
from corolla.generate.text import TextStream
from local_server import CollectingOutput
from waiting import wait_until

VOCABULARY = 300


class CountingChooser:
    """The token at position p is p, whatever the logits, which must be uniform."""

    end_tokens = frozenset({VOCABULARY - 1})

    def __init__(self) -> None:
        self.error: Exception | None = None

    def choose(self, token_ids: list[int], prediction: Prediction) -> int:
        assert prediction.logits.tolist() == [0.0] * VOCABULARY
        if self.error is not None:
            raise self.error
        return len(token_ids)


class NumberText:
    """Tokens as numbers."""

    stopped = False

    def push(self, token_id: int) -> str:
        return f"{token_id} "

    def flush(self) -> str:
        return ""


def sequence(name: str, prompt: int = 1, max_tokens: int = 3) -> Sequence:
    """A generation whose session is its name, after a prompt of `prompt` tokens."""
    return Sequence(
        request=GenerationRequest(name, echo=False),
        prompt_ids=list(range(prompt)),
        max_tokens=max_tokens,
        chooser=cast(TokenChooser, CountingChooser()),
        text=cast(TextStream, NumberText()),
        output=CollectingOutput(),
        session_id=name,
    )


def output_of(generation: Sequence) -> CollectingOutput:
    return cast(CollectingOutput, generation.output)


def expected_text(generation: Sequence) -> str:
    first = len(generation.prompt_ids)
    return "".join(f"{position} " for position in range(first, first + generation.max_tokens))


@dataclass
class GatedModel:
    """Uniform logits; each step waits for the test's permit and tells who takes part."""

    permits: Semaphore = field(default_factory=lambda: Semaphore(0))
    steps: Queue[list[str]] = field(default_factory=Queue)
    fail: Callable[[str], Exception | None] = lambda _: None
    settle: Callable[[], None] = lambda: None

    def step(self, sequences: list[Sequence]) -> list[Prediction | Exception]:
        names = [s.request.text_input for s in sequences]
        assert len({len(s.pending) == 1 for s in sequences}) == 1, "prompts do not mix with single tokens"
        assert all(s.session_id == name for s, name in zip(sequences, names, strict=True)), "has left already"
        self.steps.put(names)
        self.permits.acquire()
        return [self.fail(name) or Prediction(torch.zeros(VOCABULARY), 0) for name in names]

    def next_step(self) -> list[str]:
        """Who takes part in the step that waits now; lets it run."""
        names = self.steps.get(timeout=5)
        self.settle()
        self.permits.release()
        return names

    def waiting_step(self) -> list[str]:
        """Who takes part in the step that waits now; it goes on waiting."""
        return self.steps.get(timeout=5)

    def let_run(self) -> None:
        """No step waits any more."""
        self.permits.release(10_000)


class Harness:
    """A loop on a gated model, and who was released."""

    def __init__(self, max_batch_size: int = 8, most_prompt_tokens: int = 1, channel_capacity: int = 1) -> None:
        self.model = GatedModel()
        self.released: list[str] = []
        limits = LoopLimits(max_batch_size, most_prompt_tokens, channel_capacity)
        self.loop = GenerateLoop(self.model.step, self._release, limits)
        self.model.settle = self.settle

    def join(self, *generations: Sequence) -> None:
        for generation in generations:
            self.loop.join(generation)
        self.settle()

    def settle(self) -> None:
        """Waits until everything that can be prepared is in the channel."""
        wait_until(lambda: self.loop.preparer.settled)

    def stop(self) -> None:
        self.model.let_run()
        self.loop.stop()

    def _release(self, generation: Sequence) -> None:
        assert generation.session_id == generation.request.text_input
        self.released.append(generation.session_id)


@pytest.fixture
def harness() -> Iterator[Harness]:
    harness = Harness()
    yield harness
    harness.stop()
    assert len(harness.released) == len(set(harness.released)), "released twice"


def test_sequences_join_and_leave_between_steps(harness: Harness) -> None:
    a, b, c = sequence("a", max_tokens=4), sequence("b", max_tokens=2), sequence("c", max_tokens=2)
    harness.join(a)
    assert harness.model.waiting_step() == ["a"]
    harness.join(b)
    harness.model.permits.release()
    assert harness.model.next_step() == ["a", "b"]
    assert harness.model.waiting_step() == ["a", "b"]
    harness.join(c)
    harness.model.permits.release()
    assert harness.model.next_step() == ["a", "c"]
    assert harness.model.next_step() == ["c"]
    for generation in (a, b, c):
        assert output_of(generation).text() == expected_text(generation)
    harness.stop()
    assert harness.released == ["b", "a", "c"]


def test_newcomers_prompts_run_one_per_turn_between_steps_of_the_others(harness: Harness) -> None:
    running = sequence("running", max_tokens=20)
    harness.join(running)
    assert harness.model.waiting_step() == ["running"]
    newcomers = [sequence(f"new{i}", prompt=10 + i) for i in range(3)]
    harness.join(*newcomers)
    harness.model.permits.release()
    assert [harness.model.next_step() for _ in range(6)] == [
        ["new0"], ["running", "new0"], ["new1"], ["running", "new0", "new1"], ["new2"], ["running", "new1", "new2"],
    ]  # fmt: skip
    harness.model.let_run()
    for generation in (running, *newcomers):
        assert output_of(generation).text() == expected_text(generation)


def test_newcomers_are_served_in_the_order_of_their_arrival(harness: Harness) -> None:
    harness.join(sequence("running", max_tokens=50))
    harness.model.waiting_step()
    harness.join(*(sequence(f"new{i}", prompt=2) for i in range(5)))
    harness.model.permits.release()
    prompts: list[str] = []
    while len(prompts) < 5:
        step = harness.model.next_step()
        prompts += step if len(step) == 1 and step != ["running"] else []
    assert prompts == [f"new{i}" for i in range(5)]


def test_more_sequences_than_a_batch_holds_take_turns_of_equal_steps() -> None:
    harness = Harness(max_batch_size=2)
    everybody = [sequence(f"s{i}", max_tokens=30) for i in range(5)]
    harness.join(*everybody)
    while harness.model.next_step() != ["s4"]:
        pass
    for _ in range(3):
        turn = [harness.model.next_step() for _ in range(3)]
        assert turn == [["s0", "s1"], ["s2", "s3"], ["s4"]]
    harness.model.let_run()
    for generation in everybody:
        assert output_of(generation).text() == expected_text(generation)
    harness.stop()


@pytest.mark.parametrize("prompt", [1, 5])
def test_cancelled_sequences_leave_before_the_next_step(harness: Harness, prompt: int) -> None:
    stays, gone = sequence("stays", max_tokens=6), sequence("gone", prompt=prompt, max_tokens=6)
    harness.join(stays)
    assert harness.model.waiting_step() == ["stays"]
    harness.join(gone)
    output_of(gone).cancelled = True
    harness.model.permits.release()
    assert harness.model.next_step() == ["stays"]
    assert harness.released == ["gone"]
    harness.model.let_run()
    assert output_of(stays).text() == expected_text(stays)
    assert not output_of(gone).has_ended


def test_cancelled_in_the_middle_leaves_within_one_step(harness: Harness) -> None:
    stays, gone = sequence("stays", max_tokens=9), sequence("gone", max_tokens=9)
    harness.join(stays)
    assert harness.model.waiting_step() == ["stays"]
    harness.join(gone)
    harness.model.permits.release()
    assert harness.model.waiting_step() == ["stays", "gone"]
    output_of(gone).cancelled = True
    harness.model.permits.release()
    assert harness.model.next_step() == ["stays"]


def test_error_of_one_row_ends_that_row_only(harness: Harness) -> None:
    good, bad, new_bad = sequence("good", max_tokens=5), sequence("bad", max_tokens=5), sequence("new-bad", prompt=4)
    harness.model.fail = lambda name: ValueError(name) if "bad" in name else None
    harness.join(good, bad, new_bad)
    harness.model.let_run()
    assert output_of(good).text() == expected_text(good)
    for generation in (bad, new_bad):
        with pytest.raises(ValueError, match=generation.request.text_input):
            output_of(generation).text()
    harness.stop()
    assert sorted(harness.released) == ["bad", "good", "new-bad"]


def test_token_that_cannot_be_chosen_ends_that_row_only(harness: Harness) -> None:
    good, bad, new_bad = sequence("good", max_tokens=5), sequence("bad", max_tokens=5), sequence("new-bad", prompt=4)
    for generation in (bad, new_bad):
        cast(CountingChooser, generation.chooser).error = RuntimeError("no probabilities")
    harness.join(good, bad, new_bad)
    harness.model.let_run()
    assert output_of(good).text() == expected_text(good)
    for generation in (bad, new_bad):
        with pytest.raises(RuntimeError, match="no probabilities"):
            output_of(generation).text()


def test_step_that_fails_as_a_whole_ends_its_rows_and_the_loop_goes_on(harness: Harness) -> None:
    def burst(name: str) -> Exception | None:
        raise MemoryError(name)

    lost, later = sequence("lost", max_tokens=5), sequence("later")
    harness.model.fail = burst
    harness.join(lost)
    harness.model.permits.release()
    with pytest.raises(MemoryError):
        output_of(lost).text()
    harness.model.fail = lambda _: None
    harness.join(later)
    harness.model.let_run()
    assert output_of(later).text() == expected_text(later)


def test_session_that_cannot_be_released_does_not_stop_the_loop() -> None:
    model = GatedModel()
    model.let_run()

    def fail(_: Sequence) -> None:
        raise OSError("disk full")

    loop = GenerateLoop(model.step, fail, LoopLimits(8))
    for name in ("a", "b"):
        generation = sequence(name)
        loop.join(generation)
        assert output_of(generation).text(timeout=5) == expected_text(generation)
    loop.stop()


def test_end_token_ends_the_text_and_is_counted() -> None:
    harness = Harness()
    harness.model.let_run()
    generation = sequence("a", prompt=VOCABULARY - 3, max_tokens=10)
    harness.join(generation)
    output = output_of(generation)
    assert output.text() == f"{VOCABULARY - 3} {VOCABULARY - 2} "
    assert output.finished is not None
    assert (output.finished.reason, output.finished.num_output_tokens) == ("stop", 3)
    harness.stop()


class TellingOutput(CollectingOutput):
    """Notes in `events` what is sent."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self._events = events

    def send(self, text: str, finished: Finished | None) -> None:
        self._events.append(f"send {text.strip()}")
        super().send(text, finished)


def test_tokens_are_logged_before_their_text_is_sent(harness: Harness) -> None:
    """Or a process that dies between the two would have said what no other one knows."""
    events: list[str] = []
    generation = sequence("a", max_tokens=3)
    generation.log = lambda position, token: events.append(f"log {position} {token}")
    output = TellingOutput(events)
    generation.output = output
    harness.join(generation)
    harness.model.let_run()
    output.text()
    assert events == ["log 1 1", "send 1", "log 2 2", "send 2", "log 3 3", "send 3"]


def test_stopping_fails_and_releases_everybody() -> None:
    harness = Harness()
    running, newcomer = sequence("running", max_tokens=200), sequence("newcomer", prompt=4, max_tokens=200)
    harness.join(running)
    harness.model.waiting_step()
    harness.join(newcomer)
    harness.stop()
    for generation in (running, newcomer):
        with pytest.raises(RuntimeError, match="the server is stopping"):
            output_of(generation).text(timeout=5)
    assert sorted(harness.released) == ["newcomer", "running"]
