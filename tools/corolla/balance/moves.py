"""When a server gives up its blocks for others, of which the swarm is shorter."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from corolla.balance.choice import best_start
from corolla.balance.placement import Placement, worth
from corolla.peers.record import PeerRecord, PeerState

BALANCE_THRESHOLD = 0.75
"""Servers move only while the weakest block carries less than this share of what it could."""
LEAST_GAIN = 1.1
"""And only if the weakest block will carry so many times as much: a move costs a server the time to load its blocks."""
MOST_IN_MOTION = 0.1
"""Share of the servers, but one at least, that may be starting, leaving or moving at the same time."""
_NOISE = 1e-9


@dataclass(frozen=True)
class Move:
    """A server, by its place in the placement, and the first of its new blocks."""

    server: int
    start: int


def moves_now(peers: Sequence[PeerRecord], blocks: int) -> dict[str, range]:
    """The servers that are to move now, by `peer_id`, and the blocks of a model that they are to take instead.

    All servers that see the same records make the same plan, so they need not talk about who goes first.
    """
    in_motion = sum(peer.state is not PeerState.ONLINE for peer in peers)
    at_once = max(1, int(MOST_IN_MOTION * len(peers))) - in_motion
    if at_once <= 0:
        return {}
    placement = Placement.of(peers, blocks)
    return {
        placement.peer_ids[move.server]: range(move.start, move.start + int(placement.sizes[move.server]))
        for move in planned_moves(placement, at_once)[:at_once]
    }


def may_leave(others: Sequence[PeerRecord], own: range, blocks: int) -> bool:
    """Can the model do without a server that holds the blocks `own`? Asked once more when the others know of the plan.

    It can if others that are online hold all of these, or if it is not whole with them either.
    """
    elsewhere = {block for peer in others if peer.state is PeerState.ONLINE for block in peer.blocks}
    return elsewhere.issuperset(own) or not elsewhere.union(own).issuperset(range(blocks))


def planned_moves(placement: Placement, at_once: int) -> list[Move]:
    """What brings the swarm into balance, the most useful first; empty if it is balanced or if little would be gained.

    The first `at_once` moves can be made together, then the next: while they are made, every block has an online holder
    that stays, if every block had one before.
    """
    if balance(placement) >= BALANCE_THRESHOLD:
        return []
    moves: list[Move] = []
    after = placement
    may_move = placement.movable & placement.online
    while True:
        if len(moves) % at_once == 0:
            staying = placement.online.copy()
        move = _best_move(after, may_move & _dispensable(after, staying))
        if move is None:
            break
        moves.append(move)
        after = after.moved(move.server, move.start)
        may_move[move.server] = staying[move.server] = False
    return moves if after.weakest > LEAST_GAIN * placement.weakest else []


def balance(placement: Placement) -> float:
    """What the weakest block carries, as a share of what it does in the best placement of the same servers.

    The best that is found: from here, and from nothing, servers take the best blocks in turn until none gains.
    """
    if placement.weakest >= BALANCE_THRESHOLD * placement.mean:
        return placement.weakest / placement.mean if placement.mean else 1.0
    best = max(_settled(start).weakest for start in (placement, _placed_anew(placement)))
    return placement.weakest / best if best else 1.0


def _settled(placement: Placement) -> Placement:
    """After moves until none gains, without a care for who is online."""
    for _ in range(4 * len(placement.peer_ids)):
        move = _best_move(placement, placement.movable)
        if move is None:
            break
        placement = placement.moved(move.server, move.start)
    return placement


def _placed_anew(placement: Placement) -> Placement:
    """All movable servers taken out and put back one by one, the largest first."""
    carried = placement.rates[~placement.movable] @ placement.held[~placement.movable]
    starts = placement.starts.copy()
    order = np.lexsort([-placement.rates, -placement.sizes])
    for server in order[placement.movable[order]]:
        size, rate = int(placement.sizes[server]), float(placement.rates[server])
        starts[server] = best_start(carried, rate, size, placement.mean)
        carried[starts[server] : starts[server] + size] += rate
    return replace(placement, starts=starts)


def _dispensable(placement: Placement, staying: np.ndarray) -> np.ndarray:
    """bool [N]: would every block keep a holder of those staying without this one? All, if some block has none now."""
    held = placement.held
    holders = held[staying].sum(axis=0)
    return ~(held & (holders < 2)).any(axis=1) if holders.all() else np.ones(len(held), bool)


def _best_move(placement: Placement, may_move: np.ndarray) -> Move | None:
    """The move that gains most; None if none gains anything."""
    servers = np.flatnonzero(may_move)
    held, rates, sizes = placement.held[servers], placement.rates[servers, None], placement.sizes[servers]
    carried = placement.carried
    without = carried - held * rates
    gains = worth(without + rates, placement.mean) - worth(without, placement.mean)
    sums = np.concatenate([np.zeros((len(servers), 1)), gains.cumsum(axis=1)], axis=1)
    best, found = _NOISE * float(-worth(carried, placement.mean).sum()), None
    for size in np.unique(sizes):
        rows = np.flatnonzero(sizes == size)
        windows = sums[rows, size:] - sums[rows, : placement.blocks + 1 - size]
        gained = windows - windows[np.arange(len(rows)), placement.starts[servers[rows]], None]
        row, start = np.unravel_index(gained.argmax(), gained.shape)
        if gained[row, start] > best:
            best, found = gained[row, start], Move(int(servers[rows[row]]), int(start))
    return found
