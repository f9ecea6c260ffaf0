"""The session table: pages are given out once, in fair order, and come back whatever happens."""

import multiprocessing
import os
import signal
import time
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from corolla.errors import EnvironmentProblemError, InvalidValueError
from corolla.kv import table as table_module
from corolla.kv.layout import KVLayout
from corolla.kv.session import OpenRequest, Session
from corolla.kv.steps import Row, SessionSteps
from corolla.kv.table import CacheFullError, SessionTable, UnknownSessionError
from waiting import wait_until

PAGES, PAGE_SIZE, BLOCKS = 8, 4, 2
LAYOUT = KVLayout(PAGES, PAGE_SIZE, BLOCKS, kv_heads=1, head_dim=2, dtype="float32")
CONTEXT = 100
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def table(tmp_path: Path) -> SessionTable:
    return SessionTable(tmp_path, LAYOUT, CONTEXT)


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> float:
    """A tenth of the real one."""
    monkeypatch.setattr(table_module, "PATIENCE", 0.1)
    return 0.1


def pages_of(session: Session) -> set[int]:
    return set((session.slots // PAGE_SIZE).tolist())


def assert_accounts(table: SessionTable, opened: list[Session]) -> None:
    """No page belongs to two sessions, and what is not theirs is free."""
    owned = [page for session in opened for page in pages_of(session)]
    assert len(owned) == len(set(owned)), "two sessions share a page"
    for session in opened:
        assert len(session.slots) == PAGE_SIZE * -(-session.max_length // PAGE_SIZE)
        assert len(set(session.slots.tolist())) == len(session.slots)
    status = table.status()
    assert status.open_sessions == len(opened)
    assert status.total_tokens == PAGES * PAGE_SIZE
    assert status.free_tokens == PAGE_SIZE * (PAGES - len(owned))


class Waiter:
    """A thread that opens a session; joins the line before the constructor returns."""

    def __init__(self, table: SessionTable, max_length: int, priority: int = 0, timeout: float = 20.0) -> None:
        self.session: Session | None = None
        self.error: Exception | None = None
        self._request = OpenRequest(max_length, timeout, priority)
        self._table = table
        self._thread = Thread(target=self._open, daemon=True)
        before = table.status()
        self._thread.start()
        wait_until(
            lambda: table.status().waiting + table.status().open_sessions > before.waiting + before.open_sessions
        )

    def _open(self) -> None:
        try:
            self.session = self._table.open(self._request)
        except Exception as error:
            self.error = error

    def result(self) -> Session:
        self._thread.join(20)
        if self.error is not None:
            raise self.error
        assert self.session is not None
        return self.session


@given(st.lists(st.tuples(st.booleans(), st.integers(1, PAGES * PAGE_SIZE)), max_size=40))
@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_accounts_are_exact_after_every_open_and_close(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[bool, int]]
) -> None:
    table = SessionTable(tmp_path_factory.mktemp("run"), LAYOUT, CONTEXT)
    opened: list[Session] = []
    for opens, number in actions:
        if opens:
            try:
                opened.append(table.open(OpenRequest(number)))
            except CacheFullError:
                assert table.status().free_tokens < number
        elif opened:
            session = opened.pop(number % len(opened))
            assert table.close(session.id) == len(session.slots)
        assert_accounts(table, opened)


def test_new_session_is_empty_whatever_its_record_held_before(table: SessionTable) -> None:
    steps = SessionSteps(table, range(BLOCKS))
    for _ in range(3):
        session = table.open(OpenRequest(8))
        assert steps.length(session.id) == 0
        with steps.running([Row(session.id, 0)], 5):
            pass
        assert steps.length(session.id) == 5
        table.close(session.id)


def test_session_ids_do_not_tell_each_other(table: SessionTable) -> None:
    ids = [table.open(OpenRequest(1)).id for _ in range(4)]
    assert all(len(session_id) == 32 and int(session_id, 16) for session_id in ids)
    assert len({session_id[:8] for session_id in ids}) == 4


def test_other_processes_see_the_same_sessions(table: SessionTable, tmp_path: Path) -> None:
    other = SessionTable(tmp_path, LAYOUT, CONTEXT)
    session = table.open(OpenRequest(10))
    found = other.find(session.id)
    assert (found.record, found.epoch, found.max_length) == (session.record, session.epoch, 10)
    np.testing.assert_array_equal(found.slots, session.slots)
    other.close(session.id)
    with pytest.raises(UnknownSessionError):
        table.find(session.id)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (OpenRequest(0), "max_length: 0 is not allowed; allowed: 1 to 32"),
        (OpenRequest(-5), "max_length: -5 "),
        (OpenRequest(33), "max_length: 33 "),
        (OpenRequest(1, timeout=-1.0), "timeout: -1.0 is not allowed; allowed: 0 to 3600 seconds"),
        (OpenRequest(1, timeout=float("nan")), "timeout: nan "),
        (OpenRequest(1, timeout=float("inf")), "timeout: inf "),
        (OpenRequest(1, idle_timeout=0.0), "idle_timeout: 0.0 is not allowed; allowed: more than 0, up to 86400"),
        (OpenRequest(1, idle_timeout=float("nan")), "idle_timeout: nan "),
    ],
)
def test_wrong_open_is_refused_and_takes_nothing(table: SessionTable, request_: OpenRequest, message: str) -> None:
    with pytest.raises(InvalidValueError, match=f"^{message}"):
        table.open(request_)
    assert_accounts(table, [])
    assert table.status().waiting == 0


def test_session_may_not_be_longer_than_the_context(tmp_path: Path) -> None:
    table = SessionTable(tmp_path, LAYOUT, context_length=20)
    with pytest.raises(InvalidValueError, match="max_length: 21 is not allowed; allowed: 1 to 20"):
        table.open(OpenRequest(21))


def test_full_cache_refuses_at_once_without_a_timeout_and_says_how_full(table: SessionTable) -> None:
    table.open(OpenRequest(20))
    started = time.monotonic()
    with pytest.raises(CacheFullError, match=r"no room for max_length 13 within 0 s: 12 of 32 tokens are free, 0 requ"):
        table.open(OpenRequest(13))
    assert time.monotonic() - started < 1
    assert table.status().waiting == 0


def test_timeout_ends_the_wait_and_leaves_the_line(table: SessionTable) -> None:
    table.open(OpenRequest(32))
    started = time.monotonic()
    with pytest.raises(CacheFullError, match=r"within 0\.2 s: 0 of 32 tokens are free"):
        table.open(OpenRequest(1, timeout=0.2))
    assert 0.2 <= time.monotonic() - started < 2
    assert table.status().waiting == 0


def test_line_is_served_by_priority_then_arrival(table: SessionTable) -> None:
    held = table.open(OpenRequest(32))
    order: list[str] = []
    names = ["later-1", "first", "later-2", "middle"]
    waiters = [Waiter(table, 32, priority) for priority in (5, -1, 5, 0)]
    current: Session = held
    for _ in names:
        table.close(current.id)
        wait_until(lambda: any(w.session for w, n in zip(waiters, names, strict=True) if n not in order))
        name, waiter = next((n, w) for n, w in zip(names, waiters, strict=True) if w.session and n not in order)
        order.append(name)
        current = waiter.result()
    assert order == ["first", "middle", "later-1", "later-2"]


def test_small_requests_pass_a_big_one_that_does_not_fit(table: SessionTable) -> None:
    held = table.open(OpenRequest(20))
    big = Waiter(table, 32)
    small = table.open(OpenRequest(4))
    assert big.session is None
    table.close(held.id)
    table.close(small.id)
    assert len(big.result().slots) == 32


def test_small_requests_do_not_pass_a_big_one_for_ever(table: SessionTable, patience: float) -> None:
    held = table.open(OpenRequest(20))
    big = Waiter(table, 32)
    time.sleep(patience + 0.05)
    with pytest.raises(CacheFullError, match="12 of 32 tokens are free, 1 requests wait"):
        table.open(OpenRequest(4))
    small = Waiter(table, 4)
    table.close(held.id)
    first = big.result()
    assert small.session is None
    table.close(first.id)
    assert len(small.result().slots) == 4


def test_stream_of_small_requests_cannot_starve_a_big_one(table: SessionTable, patience: float) -> None:
    """Four clients open and close as fast as they can; there is never room for the big one by itself."""
    table.open(OpenRequest(4))
    stop = False

    def churn() -> None:
        while not stop:
            session = table.open(OpenRequest(7, timeout=10))
            time.sleep(0.01)
            table.close(session.id)

    clients = [Thread(target=churn, daemon=True) for _ in range(4)]
    for client in clients:
        client.start()
    started = time.monotonic()
    big = table.open(OpenRequest(28, timeout=10))
    stop = True
    assert time.monotonic() - started < 30 * patience
    table.close(big.id)
    for client in clients:
        client.join()


def test_idle_session_expires_and_a_stepped_one_does_not(table: SessionTable) -> None:
    steps = SessionSteps(table, range(BLOCKS))
    idle, busy = (table.open(OpenRequest(8, idle_timeout=0.8)) for _ in range(2))
    for _ in range(8):
        time.sleep(0.15)
        with steps.running([Row(busy.id, 0)], 1):
            pass
        table.reap()
    assert_accounts(table, [busy])
    with pytest.raises(UnknownSessionError, match="expired"), steps.running([Row(idle.id, 0)], 1):
        pass


def test_opening_takes_the_pages_of_expired_sessions(table: SessionTable) -> None:
    table.open(OpenRequest(32, idle_timeout=0.05))
    assert len(table.open(OpenRequest(32, timeout=5)).slots) == 32


def test_session_does_not_expire_while_a_step_runs(table: SessionTable) -> None:
    steps = SessionSteps(table, range(BLOCKS))
    session = table.open(OpenRequest(32, idle_timeout=0.02))
    with steps.running([Row(session.id, 0)], 3):
        time.sleep(0.05)
        table.reap()
        assert_accounts(table, [session])
    table.reap()
    assert steps.length(session.id) == 3


def test_close_while_a_step_runs_frees_the_pages_after_it(table: SessionTable) -> None:
    steps = SessionSteps(table, range(BLOCKS))
    session = table.open(OpenRequest(32))
    with steps.running([Row(session.id, 0)], 3):
        table.close(session.id)
        with pytest.raises(CacheFullError):
            table.open(OpenRequest(1))
        with pytest.raises(UnknownSessionError):
            table.close(session.id)
        with pytest.raises(UnknownSessionError), steps.running([Row(session.id, 0)], 1):
            pass
    assert len(table.open(OpenRequest(32)).slots) == 32


def test_failed_step_leaves_the_length_as_it_was(table: SessionTable) -> None:
    steps = SessionSteps(table, range(BLOCKS))
    session = table.open(OpenRequest(32))
    with steps.running([Row(session.id, 0)], 3):
        pass
    with pytest.raises(ZeroDivisionError), steps.running([Row(session.id, 3)], 1):
        raise ZeroDivisionError
    assert steps.length(session.id) == 3
    assert table.pins.is_free(session.record)


def test_length_told_of_a_session_is_that_of_its_last_step(table: SessionTable) -> None:
    session = table.open(OpenRequest(9))
    with SessionSteps(table, range(1, 2)).running([Row(session.id, 0)], 3):
        pass
    (status,) = table.sessions()
    assert (status.id, status.max_length, status.reserved_tokens, status.length) == (session.id, 9, 12, 3)


def test_waiter_whose_process_died_leaves_the_line(table: SessionTable, tmp_path: Path) -> None:
    held = table.open(OpenRequest(32))
    process = FORK.Process(
        target=lambda: SessionTable(tmp_path, LAYOUT, CONTEXT).open(OpenRequest(32, timeout=60, priority=-9))
    )
    process.start()
    wait_until(lambda: table.status().waiting == 1)
    process.kill()
    process.join()
    table.close(held.id)
    assert len(table.open(OpenRequest(32)).slots) == 32
    assert table.status().waiting == 0


def test_process_killed_in_a_step_holds_no_page(table: SessionTable, tmp_path: Path) -> None:
    session = table.open(OpenRequest(32))
    reader, writer = os.pipe()

    def step_for_ever() -> None:
        steps = SessionSteps(SessionTable(tmp_path, LAYOUT, CONTEXT), range(BLOCKS))
        with steps.running([Row(session.id, 0)], 3):
            os.write(writer, b"!")
            time.sleep(60)

    process = FORK.Process(target=step_for_ever)
    process.start()
    os.read(reader, 1)
    table.close(session.id)
    with pytest.raises(CacheFullError):
        table.open(OpenRequest(32))
    process.kill()
    process.join()
    assert len(table.open(OpenRequest(32)).slots) == 32


def test_process_killed_inside_transactions_leaves_the_table_whole(table: SessionTable, tmp_path: Path) -> None:
    def churn() -> None:
        own = SessionTable(tmp_path, LAYOUT, CONTEXT)
        while True:
            session = own.open(OpenRequest(7, timeout=5))
            own.close(session.id)

    for delay in (0.02, 0.05, 0.09, 0.03):
        processes = [FORK.Process(target=churn) for _ in range(2)]
        for process in processes:
            process.start()
        time.sleep(delay + 0.1)
        for process in processes:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            process.join()
    table.reap()  # what was killed while it closed a session is closed now
    for status in table.sessions():
        table.close(status.id)
    assert_accounts(table, [])
    assert table.status().waiting == 0


def test_many_clients_in_many_processes_never_share_a_page(table: SessionTable, tmp_path: Path) -> None:
    """Each writes its name into its slots and reads it back before it closes."""
    slots = np.memmap(tmp_path / "slots", np.int32, "w+", shape=(LAYOUT.slots,))

    def client(name: int) -> None:
        own = SessionTable(tmp_path, LAYOUT, CONTEXT)
        mine = np.memmap(tmp_path / "slots", np.int32, "r+", shape=(LAYOUT.slots,))
        for turn in range(25):
            session = own.open(OpenRequest(1 + (7 * turn + name) % 20, timeout=20))
            assert not mine[session.slots].any(), "somebody else is in there"
            mine[session.slots] = name
            time.sleep(0.001)
            assert (mine[session.slots] == name).all(), "somebody else came in"
            mine[session.slots] = 0
            own.close(session.id)

    processes = [FORK.Process(target=client, args=(name,)) for name in range(1, 5)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert not slots.any()
    assert_accounts(table, [])


def test_tables_of_another_layout_refuse_the_directory(table: SessionTable, tmp_path: Path) -> None:
    other = KVLayout(PAGES + 1, PAGE_SIZE, BLOCKS, kv_heads=1, head_dim=2, dtype="float32")
    with pytest.raises(EnvironmentProblemError, match=r"another model or configuration .*`corolla init`"):
        SessionTable(tmp_path, other, CONTEXT)
