"""Two real servers, each with a part of the blocks: steps through both, pushed from the first to the second.

Hidden states in float32 may differ by 1e-5 of the largest number among them.
"""

import re
import socket
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from secrets import token_hex

import pytest
import torch

from checkpoints import random_prompt
from conftest import PartServers
from corolla.remote import connection as connection_module
from corolla.remote.connection import PeerConnection
from corolla.remote.errors import PeerRefusalError, PeerUnreachableError
from corolla.wire.messages import Hop, SpanOutput, SpanStep
from corolla.wire.states import encode
from servers import RunningServer
from span_answers import assert_same, states_of
from waiting import wait_until
from wire import GrpcWire, Sessions

METRIC = re.compile(r'corolla_span_(\w+)_total\{model="span"\} (\d+)')
SECONDS = 30.0
FIRST, SECOND = range(0, 3), range(3, 5)
"""The blocks of the route: all of the first server, and those of the second that are left."""


def counts(server: RunningServer) -> Counter[str]:
    with urllib.request.urlopen(f"http://{server.metrics}/metrics") as answer:
        return Counter({name: int(value) for name, value in METRIC.findall(answer.read().decode())})


@pytest.fixture(scope="module")
def connections(part_servers: PartServers) -> Iterator[tuple[PeerConnection, PeerConnection]]:
    made = PeerConnection(part_servers.first.grpc), PeerConnection(part_servers.second.grpc)
    yield made
    for connection in made:
        connection.close()


class Caller:
    """A client of both servers with sessions on each."""

    def __init__(self, servers: PartServers, connections: tuple[PeerConnection, PeerConnection]) -> None:
        self.servers = servers
        self.connections = connections
        self.sessions = [Sessions(GrpcWire(server.grpc)) for server in servers.both]
        self.opened: list[tuple[str, ...]] = []

    def open(self, rows: int = 1) -> list[tuple[str, ...]]:
        """Sessions of 64 positions, `rows` on each server."""
        ids = [tuple(sessions.open(64) for _ in range(rows)) for sessions in self.sessions]
        self.opened += ids
        return ids

    def close(self) -> None:
        for sessions, ids in zip(self.sessions * len(self.opened), self.opened, strict=False):
            for session_id in ids:
                sessions.close(session_id)

    def step(
        self,
        hidden_states: torch.Tensor,
        sessions: list[tuple[str, ...]],
        start: int,
        *,
        encoding: str = "float32",
        address: str | None = None,
    ) -> SpanStep:
        hop = Hop(address or self.servers.second.grpc, SECOND, sessions[1])
        starts = (start,) * len(sessions[0])
        return SpanStep(sessions[0], starts, token_hex(16), encode(hidden_states, encoding), FIRST, (hop,))

    def at_second(self, step: SpanStep, first: SpanOutput | None = None) -> "Future[SpanOutput]":
        """Waits at the second server, or sends it the output of the first."""
        (hop,) = step.next
        own = replace(
            step, session_ids=hop.session_ids, blocks=hop.blocks, next=(), states=first.states if first else None
        )
        return self.connections[1].submit(own)

    def run(self, step: SpanStep) -> torch.Tensor:
        """Through both, pushed."""
        waiting = self.at_second(step)
        assert self.connections[0].submit(step).result(SECONDS).pushed
        return states_of(waiting.result(SECONDS))


@pytest.fixture
def caller(part_servers: PartServers, connections: tuple[PeerConnection, PeerConnection]) -> Iterator[Caller]:
    made = Caller(part_servers, connections)
    yield made
    made.close()


@pytest.fixture(scope="module")
def hidden_states(part_servers: PartServers) -> torch.Tensor:
    """[2, 40, H]"""
    return part_servers.whole.embedding(torch.tensor([random_prompt(40, seed) for seed in range(2)]))


@pytest.fixture(scope="module")
def expected(part_servers: PartServers, hidden_states: torch.Tensor) -> torch.Tensor:
    return part_servers.whole.run_chain(hidden_states)


def test_steps_through_both_servers_equal_the_whole(
    caller: Caller, hidden_states: torch.Tensor, expected: torch.Tensor
) -> None:
    """A long prompt, single tokens, some taken back, and at last everything again from the start, as in a replay."""
    before = [counts(server) for server in caller.servers.both]
    sessions = caller.open(2)
    chunks = [(0, 20), (20, 21), (21, 25), (12, 13), (13, 40), (0, 40)]
    for start, stop in chunks:
        step = caller.step(hidden_states[:, start:stop], sessions, start)
        assert_same(caller.run(step), expected[:, start:stop])

    def new() -> list[Counter[str]]:
        return [counts(server) - old for server, old in zip(caller.servers.both, before, strict=True)]

    wait_until(lambda: [c["steps"] for c in new()] == [len(chunks)] * 2)
    first, second = new()
    assert (first["pushes_sent"], first["pushes_failed"], second["pushes_received"]) == (len(chunks), 0, len(chunks))
    assert second["rows"] == 2 * len(chunks)


def test_a_copy_is_not_computed_again_and_whoever_asks_late_gets_the_output(
    caller: Caller, hidden_states: torch.Tensor, expected: torch.Tensor
) -> None:
    before = counts(caller.servers.second)
    step = caller.step(hidden_states[:1, :4], caller.open(), 0)
    first = caller.connections[0].submit(step).result(SECONDS)
    late, copy = caller.at_second(step).result(SECONDS), caller.at_second(step, first).result(SECONDS)
    assert (late.duplicate, copy.duplicate) == (False, True)
    for output in (late, copy):
        assert_same(states_of(output), expected[:1, :4])
    wait_until(lambda: (counts(caller.servers.second) - before)["duplicates"] == 1)
    assert (counts(caller.servers.second) - before)["steps"] == 1


def test_a_push_to_nowhere_says_so_and_the_caller_goes_on(
    caller: Caller, hidden_states: torch.Tensor, expected: torch.Tensor
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens there
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        sessions = caller.open()
        for position in range(3):
            step = caller.step(hidden_states[:1, position : position + 1], sessions, position, address=address)
            first = caller.connections[0].submit(step).result(SECONDS)
            assert not first.pushed
            output = caller.at_second(step, first).result(SECONDS)
            assert_same(states_of(output), expected[:1, position : position + 1])
    wait_until(lambda: counts(caller.servers.first)["pushes_failed"] == 3)


@pytest.mark.parametrize(("encoding", "most"), [("float16", 0.005), ("bfloat16", 0.03), ("int8", 0.05)])
def test_short_encodings_cost_little(
    caller: Caller, hidden_states: torch.Tensor, expected: torch.Tensor, encoding: str, most: float
) -> None:
    """Mean error by the mean number: bfloat16 keeps 8 bits of each, int8 is off by up to absmax / 254 of its block."""
    step = caller.step(hidden_states[:1, :16], caller.open(), 0, encoding=encoding)
    output = caller.run(step)
    assert (output - expected[:1, :16]).abs().mean() < most * expected.abs().mean()


def test_clients_at_the_same_time_share_batches(
    caller: Caller, hidden_states: torch.Tensor, expected: torch.Tensor
) -> None:
    """Eight sessions, each a client with a step in flight; their rows run together on both servers."""
    before = [counts(server) for server in caller.servers.both]
    sessions = [caller.open() for _ in range(8)]
    for position in range(6):
        part = hidden_states[:1, position : position + 1]
        steps = [caller.step(part, own, position) for own in sessions]
        waiting = [caller.at_second(step) for step in steps]
        for answer in [caller.connections[0].submit(step) for step in steps]:
            assert answer.result(SECONDS).pushed
        for answer in waiting:
            assert_same(states_of(answer.result(SECONDS)), expected[:1, position : position + 1])
    for server, old in zip(caller.servers.both, before, strict=True):
        wait_until(lambda server=server, old=old: (counts(server) - old)["rows"] >= 48)  # type: ignore[misc]
        assert (counts(server) - old)["batched_rows"] >= 8


@pytest.mark.parametrize(
    ("changes", "status", "message"),
    [
        ({"session_ids": ("nobody",)}, "NOT_FOUND", "session_id: 'nobody' is not open on this server"),
        ({"starts": (5,)}, "INVALID_ARGUMENT", "start_position: 5 is not allowed; allowed: 0 to 0"),
        ({"starts": (-1,)}, "INVALID_ARGUMENT", r"start_position: \[-1\] is not allowed"),
        ({"blocks": range(0, 5)}, "INVALID_ARGUMENT", r"blocks: \[0, 5\] is not allowed; .* inside 0:3"),
        ({"states": None, "timeout": 0.1}, "UNAVAILABLE", "step_id: the step did not come in time"),
    ],
    ids=str,
)
def test_errors_have_a_name_and_say_what_to_do(
    caller: Caller, hidden_states: torch.Tensor, changes: dict[str, object], status: str, message: str
) -> None:
    step = replace(caller.step(hidden_states[:1, :1], caller.open(), 0), next=(), **changes)  # type: ignore[arg-type]
    with pytest.raises(PeerRefusalError, match=message) as refused:
        caller.connections[0].submit(step, timeout=SECONDS).result(SECONDS)
    assert refused.value.status == status


def test_a_connection_that_cannot_be_made_fails_soon_and_is_tried_again(
    caller: Caller, hidden_states: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "FIRST_BACKOFF", 0.0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        connection = PeerConnection(f"127.0.0.1:{taken.getsockname()[1]}")
        step = caller.step(hidden_states[:1, :1], caller.open(), 0)
        for _ in range(2):
            handed: list[bool] = []
            answer = connection.submit(step, on_handed=handed.append)
            with pytest.raises(PeerUnreachableError):
                answer.result(SECONDS)
            assert handed == [False]
        connection.close()


def test_an_answer_that_does_not_come_in_time_is_an_error(caller: Caller, hidden_states: torch.Tensor) -> None:
    step = replace(caller.step(hidden_states[:1, :1], caller.open(), 0), states=None, timeout=5.0)
    with pytest.raises(PeerUnreachableError, match="no answer in time"):
        caller.connections[0].submit(step, timeout=0.1).result(SECONDS)
