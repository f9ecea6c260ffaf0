"""The thread that moves a server: what it does in which order, and when it lets it be."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from corolla.balance.mover import Mover
from corolla.balance.policy import MovePolicy
from corolla.errors import CorollaError
from corolla.peers.record import PeerRecord, PeerState
from test_balance import server
from waiting import wait_until

BLOCKS = 8
ALL_ON_ONE_HALF = [server("a", 0, 4), server("b", 0, 4), server("c", 0, 4)]


class Swarm:
    """Server a and the others; what becomes of it is written down."""

    def __init__(self, peers: list[PeerRecord]) -> None:
        self.record, *self.others = peers
        self.away = False
        self.done: list[object] = []
        self.on_offline: Callable[[], None] = lambda: None
        self.fails = False

    def update(self, **changes: object) -> bool:
        self.record = replace(self.record, **changes)  # type: ignore[arg-type]
        self.done.append(changes)
        if self.record.state is PeerState.OFFLINE:
            self.on_offline()
        return True

    def peers(self) -> list[PeerRecord]:
        return [self.record, *self.others]

    def write(self, blocks: range) -> Path:
        self.done.append(("write", blocks))
        if self.fails:
            raise CorollaError("the hub does not answer")
        return Path("new")

    def change(self, write: Callable[[], Path]) -> None:
        self.done.append("change")
        assert write() == Path("new")
        self.update(state=PeerState.ONLINE)


@pytest.fixture
def swarm() -> Iterator[Swarm]:
    """One in which a is to move, looked at without long pauses."""
    swarm = Swarm(ALL_ON_ONE_HALF)
    movers: list[Mover] = []
    swarm.start = lambda: movers.append(  # type: ignore[attr-defined]
        Mover(BLOCKS, swarm, swarm, swarm.write, swarm.change, MovePolicy("a", random.Random(1), 0.002))
    )
    yield swarm
    for mover in movers:
        mover.close()


def test_a_server_fetches_leaves_moves_and_stays(swarm: Swarm) -> None:
    swarm.start()  # type: ignore[attr-defined]
    wait_until(lambda: len(swarm.done) >= 5)
    assert swarm.done == [
        ("write", range(4, 8)),
        {"state": PeerState.OFFLINE},
        "change",
        {"state": PeerState.JOINING, "start": 4, "end": 8},
        {"state": PeerState.ONLINE},
    ]


def test_it_comes_back_when_it_turns_out_to_be_needed(swarm: Swarm) -> None:
    """Both others leave in the same moment."""

    def leave() -> None:
        swarm.others = [replace(other, state=PeerState.OFFLINE) for other in swarm.others] + [server("d", 4, 8)]

    swarm.on_offline = leave
    swarm.start()  # type: ignore[attr-defined]
    wait_until(lambda: len(swarm.done) >= 3)
    assert swarm.done == [("write", range(4, 8)), {"state": PeerState.OFFLINE}, {"state": PeerState.ONLINE}]


def test_it_stays_where_it_is_when_the_weights_cannot_be_had(swarm: Swarm) -> None:
    swarm.fails = True
    swarm.start()  # type: ignore[attr-defined]
    wait_until(lambda: len(swarm.done) >= 2)
    assert set(swarm.done) == {("write", range(4, 8))}, "tried again later"


@pytest.mark.parametrize("reason", ["registry away", "starting", "balanced"])
def test_it_does_not_move(swarm: Swarm, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    swarm.away = reason == "registry away"
    if reason == "starting":
        swarm.record = replace(swarm.record, state=PeerState.JOINING)
    if reason == "balanced":
        swarm.others = [server("b", 4, 8)]
    pauses: list[float] = []
    monkeypatch.setattr(MovePolicy, "pause", lambda self: pauses.append(0.0) or 0.0)
    swarm.start()  # type: ignore[attr-defined]
    wait_until(lambda: len(pauses) >= 5)
    assert swarm.done == []
