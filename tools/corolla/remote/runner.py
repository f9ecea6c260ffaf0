"""Steps of many sequences through the spans of one route."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from corolla.errors import CorollaError
from corolla.remote.errors import PeerUnreachableError
from corolla.remote.peer import LocalBlocks
from corolla.remote.sessions import RouteSessions
from corolla.remote.trip import AbandonedError, SpanError, Trip, TripContext
from corolla.routing.route import LOCAL


@dataclass(frozen=True)
class RouteRow:
    """New positions [T, H] of one sequence from `start` on."""

    hidden_states: torch.Tensor
    sessions: RouteSessions
    start: int


@dataclass(frozen=True)
class _Batch:
    """Rows of one length; `hidden_states` [n, T, H] are the inputs of the span that is next."""

    rows: list[RouteRow]
    hidden_states: torch.Tensor

    @classmethod
    def of(cls, rows: list[RouteRow]) -> "_Batch":
        return cls(rows, torch.stack([row.hidden_states for row in rows]))


class RouteRunner:
    """Runs local spans in this process, and sends steps through the others. For use by several threads."""

    def __init__(self, context: TripContext, local: LocalBlocks | None) -> None:
        """`local` is None where the process hosts no blocks."""
        self._context = context
        self._local = local

    def run(
        self, rows: Sequence[RouteRow], is_abandoned: Callable[[], bool] = lambda: False
    ) -> list[torch.Tensor | CorollaError]:
        """The output [T, H] of each row, or its error: SpanError where a server failed. All rows have the same route.

        Rows of the same length are one message to each server.
        """
        by_length: dict[int, list[RouteRow]] = defaultdict(list)
        for row in rows:
            by_length[len(row.hidden_states)].append(row)
        results: dict[int, torch.Tensor | CorollaError] = {}
        batches = [_Batch.of(members) for members in by_length.values()]
        for batch, outcome in self._run(batches, is_abandoned):
            results |= {id(row): part for row, part in zip(batch.rows, outcome, strict=True)}
        return [results[id(row)] for row in rows]

    def _run(
        self, batches: list[_Batch], is_abandoned: Callable[[], bool]
    ) -> Iterator[tuple[_Batch, Sequence[torch.Tensor | CorollaError]]]:
        """What becomes of each batch; one that a server refuses is tried again row by row."""
        route = batches[0].rows[0].sessions.route
        for is_local, indices in groupby(range(len(route)), lambda index: route[index].peer_id == LOCAL):
            members = list(indices)
            step = self._step_locally if is_local else self._travel
            alive = []
            for batch, outcome in step(batches, members, is_abandoned):
                if isinstance(outcome, torch.Tensor):
                    alive.append(replace(batch, hidden_states=outcome))
                elif len(batch.rows) > 1 and _is_refusal(outcome):
                    for row in batch.rows:
                        yield from self._run([_Batch.of([row])], is_abandoned)
                else:
                    yield batch, [outcome] * len(batch.rows)
            batches = alive
        for batch in batches:
            yield batch, batch.hidden_states.unbind()

    def _step_locally(
        self, batches: list[_Batch], indices: list[int], is_abandoned: Callable[[], bool]
    ) -> Iterator[tuple[_Batch, torch.Tensor | CorollaError]]:
        assert self._local is not None, "no route has local spans where no blocks are hosted"
        for batch in batches:
            states = batch.hidden_states
            try:
                for index in indices:
                    spans = [row.sessions.spans[index] for row in batch.rows]
                    begun = time.monotonic()
                    states = self._local.step(
                        states, [span.id for span in spans], [row.start for row in batch.rows], spans[0].span.blocks
                    )
                    seconds = time.monotonic() - begun
                    self._context.observer.answered(spans[0].span, states.shape[0] * states.shape[1], seconds, None)
                yield batch, states
            except CorollaError as error:
                yield batch, error

    def _travel(
        self, batches: list[_Batch], indices: list[int], is_abandoned: Callable[[], bool]
    ) -> Iterator[tuple[_Batch, torch.Tensor | CorollaError]]:
        """All batches are on their way at once."""
        trips: list[Trip | CorollaError] = []
        for batch in batches:
            sessions = [[row.sessions.spans[index] for row in batch.rows] for index in indices]
            starts = [row.start for row in batch.rows]
            try:
                trips.append(Trip(self._context, sessions, starts, batch.hidden_states))
            except CorollaError as error:
                trips.append(error)
        for batch, trip in zip(batches, trips, strict=True):
            try:
                yield batch, trip.result(is_abandoned) if isinstance(trip, Trip) else trip
            except CorollaError as error:
                yield batch, error


def _is_refusal(error: CorollaError) -> bool:
    """Whether a server that works would not make the step, maybe for one row alone."""
    if isinstance(error, SpanError):
        return not isinstance(error.error, PeerUnreachableError)
    return not isinstance(error, AbandonedError)
