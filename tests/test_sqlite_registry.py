"""What only a file can go through."""

import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import apsw
import pytest

from corolla.errors import EnvironmentProblemError
from corolla.peers.registry import RegistryAwayError, open_registry, watch
from registries import record
from waiting import wait_until


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "peers.sqlite"


def test_default_is_one_file_per_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corolla.peers.sqlite.SHARED_MEMORY", tmp_path)
    with closing(open_registry("sqlite://")) as first, closing(open_registry("sqlite://")) as second:
        first.put(record("a"))
        assert second.list("org/name") == [record("a")]
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700


def test_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corolla.peers.sqlite.SHARED_MEMORY", tmp_path)
    open_registry("sqlite://").list("org/name")
    monkeypatch.setattr("corolla.peers.sqlite._user", lambda: 12345)
    (folder,) = tmp_path.iterdir()
    folder.rename(tmp_path / "corolla-registry-12345")
    with pytest.raises(EnvironmentProblemError, match="belongs to another user"):
        open_registry("sqlite://").list("org/name")


def test_records_of_an_earlier_boot_are_over(file: Path) -> None:
    with closing(open_registry(f"sqlite://{file}")) as registry:
        registry.put(record("a"))
        connection = apsw.Connection(str(file))
        connection.execute("UPDATE owners SET boot = 'earlier'")
        connection.close()
        assert registry.list("org/name") == []
        registry.keep_alive()
        assert registry.list("org/name") == [record("a")]


def test_file_that_was_replaced_is_an_absence(file: Path) -> None:
    seen: list[object] = []
    away: list[RegistryAwayError] = []
    with closing(open_registry(f"sqlite://{file}")) as registry:
        registry.put(record("a"))
        with closing(watch(registry, "org/name", seen.append, away.append)):
            wait_until(lambda: seen == [[record("a")]])
            for leftover in file.parent.glob("peers.sqlite*"):
                leftover.unlink()
            wait_until(lambda: seen == [[record("a")], []])
            assert "another file" in str(away[0])
            registry.keep_alive()
            wait_until(lambda: seen[2:] == [[record("a")]])


def test_damaged_file_is_named(file: Path) -> None:
    file.write_bytes(b"no database" * 1000)
    with (
        closing(open_registry(f"sqlite://{file}")) as registry,
        pytest.raises(RegistryAwayError, match=f"not a database; if {file} is damaged, remove it"),
    ):
        registry.list("org/name")


def test_record_of_a_killed_server_is_gone_within_its_ttl(file: Path) -> None:
    program = (
        "import sys, time\n"
        "from corolla.peers.record import PeerRecord\n"
        "from corolla.peers.registry import open_registry\n"
        "registry = open_registry(sys.argv[1], 1)\n"
        "registry.put(PeerRecord.from_json(sys.argv[2]))\n"
        "while True: registry.keep_alive(); time.sleep(1 / 3)"
    )
    url = f"sqlite://{file}"
    with (
        closing(open_registry(url, 1)) as reader,
        subprocess.Popen([sys.executable, "-c", program, url, record("a").to_json()]) as server,
    ):
        wait_until(lambda: reader.list("org/name") == [record("a")])
        server.kill()
        killed = time.monotonic()
        wait_until(lambda: reader.list("org/name") == [])
        assert time.monotonic() - killed < 1.1
