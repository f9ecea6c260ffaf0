"""What the sessions model answers."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from corolla.errors import InvalidValueError
from corolla.kv.session import OpenRequest
from corolla.kv.table import SessionTable, UnknownSessionError
from corolla.serving.lora import AdaptersService


@dataclass(frozen=True)
class SessionsReply:
    """The outputs of the sessions model. Fields about one session are empty or 0 where the reply is about none.

    `adapters` is a JSON list where the reply is about them, else empty; `dialled` is an object that says what Dialled
    does where an address was dialled, else empty.
    """

    session_id: str
    adapter: str
    adapters: str
    dialled: str
    max_length: int
    length: int
    reserved_tokens: int
    free_tokens: int
    total_tokens: int
    open_sessions: int
    waiting: int


@dataclass(frozen=True)
class SessionsService:
    """open, close and stat on the server's session table; loading and unloading of its adapters; dialling."""

    table: SessionTable
    adapters: AdaptersService

    def open(self, request: OpenRequest, is_cancelled: Callable[[], bool]) -> SessionsReply:
        """Opens a session; blocks while it waits for room. A session that nobody waits for is not kept."""
        session = self.table.open(request, is_cancelled)
        if is_cancelled():
            self.table.close(session.id)
        return self._reply(session.id, session.max_length, 0, len(session.slots), request.adapter or "")

    def close(self, session_id: str) -> SessionsReply:
        """Closes a session; `reserved_tokens` of the reply are those given back."""
        return self._reply(session_id, 0, 0, self.table.close(session_id))

    def stat(self, session_id: str | None) -> SessionsReply:
        """The state of the cache, and of one session if named."""
        if session_id is None:
            return self._reply("", 0, 0, 0)
        for status in self.table.sessions():
            if status.id == session_id:
                return self._reply(
                    status.id, status.max_length, status.length, status.reserved_tokens, status.adapter
                )
        raise UnknownSessionError(session_id)

    def load_adapter(self, name: str, source: str) -> SessionsReply:
        """See AdaptersService.load."""
        self.adapters.load(name, source)
        return self.list_adapters()

    def unload_adapter(self, name: str) -> SessionsReply:
        """See AdapterTable.unload."""
        self.adapters.unload(name)
        return self.list_adapters()

    def list_adapters(self) -> SessionsReply:
        """Name, source, rank and number of sessions of each."""
        listed = [
            {"name": adapter.name, "source": adapter.source, "rank": adapter.rank, "sessions": adapter.sessions}
            for adapter in self.adapters.loaded()
        ]
        return replace(self.stat(None), adapters=json.dumps(listed))

    def dial(self, address: str) -> SessionsReply:
        """See corolla.reachability.dialing.dial."""
        from corolla.reachability.dialing import dial  # the start need not wait for gRPC

        return replace(self.stat(None), dialled=json.dumps(asdict(dial(address))))

    def _reply(
        self, session_id: str, max_length: int, length: int, reserved: int, adapter: str = ""
    ) -> SessionsReply:
        cache = self.table.status()
        return SessionsReply(
            session_id=session_id,
            adapter=adapter,
            adapters="",
            dialled="",
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
