"""What `corolla serve` tells the processes of its server by environment variables."""

import os

PEER_ID = "COROLLA_PEER_ID"
"""Under which the server is announced; not set on a server by itself."""
REGISTRY = "COROLLA_REGISTRY"
"""The URL of the registry, in place of the one in the repository."""


def registry_url(written: str) -> str:
    """The registry to use where the repository says `written`; empty without one."""
    return os.environ.get(REGISTRY) or written


def own_peer_id() -> str:
    """That of this server; empty if it is not announced."""
    return os.environ.get(PEER_ID, "")
