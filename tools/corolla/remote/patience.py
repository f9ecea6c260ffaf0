"""How long to wait for other servers."""

from collections.abc import Callable
from dataclasses import dataclass

from corolla.routing.route import Span

STEP_TIMEOUT = 10.0
PUSH_GRACE = 0.5
FAILOVER_TIMEOUT = 60.0
SLOWEST = 8.0
"""So many times longer than expected a step may take: servers are shared, and the first steps are slow."""


def _unknown(span: Span, positions: int) -> float:
    return 0.0


@dataclass(frozen=True)
class Patience:
    """`step_timeout` seconds are given to every step, and more to long ones by what is `expected(span, positions)`.

    After a server said that it pushed its output on, the next one has `push_grace` seconds, and the time it is expected
    to take, to answer; then the asker sends the output itself.
    """

    step_timeout: float = STEP_TIMEOUT
    push_grace: float = PUSH_GRACE
    expected: Callable[[Span, int], float] = _unknown

    def deadline(self, span: Span, positions: int) -> float:
        """Seconds after which a server that has not answered a step is taken for gone."""
        return self.step_timeout + SLOWEST * self.expected(span, positions)

    def grace(self, span: Span, positions: int) -> float:
        """Seconds after which a pushed step that has not been answered is sent again."""
        return self.push_grace + 2 * self.expected(span, positions)
