"""A generate loop for each route that some generation takes."""

import logging
from collections.abc import Callable
from threading import Lock

from corolla.generate.loop import GenerateLoop, LoopLimits
from corolla.generate.sequence import Sequence, StepFunction
from corolla.remote.trip import SpanError
from corolla.routing.route import Route

logger = logging.getLogger(__name__)


class RouteLoops:
    """Sequences of the same route step together, one message to each server. Loops that are empty are ended."""

    def __init__(
        self,
        step: StepFunction,
        release: Callable[[Sequence], None],
        limits: LoopLimits,
        rescue: Callable[[Sequence, SpanError], None],
    ) -> None:
        """See GenerateLoop."""
        self._step = step
        self._release = release
        self._limits = limits
        self._rescue = rescue
        self._loops: dict[Route, GenerateLoop] = {}
        self._members: dict[Route, int] = {}
        self._guard = Lock()
        self._stopping = False

    def join(self, sequence: Sequence) -> None:
        """Lets a sequence with open sessions take part in the loop of its route."""
        assert sequence.sessions is not None
        route = sequence.sessions.route
        with self._guard:
            empty = [] if route in self._loops else self._take_empty()
            loop = self._loops.get(route) or self._make(route)
            self._members[route] += 1
        loop.join(sequence)  # not under the guard: a loop that is stopping releases the sequence at once
        for ended in empty:
            ended.stop()

    def stop(self) -> None:
        """Ends all loops; all generations fail."""
        with self._guard:
            self._stopping = True
            loops = list(self._loops.values())
        for loop in loops:
            loop.stop()

    def _make(self, route: Route) -> GenerateLoop:
        def release(sequence: Sequence) -> None:
            self._count_left(route)
            self._release(sequence)

        def rescue(sequence: Sequence, error: SpanError) -> None:
            self._count_left(route)
            self._rescue(sequence, error)

        loop = self._loops[route] = GenerateLoop(self._step, release, self._limits, rescue)
        self._members[route] = 0
        if self._stopping:
            loop.stop()
        return loop

    def _count_left(self, route: Route) -> None:
        with self._guard:
            self._members[route] -= 1

    def _take_empty(self) -> list[GenerateLoop]:
        routes = [route for route, members in self._members.items() if not members]
        for route in routes:
            del self._members[route]
        return [self._loops.pop(route) for route in routes]
