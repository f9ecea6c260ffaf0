"""How a call of another server can fail."""

import re

from corolla.errors import CorollaError


class PeerError(CorollaError):
    """Another server did not do what it was asked for."""


class PeerUnreachableError(PeerError):
    """It cannot be reached, the connection broke, or it did not answer in time: it may or may not have computed."""


class PeerRefusalError(PeerError):
    """It answered with an error; `status` is its name in gRPC, UNAVAILABLE where Triton answered for the model."""

    def __init__(self, address: str, message: str) -> None:
        super().__init__(f"{address}: {message}")
        found = _STATUS.search(message)
        self.status = found[1] if found else "UNAVAILABLE"


_STATUS = re.compile(r"\b(INVALID_ARGUMENT|NOT_FOUND|UNAVAILABLE|INTERNAL): ")
