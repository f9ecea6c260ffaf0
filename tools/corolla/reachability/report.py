"""What a server says at its start about whether others reach it."""

import logging

from corolla.errors import CorollaError
from corolla.reachability.announced import Announced

_LOG = logging.getLogger("corolla.server")


def report_reachability(registry: str, announced: Announced) -> None:
    """Has a server of the registry dial this one, and logs the verdict; others have no use for one out of reach."""
    from corolla.reachability.asking import ask_peers, registered_peers  # a server by itself need not import gRPC

    if announced.warning:
        _LOG.warning("%s", announced.warning)
        return
    try:
        verdict = ask_peers(announced.address, registered_peers(registry, announced.address))
    except CorollaError as error:
        _LOG.warning("reachability of %s is not known: %s", announced.address, error)
        return
    if verdict.reachable:
        _LOG.info("reachable for other servers: %s", verdict.detail)
    elif verdict.reachable is None:
        _LOG.info("reachability of %s is not known: %s; %s", announced.address, verdict.detail, verdict.remedy)
    else:
        _LOG.error("NOT REACHABLE for other servers: %s; %s", verdict.detail, verdict.remedy)
