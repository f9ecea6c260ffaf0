"""Which requests of a batch can run together."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class BlocksRequest:
    """`hidden_states` [B, T, H]; with sessions, one id per row; without `starts`, rows go on where they are.

    With `hypo_ids`, row i continues the cache of row `hypo_ids[i]` (beam search). `adapters` names one per row, or none
    by an empty text; with sessions, they must be those that the sessions were opened with.
    """

    hidden_states: torch.Tensor
    session_ids: list[str] | None = None
    starts: list[int] | None = None
    hypo_ids: list[int] | None = None
    adapters: list[str] | None = None


SHORT, LONG, ALONE = range(3)
"""Kinds of groups, in the order in which they run."""


def group_requests(requests: Sequence[BlocksRequest], most_rows: int) -> list[list[int]]:
    """Indices of requests that can run at once, in the order in which they must run.

    Short steps, with positions given, fill groups of up to `most_rows` rows of one position each. Other requests
    join those of the same length, if all or none have sessions. Steps of the same session stay in order, in groups
    after each other; a reordering or a step without a position runs by itself.
    """
    groups: dict[tuple[int, int, int, bool], list[int]] = defaultdict(list)
    turns: dict[str, int] = defaultdict(int)
    number: dict[int, int] = defaultdict(int)
    filled: dict[int, int] = defaultdict(int)
    for index, request in enumerate(requests):
        ids = request.session_ids or []
        turn = max((turns[session_id] for session_id in ids), default=0)
        for session_id in ids:
            turns[session_id] = turn + 1
        length = request.hidden_states.shape[1]
        rows = len(ids) * length
        if ids and (request.hypo_ids is not None or request.starts is None):
            groups[turn, ALONE, index, True].append(index)
        elif 0 < rows <= most_rows:
            if filled[turn] + rows > most_rows:
                number[turn] += 1
                filled[turn] = 0
            filled[turn] += rows
            groups[turn, SHORT, number[turn], True].append(index)
        else:
            groups[turn, LONG, length, bool(ids)].append(index)
    return [groups[key] for key in sorted(groups)]
