"""Pins keep a record for as long as any step of any living process holds it, and not a moment longer."""

import multiprocessing
import os
import time
from pathlib import Path
from threading import Barrier, Thread

import pytest

from corolla.kv.pins import RecordPins
from waiting import wait_until

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def pins(tmp_path: Path) -> RecordPins:
    return RecordPins(tmp_path / "pins")


def test_record_is_free_until_pinned_and_after(pins: RecordPins) -> None:
    assert pins.is_free(3)
    pins.acquire(3)
    assert not pins.is_free(3)
    pins.release(3)
    assert pins.is_free(3)


def test_every_pin_counts(pins: RecordPins) -> None:
    pins.acquire(0)
    pins.acquire(0)
    pins.release(0)
    assert not pins.is_free(0)
    pins.release(0)
    assert pins.is_free(0)


def test_records_are_independent(pins: RecordPins) -> None:
    pins.acquire(1)
    assert [pins.is_free(record) for record in (0, 1, 2, 10_000)] == [True, False, True, True]


def test_pins_of_several_users_of_the_file_add_up(pins: RecordPins, tmp_path: Path) -> None:
    """Open file description locks: two objects in one process are as far apart as two processes."""
    other = RecordPins(tmp_path / "pins")
    pins.acquire(5)
    other.acquire(5)
    pins.release(5)
    assert not pins.is_free(5)
    assert not other.is_free(5)
    other.release(5)
    assert pins.is_free(5)


def test_asking_for_a_record_does_not_take_it(pins: RecordPins, tmp_path: Path) -> None:
    other = RecordPins(tmp_path / "pins")
    assert pins.is_free(5)
    other.acquire(5)
    assert not pins.is_free(5)


def test_killed_process_holds_no_pin(pins: RecordPins, tmp_path: Path) -> None:
    reader, writer = os.pipe()

    def hold() -> None:
        own = RecordPins(tmp_path / "pins")
        own.acquire(7)
        os.write(writer, b"!")
        time.sleep(60)

    process = FORK.Process(target=hold)
    process.start()
    os.read(reader, 1)
    assert not pins.is_free(7)
    process.kill()
    process.join()
    wait_until(lambda: pins.is_free(7))


def test_threads_may_pin_and_ask_at_the_same_time(pins: RecordPins) -> None:
    barrier = Barrier(4)
    wrong: list[int] = []

    def work() -> None:
        barrier.wait()
        for turn in range(300):
            record = turn % 3
            pins.acquire(record)
            if pins.is_free(record):
                wrong.append(record)
            pins.release(record)

    threads = [Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert all(pins.is_free(record) for record in range(3))
