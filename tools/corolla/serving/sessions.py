"""What the sessions model answers."""

from collections.abc import Callable
from dataclasses import dataclass

from corolla.errors import InvalidValueError
from corolla.kv.session import OpenRequest
from corolla.kv.table import SessionTable, UnknownSessionError


@dataclass(frozen=True)
class SessionsReply:
    """The outputs of the sessions model. Fields about one session are empty or 0 where the reply is about none."""

    session_id: str
    max_length: int
    length: int
    reserved_tokens: int
    free_tokens: int
    total_tokens: int
    open_sessions: int
    waiting: int


@dataclass(frozen=True)
class SessionsService:
    """open, close and stat on the server's session table."""

    table: SessionTable

    def open(self, request: OpenRequest, is_cancelled: Callable[[], bool]) -> SessionsReply:
        """Opens a session; blocks while it waits for room. A session that nobody waits for is not kept."""
        session = self.table.open(request, is_cancelled)
        if is_cancelled():
            self.table.close(session.id)
        return self._reply(session.id, session.max_length, 0, len(session.slots))

    def close(self, session_id: str) -> SessionsReply:
        """Closes a session; `reserved_tokens` of the reply are those given back."""
        return self._reply(session_id, 0, 0, self.table.close(session_id))

    def stat(self, session_id: str | None) -> SessionsReply:
        """The state of the cache, and of one session if named."""
        if session_id is None:
            return self._reply("", 0, 0, 0)
        for status in self.table.sessions():
            if status.id == session_id:
                return self._reply(status.id, status.max_length, status.length, status.reserved_tokens)
        raise UnknownSessionError(session_id)

    def _reply(self, session_id: str, max_length: int, length: int, reserved: int) -> SessionsReply:
        cache = self.table.status()
        return SessionsReply(
            session_id=session_id,
            max_length=max_length,
            length=length,
            reserved_tokens=reserved,
            free_tokens=cache.free_tokens,
            total_tokens=cache.total_tokens,
            open_sessions=cache.open_sessions,
            waiting=cache.waiting,
        )


def required(field: str, value: object | None, operation: str) -> None:
    """InvalidValueError when an operation lacks a field."""
    if value is None:
        raise InvalidValueError(field, None, f"a value, for operation {operation!r}")
