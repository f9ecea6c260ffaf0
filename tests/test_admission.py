"""The way into the generate loop: who is urgent goes first, short prompts join, the channel holds what it may."""

from collections.abc import Iterator
from threading import Thread

import pytest

from corolla.generate.admission import AdmissionQueue
from corolla.generate.channel import BatchChannel
from corolla.generate.request import GenerationRequest
from corolla.generate.sequence import Sequence
from test_loop import Harness, output_of, sequence
from waiting import wait_until


def urgent(name: str, priority: int, prompt: int = 2) -> Sequence:
    generation = sequence(name, prompt)
    generation.request = GenerationRequest(name, priority=priority, echo=False)
    return generation


def names(batch: list[Sequence]) -> list[str]:
    return [generation.session_id for generation in batch]


@pytest.fixture
def queue() -> Iterator[AdmissionQueue]:
    queue = AdmissionQueue()
    yield queue
    queue.close()


def test_lower_priorities_go_first_then_earlier_arrivals(queue: AdmissionQueue) -> None:
    for name, priority in (("batch-1", 5), ("person-1", 0), ("batch-2", 5), ("person-2", 0), ("now", -1)):
        queue.put(urgent(name, priority))
    taken = [names(queue.take(1)) for _ in range(5)]
    assert taken == [["now"], ["person-1"], ["person-2"], ["batch-1"], ["batch-2"]]


def test_prompts_join_a_batch_as_long_as_they_fit(queue: AdmissionQueue) -> None:
    for name, prompt in (("a", 5), ("b", 3), ("c", 1), ("d", 9), ("e", 40), ("f", 1)):
        queue.put(sequence(name, prompt))
    assert [names(queue.take(10)) for _ in range(4)] == [["a", "b", "c"], ["d"], ["e"], ["f"]]


def test_unwanted_sequences_can_be_taken_out(queue: AdmissionQueue) -> None:
    for name in ("a", "b", "c"):
        queue.put(sequence(name))
    assert names(queue.remove(lambda generation: generation.session_id == "b")) == ["b"]
    assert queue.unprepared == 2
    assert names(queue.take(10)) == ["a", "c"]


def test_take_waits_until_something_comes_or_the_queue_is_closed(queue: AdmissionQueue) -> None:
    taken: list[list[str]] = []
    thread = Thread(target=lambda: taken.extend(names(queue.take(1)) for _ in range(2)))
    thread.start()
    queue.put(sequence("a"))
    wait_until(lambda: taken == [["a"]])
    queue.close()
    thread.join(5)
    assert taken == [["a"], []]


@pytest.mark.parametrize("capacity", [0, 1, 3])
def test_put_returns_while_no_more_than_the_capacity_waits(capacity: int) -> None:
    channel: BatchChannel[int] = BatchChannel(capacity)
    put: list[int] = []

    def fill() -> None:
        for number in range(6):
            channel.put(number)
            put.append(number)

    thread = Thread(target=fill)
    thread.start()
    wait_until(lambda: channel.holds_up and len(put) == capacity)
    assert [channel.take(wait=True) for _ in range(6)] == list(range(6))
    thread.join(5)
    assert put == list(range(6))
    assert channel.take(wait=False) is None


def test_closing_a_channel_lets_both_sides_go_and_keeps_the_batches() -> None:
    channel: BatchChannel[str] = BatchChannel(0)
    thread = Thread(target=channel.put, args=("left",))
    thread.start()
    wait_until(lambda: channel.holds_up)
    channel.close()
    thread.join(5)
    assert channel.take(wait=True) is None
    assert channel.drain() == ["left"]
    assert channel.drain() == []


def test_short_prompts_of_newcomers_run_together() -> None:
    harness = Harness(most_prompt_tokens=16)
    harness.join(sequence("running", max_tokens=50))
    assert harness.model.waiting_step() == ["running"]
    harness.join(sequence("first", prompt=3, max_tokens=9))  # in the channel, alone
    harness.join(sequence("second", prompt=3, max_tokens=9))  # in the preparer's hand, alone
    harness.join(*(sequence(f"new{i}", prompt=4, max_tokens=9) for i in range(3)))
    harness.model.permits.release()
    prompts = [step for step in (harness.model.next_step() for _ in range(6)) if "running" not in step]
    assert prompts == [["first"], ["second"], ["new0", "new1", "new2"]]
    harness.stop()


def test_urgent_newcomers_overtake_the_others() -> None:
    harness = Harness()
    harness.join(sequence("running", max_tokens=50))
    assert harness.model.waiting_step() == ["running"]
    for number in range(4):
        harness.join(urgent(f"batch{number}", priority=1))
    harness.join(urgent("person", priority=0))
    harness.model.permits.release()
    prompts = [step for step in (harness.model.next_step() for _ in range(10)) if "running" not in step]
    # two batches were on their way already: one in the channel, one in the preparer's hand
    assert prompts == [["batch0"], ["batch1"], ["person"], ["batch2"], ["batch3"]]
    harness.stop()


@pytest.mark.parametrize("capacity", [0, 1, 8])
def test_cancelled_newcomers_never_run_wherever_they_wait(capacity: int) -> None:
    harness = Harness(channel_capacity=capacity)
    harness.join(sequence("running", max_tokens=50))
    assert harness.model.waiting_step() == ["running"]
    newcomers = [sequence(f"new{i}", prompt=2) for i in range(4)]
    harness.join(*newcomers)
    for generation in newcomers:
        output_of(generation).cancelled = True
    harness.model.permits.release()
    assert all(harness.model.next_step() == ["running"] for _ in range(6))
    assert sorted(harness.released) == ["new0", "new1", "new2", "new3"]
    harness.stop()


def test_who_comes_after_the_end_is_refused() -> None:
    harness = Harness()
    harness.stop()
    late = sequence("late")
    harness.loop.join(late)
    with pytest.raises(RuntimeError, match="the server is stopping"):
        output_of(late).text(timeout=5)
    assert harness.released == ["late"]
