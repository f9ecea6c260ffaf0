"""Moves one server to the blocks of which the swarm is shortest, while it runs."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from corolla.balance.moves import may_leave, moves_now
from corolla.balance.policy import MovePolicy
from corolla.errors import CorollaError
from corolla.peers.record import PeerRecord, Peers, PeerState

_LOG = logging.getLogger("corolla.balance")


class OwnRecord(Protocol):
    """What this server is announced as; see Announcer."""

    @property
    def record(self) -> PeerRecord:
        """As it is now."""

    def update(self, **changes: object) -> bool:
        """Changes fields; False when others may not know soon."""


class Others(Protocol):
    """What is known of the swarm; see PeerDirectory."""

    @property
    def away(self) -> bool:
        """Whether it may be out of date."""

    def peers(self) -> Peers:
        """All records, this server's own among them."""


class Mover:
    """A thread that looks at the swarm now and then, as long as it is not closed.

    A server that is to move first fetches the weights of its new blocks, then announces that it leaves and asks once
    more whether it may. Then it is drained and serves the new repository.
    """

    def __init__(
        self,
        blocks: int,
        own: OwnRecord,
        others: Others,
        write: Callable[[range], Path],
        change: Callable[[Callable[[], Path]], None],
        policy: MovePolicy,
    ) -> None:
        """For a model of so many `blocks`.

        `write` fetches the weights of some blocks and writes a repository for them, beside the one that is served;
        `change` is that of Supervisor.
        """
        self._blocks = blocks
        self._own = own
        self._others = others
        self._write = write
        self._change = change
        self._policy = policy
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mover", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the looks; a move that has begun is not taken back."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(self._policy.pause()):
            if self._own.record.state is not PeerState.ONLINE or self._others.away:
                continue
            target = self._policy.look(self._moves())
            if target is not None:
                try:
                    self._move(target)
                except CorollaError as error:
                    _LOG.warning("not moving to blocks %d:%d: %s", target.start, target.stop, error)

    def _move(self, target: range) -> None:
        repository = self._write(target)
        own = self._own.record
        if self._moves().get(own.peer_id) != target:
            return
        told = self._own.update(state=PeerState.OFFLINE)
        self._closed.wait(self._policy.notice)
        others = [peer for peer in self._others.peers() if peer.peer_id != own.peer_id]
        if told and not self._others.away and may_leave(others, own.blocks, self._blocks):
            _LOG.info("moving from blocks %d:%d to %d:%d", own.start, own.end, target.start, target.stop)
            self._change(lambda: self._arrive(target, repository))
        elif self._own.record.state is PeerState.OFFLINE:
            self._own.update(state=PeerState.ONLINE)

    def _arrive(self, target: range, repository: Path) -> Path:
        self._own.update(state=PeerState.JOINING, start=target.start, end=target.stop)
        return repository

    def _moves(self) -> dict[str, range]:
        return moves_now(self._others.peers(), self._blocks)
