"""The load tests run, find no failure on a good server, and say what they measured."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import Remote
from load.timing import Timing
from waiting import wait_until

LOAD = Path(__file__).parent / "load"
USERS = 2
MAX_TOKENS = 12


def locust(locustfile: str, address: str, *options: str) -> subprocess.CompletedProcess[str]:
    """A short run in a process of its own; requests that are running at its end may finish."""
    command = [Path(sys.prefix) / "bin" / "locust", "-f", LOAD / f"{locustfile}.py", "--headless", "-H", address]
    limits = ["-u", USERS, "-r", USERS, "-t", "3s", "-s", "60", f"--max-tokens={MAX_TOKENS}"]
    return subprocess.run(
        [*map(str, command + limits), *options], capture_output=True, text=True, timeout=120, check=False
    )


def address_for(remote: Remote, locustfile: str) -> str:
    return f"http://{remote.server.http}" if locustfile == "http_stream" else remote.server.grpc


@pytest.mark.parametrize("locustfile", ["http_stream", "grpc_stream", "chain_steps"])
def test_load_is_measured_without_failures(remote: Remote, locustfile: str, tmp_path: Path) -> None:
    file = tmp_path / "summary.json"
    ended = locust(locustfile, address_for(remote, locustfile), f"--summary={file}")
    assert ended.returncode == 0, ended.stderr
    summary = json.loads(file.read_text())
    assert summary["requests"] > 0
    assert (summary["failures"], summary["unfinished"]) == (0, 0)
    assert summary["tokens"] == summary["requests"] * MAX_TOKENS
    assert summary["tokens_per_second"] == pytest.approx(summary["tokens"] / summary["seconds"], rel=0.01)
    assert summary["tokens_per_response"] >= 1
    for name in ("time_to_first_token_ms", "request_ms"):
        assert 0 < summary[name]["p50"] <= summary[name]["p95"], name
    for name in ("inter_token_ms", "response_gap_ms"):  # a client that had no processor meanwhile reads all at once
        assert 0 <= summary[name]["p50"] <= summary[name]["p95"], name
    assert summary["time_to_first_token_ms"]["p50"] < summary["request_ms"]["p50"]
    assert f"{summary['requests']} requests, 0 failed, 0 cut off" in ended.stdout
    if locustfile == "chain_steps":
        assert 1 <= summary["rows_per_batch"] <= USERS
    wait_until(lambda: remote.sessions.stat()["open_sessions"] == 0)


@pytest.mark.parametrize("locustfile", ["http_stream", "grpc_stream", "chain_steps"])
def test_refusals_are_failures_with_the_message_of_the_server(remote: Remote, locustfile: str, tmp_path: Path) -> None:
    """And users end after their last request, long before the time is over."""
    file = tmp_path / "summary.json"
    ended = locust(
        locustfile, address_for(remote, locustfile), "-t", "100s", "--max-tokens=5000", "--requests-per-user=3",
        f"--summary={file}",
    )  # fmt: skip
    assert ended.returncode == 1, ended.stderr
    summary: dict[str, Any] = json.loads(file.read_text())
    assert (summary["requests"], summary["failures"]) == (0, USERS * 3)
    assert "5000 is not allowed" in ended.stderr, "Locust prints its tables there"


def test_time_per_token_counts_tokens_and_not_responses() -> None:
    timing = Timing(start=10.0, responses=[10.5, 10.75, 11.5], end=11.5, tokens=6)
    assert timing.first_token == 0.5
    assert timing.inter_token == pytest.approx(1.0 / 5)
    assert timing.gaps == [0.25, 0.75]


@pytest.mark.parametrize(("responses", "tokens"), [([], 1), ([10.5], 1), ([10.5], 6)])
def test_without_a_second_response_there_is_no_time_per_token(responses: list[float], tokens: int) -> None:
    assert Timing(start=10.0, responses=responses, end=11.0, tokens=tokens).inter_token is None
