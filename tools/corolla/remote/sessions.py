"""One sequence on the spans of its route."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from corolla.remote.history import History
from corolla.routing.route import LOCAL, Route, Span


@dataclass(frozen=True)
class SpanSession:
    """The session of a sequence on the server of a span. On LOCAL spans it is the sequence's own, without history."""

    span: Span
    id: str
    history: History = field(default_factory=History, compare=False)

    @property
    def is_remote(self) -> bool:
        """Whether another server runs the span."""
        return self.span.peer_id != LOCAL


@dataclass(frozen=True)
class RouteSessions:
    """The sessions of one sequence, span by span."""

    spans: tuple[SpanSession, ...]

    @property
    def route(self) -> Route:
        """The spans alone."""
        return tuple(session.span for session in self.spans)

    @property
    def remote(self) -> list[SpanSession]:
        """Those on other servers."""
        return [session for session in self.spans if session.is_remote]

    def replaced(self, replacements: "Mapping[Span, Iterable[SpanSession]]") -> "RouteSessions":
        """With other spans in the place of some."""
        return RouteSessions(
            tuple(new for session in self.spans for new in replacements.get(session.span, (session,)))
        )
