"""The errors a user may see. Every message says what was wrong and what to do or what is allowed."""


class CorollaError(Exception):
    """Base of all errors that are meant for a user; shown without a traceback."""


class InvalidRequestError(CorollaError):
    """A request can never be served as it is."""


class InvalidValueError(InvalidRequestError):
    """A field of a request, a flag or a file holds a value that is not allowed."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field}: {_shorten(value)} is not allowed; allowed: {allowed}")
        self.field = field


class CheckpointError(CorollaError):
    """A checkpoint folder cannot be used."""


class AdapterError(CheckpointError):
    """An adapter cannot be used, or not with this checkpoint."""


class NotFoundError(CorollaError):
    """Something named in a request does not exist on this server."""


class OverloadedError(CorollaError):
    """The server has no room now; the same request may succeed later."""


class EnvironmentProblemError(CorollaError):
    """The machine lacks something; the message says how to get it."""


def _shorten(value: object, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"
