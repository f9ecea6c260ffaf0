"""The `span` model's service in this process: steps of many clients, computed once, pushed from server to server.

Hidden states in float32 may differ by 1e-5 of the largest number among them.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from threading import Event

import pytest
import torch

from checkpoints import random_prompt
from conftest import Served
from corolla.errors import CorollaError, InvalidValueError, OverloadedError
from corolla.kv.steps import PositionError
from corolla.kv.table import UnknownSessionError
from corolla.remote.errors import PeerUnreachableError
from corolla.serving import span_book
from corolla.serving.span import SpanService
from corolla.serving.span_book import StepBook
from corolla.serving.span_request import SpanShape, read_step
from corolla.wire.messages import Hop, SpanOutput, SpanStep, hops_to_json
from corolla.wire.states import encode
from local_server import LocalServer, make_plan
from span_answers import assert_same, states_of
from waiting import wait_until

SECONDS = 20.0


class Network:
    """Services by address; those that are not there cannot be reached. `lost` addresses take steps and never answer."""

    def __init__(self) -> None:
        self.services: dict[str, SpanService] = {}
        self.lost: set[str] = set()

    def connect(self, address: str) -> "NetworkConnection":
        return NetworkConnection(self, address)


class NetworkConnection:
    """See corolla.remote.connection.PeerConnection."""

    outstanding = 0
    suspect = False

    def __init__(self, network: Network, address: str) -> None:
        self._network = network
        self._address = address

    def submit(
        self, step: SpanStep, *, acknowledge: bool, on_handed: Callable[[bool], None] = lambda handed: None
    ) -> Future[SpanOutput]:
        answer: Future[SpanOutput] = Future()
        on_handed(self._address in self._network.services or self._address in self._network.lost)
        if service := self._network.services.get(self._address):
            service.start(step, lambda outcome: settle(answer, outcome), pushed=acknowledge)
        elif self._address not in self._network.lost:
            answer.set_exception(PeerUnreachableError(self._address))
        return answer

    def close(self) -> None:
        """Nothing is open."""


def settle(answer: Future[SpanOutput], outcome: SpanOutput | Exception) -> None:
    if isinstance(outcome, Exception):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)


def submit(service: SpanService, step: SpanStep, *, pushed: bool = False) -> Future[SpanOutput]:
    answer: Future[SpanOutput] = Future()
    service.start(step, lambda outcome: settle(answer, outcome), pushed=pushed)
    return answer


@pytest.fixture(scope="module")
def servers(grouped: Served, tmp_path_factory: pytest.TempPathFactory, suite_cache: Path) -> list[LocalServer]:
    """Of the blocks 0:3 and 2:4; steps of more than 8 positions are long."""
    plans = [
        make_plan(
            grouped.checkpoint, [blocks], blocks=blocks, ends=False, attn_cache_tokens=512, max_short_tokens=8
        )
        for blocks in (range(0, 3), range(2, 4))
    ]
    return [LocalServer(plan, tmp_path_factory.mktemp("span"), suite_cache) for plan in plans]


class Route:
    """Two services that reach each other, and sessions on both."""

    def __init__(self, servers: list[LocalServer]) -> None:
        self.network = Network()
        self.servers = servers
        self.services = [server.span(self.network.connect) for server in servers]
        self.network.services = dict(zip(("first", "second"), self.services, strict=True))

    def open(self, rows: int = 1) -> list[tuple[str, ...]]:
        """Sessions for 64 positions on each server."""
        return [tuple(server.open(64) for _ in range(rows)) for server in self.servers]

    def step(
        self, hidden_states: torch.Tensor, sessions: list[tuple[str, ...]], start: int, address: str = "second"
    ) -> SpanStep:
        """Through the blocks 0:3 of the first and 3:4 of the second server."""
        starts = (start,) * len(sessions[0])
        hops = (Hop(address, range(3, 4), sessions[1]),)
        return SpanStep(sessions[0], starts, token_hex(8), encode(hidden_states, "float32"), range(0, 3), hops)

    def at_second(self, step: SpanStep, states: SpanOutput | None = None) -> SpanStep:
        """What the caller itself asks the second server: to wait, or to compute the output of the first one."""
        (hop,) = step.next
        return replace(
            step, session_ids=hop.session_ids, blocks=hop.blocks, next=(), states=states.states if states else None
        )


@pytest.fixture
def route(servers: list[LocalServer]) -> Iterator[Route]:
    made = Route(servers)
    yield made
    for service, server in zip(made.services, servers, strict=True):
        for session in server.table.sessions():
            server.table.close(session.id)
        wait_until(lambda service=service: service.book.kept == 0)  # type: ignore[misc]
        service.stop()


@pytest.fixture(scope="module")
def hidden_states(grouped: Served) -> torch.Tensor:
    """[3, 30, H]"""
    return grouped.server.embedding(torch.tensor([random_prompt(30, seed) for seed in range(3)]))


def whole(grouped: Served, hidden_states: torch.Tensor) -> torch.Tensor:
    """Through all blocks, from position 0."""
    return grouped.server.run_chain(hidden_states)


def test_steps_pushed_from_server_to_server_equal_the_whole(
    grouped: Served, route: Route, hidden_states: torch.Tensor
) -> None:
    """A long prompt in the ranges of the first and in parts on the second, short steps, and a step taken back."""
    sessions = route.open(3)
    expected = whole(grouped, hidden_states)
    for start, stop in ((0, 20), (20, 21), (21, 23), (10, 11), (11, 30)):
        step = route.step(hidden_states[:, start:stop], sessions, start)
        waiting = submit(route.services[1], route.at_second(step))
        first = submit(route.services[0], step).result(SECONDS)
        assert first.pushed
        assert not first.duplicate
        output = waiting.result(SECONDS)
        assert (output.pushed, output.duplicate) == (False, False)
        assert_same(states_of(output), expected[:, start:stop])
        assert output.free_tokens == 512 - 3 * 64
    counts = [service.counts() for service in route.services]
    assert [(c.steps, c.rows, c.pushes_sent, c.pushes_received) for c in counts] == [(5, 15, 5, 0), (5, 15, 0, 5)]


def test_whoever_asks_later_gets_what_was_computed(grouped: Served, route: Route, hidden_states: torch.Tensor) -> None:
    sessions = route.open()
    step = route.step(hidden_states[:1, :4], sessions, 0)
    first = submit(route.services[0], step).result(SECONDS)
    output = submit(route.services[1], route.at_second(step)).result(SECONDS)
    again = submit(route.services[1], route.at_second(step, first)).result(SECONDS)
    assert not output.duplicate
    assert again == replace(output, duplicate=True)
    assert submit(route.services[0], step).result(SECONDS).duplicate
    assert [service.counts().duplicates for service in route.services] == [1, 1]
    assert [service.counts().steps for service in route.services] == [1, 1]
    assert_same(states_of(output), whole(grouped, hidden_states[:1, :4]))


def test_a_push_to_a_server_that_was_lost_before_is_not_relied_upon(
    route: Route, hidden_states: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is sent all the same, which tells whether the server is back."""
    monkeypatch.setattr(NetworkConnection, "suspect", True)
    step = route.step(hidden_states[:1, :1], route.open(), 0)
    assert not submit(route.services[0], step).result(SECONDS).pushed
    submit(route.services[1], route.at_second(step)).result(SECONDS)
    assert [service.counts().pushes_failed for service in route.services] == [1, 0]


@pytest.mark.parametrize("address", ["gone", "lost"])
def test_a_push_that_fails_leaves_it_to_the_caller(
    grouped: Served, route: Route, hidden_states: torch.Tensor, address: str
) -> None:
    """Of an address where nobody is, the answer says so; of one that does not answer, the caller finds out."""
    route.network.lost = {"lost"}
    sessions = route.open()
    step = route.step(hidden_states[:1, :4], sessions, 0, address)
    first = submit(route.services[0], step).result(SECONDS)
    assert first.pushed == (address == "lost")
    output = submit(route.services[1], route.at_second(step, first)).result(SECONDS)
    assert_same(states_of(output), whole(grouped, hidden_states[:1, :4]))
    counts = route.services[0].counts()
    assert (counts.pushes_sent, counts.pushes_failed) == ((1, 0) if address == "lost" else (0, 1))


def test_a_late_copy_does_not_take_back_later_steps(route: Route, hidden_states: torch.Tensor) -> None:
    sessions = route.open()
    earlier, later = (route.step(hidden_states[:1, i : i + 1], sessions, i, "gone") for i in range(2))
    for step in (earlier, later):
        submit(route.services[0], step).result(SECONDS)
    for late in (earlier, replace(earlier, states=None)):
        with pytest.raises(InvalidValueError, match=r"^step_id: .* the id of a new step; this one's sessions have"):
            submit(route.services[0], late)
    assert route.services[0].counts().duplicates == 1
    assert route.servers[0].table.sessions()[-1].length == 2


def test_steps_that_arrive_together_run_together(
    grouped: Served, route: Route, hidden_states: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three sessions of different clients wait for a fourth; then their steps are one batch of two lengths."""
    began, go_on = Event(), Event()
    run = type(route.servers[0].chain).run

    def gated(service, requests):  # type: ignore[no-untyped-def]
        began.set()
        assert go_on.wait(SECONDS)
        return run(service, requests)

    monkeypatch.setattr(type(route.servers[0].chain), "run", gated)
    sessions = [route.open() for _ in range(4)]
    steps = [
        replace(route.step(hidden_states[:1, :length], own, 0), next=())
        for own, length in zip(sessions, (2, 2, 2, 5), strict=True)
    ]
    answers = [submit(route.services[0], steps[0])]
    assert began.wait(SECONDS)
    answers += [submit(route.services[0], step) for step in steps[1:]]
    go_on.set()
    outputs = [states_of(answer.result(SECONDS)) for answer in answers]
    for output in outputs:
        assert_same(output[:, :1], outputs[0][:, :1])
    assert route.services[0].counts().batched_rows == 3


def test_short_steps_do_not_wait_for_the_whole_of_a_long_one(
    route: Route, hidden_states: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long step of some blocks runs 8 positions at a time; a short one that comes meanwhile goes between."""
    lengths: list[int] = []
    began, go_on = Event(), Event()
    run = type(route.servers[0].chain).run

    def watched(service, requests):  # type: ignore[no-untyped-def]
        lengths.extend(request.hidden_states.shape[1] for request in requests)
        began.set()
        assert go_on.wait(SECONDS)
        return run(service, requests)

    monkeypatch.setattr(type(route.servers[0].chain), "run", watched)
    (long_session, _), (short_session, _) = route.open(), route.open()
    long = SpanStep(long_session, (0,), token_hex(8), encode(hidden_states[:1, :20], "float32"), range(1, 3))
    short = SpanStep(short_session, (0,), token_hex(8), encode(hidden_states[:1, :1], "float32"), range(1, 3))
    answers = [submit(route.services[0], long)]
    assert began.wait(SECONDS)
    answers.append(submit(route.services[0], short))
    go_on.set()
    shapes = [states_of(answer.result(SECONDS)).shape[1] for answer in answers]
    assert shapes == [20, 1]
    assert lengths == [8, 1, 8, 4]


def test_errors_reach_everybody_who_waits_and_the_step_may_be_sent_again(
    route: Route, hidden_states: torch.Tensor
) -> None:
    sessions = route.open()
    wrong = replace(route.step(hidden_states[:1, :1], sessions, 5), next=())
    waiting = submit(route.services[0], replace(wrong, states=None))
    answer = submit(route.services[0], wrong)
    late = submit(route.services[0], replace(wrong, states=None))
    for failed in (waiting, answer, late):
        with pytest.raises(PositionError, match=r"^start_position: 5 .* 0 to 0, the positions cached"):
            failed.result(SECONDS)
    assert not submit(route.services[0], replace(wrong, starts=(0,))).result(SECONDS).duplicate
    unknown = replace(wrong, session_ids=("nobody",), step_id="other", states=encode(hidden_states[:1, :12], "int8"))
    for step in (unknown, replace(unknown, step_id="third", blocks=range(0, 2))):
        with pytest.raises(UnknownSessionError):
            submit(route.services[0], step).result(SECONDS)


def test_a_step_that_does_not_come_is_given_up(route: Route, hidden_states: torch.Tensor) -> None:
    sessions = route.open()
    step = route.step(hidden_states[:1, :1], sessions, 0)
    waiting = submit(route.services[1], replace(route.at_second(step), timeout=0.05))
    with pytest.raises(OverloadedError, match=r"^step_id: the step did not come in time"):
        waiting.result(SECONDS)
    assert route.services[1].book.kept == 0


def test_so_many_may_wait_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_book, "MAX_WAITING", 2)
    book, answers = StepBook(), []
    step = SpanStep(("a",), (0,), "0", blocks=range(1))
    book.wait(step, answers.append, 1.0)
    with pytest.raises(InvalidValueError, match=r"^step_id: '0' .* an id that no other step has"):
        book.wait(replace(step, session_ids=("b",)), answers.append, 1.0)
    book.wait(replace(step, step_id="1"), answers.append, 1.0)
    with pytest.raises(OverloadedError, match="2 steps are waited for already"):
        book.wait(replace(step, step_id="2"), answers.append, 1.0)
    book.expire(0.5, ask=True)
    assert (len(answers), book.kept) == (0, 2)
    book.expire(2.0)
    assert (len(answers), book.kept) == (2, 0)


def test_nobody_waits_for_whoever_has_gone() -> None:
    """Its step is not waited for, so that the model can be unloaded; others go on waiting for the same step."""
    book, answers = StepBook(), []
    step = SpanStep(("a",), (0,), "0", blocks=range(1))
    book.wait(step, answers.append, 100.0, lambda: True)
    book.wait(step, answers.append, 100.0)
    book.expire(0.0)
    assert not answers
    book.expire(0.0, ask=True)
    assert len(answers) == 1
    assert book.kept == 1


def test_outputs_in_the_encoding_of_the_step(grouped: Served, route: Route, hidden_states: torch.Tensor) -> None:
    """bfloat16 keeps 8 bits of each number, int8 is off by absmax / 254 of its block; the layers spread that."""
    expected = grouped.server.run_chain(hidden_states[:1, :8])
    sizes = []
    for encoding, most in (("float32", 1e-5), ("float16", 0.01), ("bfloat16", 0.05), ("int8", 0.08)):
        sessions = route.open()
        step = replace(route.step(hidden_states[:1, :8], sessions, 0), states=encode(hidden_states[:1, :8], encoding))
        submit(route.services[0], step).result(SECONDS)
        output = submit(route.services[1], route.at_second(step)).result(SECONDS)
        assert output.states is not None
        assert output.states.encoding == encoding
        sizes.append(len(output.states.data))
        error = (states_of(output) - expected).abs().max() / expected.abs().max()
        assert error < most
    assert sizes == [4 * 8 * 128, 2 * 8 * 128, 2 * 8 * 128, 8 * (128 + 8)]


SHAPE = SpanShape(range(2, 5), 4)
GOOD = {
    "session_id": ["a", "b"], "start_position": [0, 3], "step_id": "x", "hidden_states": torch.zeros(32).byte().numpy(),
    "encoding": "float32", "shape": [2, 1, 4], "blocks": [2, 4], "timeout": 2.0,
    "next": hops_to_json((Hop("h:1", range(4, 6), ("c", "d")), Hop("i:1", range(6, 7), ("e", "f")))),
}  # fmt: skip


def test_a_request_says_which_step_it_is() -> None:
    step = read_step(GOOD, SHAPE)
    assert (step.session_ids, step.starts, step.blocks, step.timeout) == (("a", "b"), (0, 3), range(2, 4), 2.0)
    assert [hop.address for hop in step.next] == ["h:1", "i:1"]
    bare = dict.fromkeys(GOOD) | {"session_id": ["a"], "start_position": [0], "step_id": "x"}
    assert read_step(bare, SHAPE) == SpanStep(("a",), (0,), "x", None, range(2, 5), (), 10.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"session_id": []}, "session_id: .. is not allowed; allowed: one or more, each session once"),
        ({"session_id": ["a", "a"]}, "session_id: .'a', 'a'. "),
        ({"start_position": [0]}, "start_position: .0. is not allowed; allowed: 2 numbers, 0 or more"),
        ({"start_position": [0, -1]}, "start_position: .0, -1. "),
        ({"step_id": ""}, "step_id: '' is not allowed; allowed: 1 to 128 characters"),
        ({"blocks": [1, 4]}, "blocks: .1, 4. is not allowed; allowed: start and end inside 2:5"),
        ({"blocks": [3, 3]}, "blocks: .3, 3. "),
        ({"blocks": [2]}, "blocks: .2. "),
        ({"encoding": "float64"}, "encoding: 'float64' "),
        ({"encoding": None}, "encoding: None .* together with hidden_states"),
        ({"shape": None}, "shape: None "),
        ({"shape": [1, 2, 4]}, "shape: .1, 2, 4. is not allowed; allowed: .2, T, 4., T 1 or more"),
        ({"shape": [2, 1, 3]}, "shape: "),
        ({"shape": [2, 2, 4]}, "hidden_states: .* 64 bytes, as float32 of the shape .2, 2, 4. has"),
        ({"hidden_states": None}, "encoding: 'float32' .* only together with hidden_states"),
        ({"timeout": 0.0}, "timeout: 0.0 .* more than 0, up to 3600 seconds"),
        ({"timeout": float("nan")}, "timeout: nan "),
        ({"next": "x"}, "next: 'x' .* a JSON list of"),
        ({"next": hops_to_json((Hop("h:1", range(5, 6), ("c", "d")),))}, "next: 'blocks from 5' .* blocks from 4 on"),
        ({"next": hops_to_json((Hop("h:1", range(4, 6), ("c",)),))}, "next: .* an address and 2 session_ids per hop"),
    ],
    ids=str,
)
def test_a_request_that_is_wrong_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidValueError, match=f"^{message}"):
        read_step(GOOD | changes, SHAPE)


def test_a_stopping_service_answers_what_is_left(servers: list[LocalServer], hidden_states: torch.Tensor) -> None:
    service = servers[0].span(Network().connect)
    session = servers[0].open(64)
    step = SpanStep((session,), (0,), token_hex(8), encode(hidden_states[:1, :20], "float32"), range(0, 2))
    answer = submit(service, step)
    service.stop()
    servers[0].table.close(session)
    with_result_or_error = answer.exception(SECONDS)
    assert with_result_or_error is None or isinstance(with_result_or_error, CorollaError)
