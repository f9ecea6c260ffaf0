"""A server that is told to stop: no new sessions, time for those in use, and then the end."""

from pathlib import Path

import psutil
import pytest

from corolla.kv.draining import IN_USE_SECONDS, DrainingError, begin_draining, sessions_in_use
from corolla.kv.layout import KVLayout
from corolla.kv.records import now_ns
from corolla.kv.session import OpenRequest, Session
from corolla.kv.table import SessionTable
from corolla.server.drain import Drain
from servers import RunningServer
from toy_models import add_model, write_backends

LAYOUT = KVLayout(8, 4, 2, kv_heads=1, head_dim=2, dtype="float32")


@pytest.fixture
def table(tmp_path: Path) -> SessionTable:
    return session_table(tmp_path)


def session_table(directory: Path) -> SessionTable:
    return SessionTable(directory, LAYOUT, 100)


def forget_for(table: SessionTable, session: Session, seconds: float) -> None:
    """As if its last step was so long ago."""
    table.records.used[session.record] = now_ns() - int(seconds * 1e9)


class TestSessionsInUse:
    def test_none_without_a_table(self, tmp_path: Path) -> None:
        assert sessions_in_use(tmp_path) == 0

    def test_are_those_stepped_lately(self, table: SessionTable, tmp_path: Path) -> None:
        sessions = [table.open(OpenRequest(4)) for _ in range(3)]
        assert sessions_in_use(tmp_path) == 3
        forget_for(table, sessions[0], IN_USE_SECONDS)
        table.close(sessions[1].id)
        assert sessions_in_use(tmp_path) == 1

    def test_and_those_that_a_process_runs(self, table: SessionTable, tmp_path: Path) -> None:
        session = table.open(OpenRequest(4))
        table.pins.acquire(session.record)
        forget_for(table, session, 60.0)
        assert sessions_in_use(tmp_path) == 1
        table.pins.release(session.record)
        assert sessions_in_use(tmp_path) == 0


class TestDrain:
    def test_is_over_at_once_without_sessions_in_use(self, table: SessionTable, tmp_path: Path) -> None:
        forget_for(table, table.open(OpenRequest(4)), 60.0)
        assert Drain(tmp_path, 30.0).over()

    def test_refuses_new_sessions_and_waits_for_the_others(self, table: SessionTable, tmp_path: Path) -> None:
        session = table.open(OpenRequest(4))
        drain = Drain(tmp_path, 30.0)
        with pytest.raises(DrainingError, match="ask another one"):
            table.open(OpenRequest(4))
        assert not drain.over()
        table.close(session.id)
        assert drain.over()

    def test_gives_up_after_its_timeout(self, table: SessionTable, tmp_path: Path) -> None:
        now = [0.0]
        table.open(OpenRequest(4))
        drain = Drain(tmp_path, 30.0, lambda: now[0])
        now[0] = 29.9
        assert not drain.over()
        now[0] = 30.0
        assert drain.over()

    def test_leaves_nothing_to_the_next_server(self, tmp_path: Path) -> None:
        begin_draining(tmp_path)
        for file in tmp_path.iterdir():
            file.unlink()
        session_table(tmp_path).open(OpenRequest(4))


def test_a_server_that_gets_sigterm_waits_for_its_sessions_and_stops(tmp_path: Path) -> None:
    add_model(tmp_path / "repository", "first")
    server = RunningServer(tmp_path / "repository", "--drain-timeout=60", backends=write_backends(tmp_path))
    table = session_table(server.run_directory)
    session = table.open(OpenRequest(4))
    table.pins.acquire(session.record)
    server.process.terminate()
    server.wait_for_log("waiting up to 60 s for 1 sessions in use")
    assert psutil.pid_exists(server.pid)
    table.pins.release(session.record)
    table.close(session.id)
    assert server.process.wait(20) == 0
    server.stop()
