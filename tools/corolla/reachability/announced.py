"""The address that a server announces to others."""

import socket
from dataclasses import dataclass

from corolla.errors import InvalidValueError
from corolla.reachability.address import Address

_SOMEWHERE = {"0.0.0.0": (socket.AF_INET, "192.0.2.1"), "::": (socket.AF_INET6, "2001:db8::1")}
"""An address that is not on this machine, for each address that means all of this machine's."""
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True)
class Announced:
    """The address, the port that is listened on, and a warning where others cannot reach it."""

    address: Address
    listening_port: int
    warning: str | None


def announced_address(wanted: str | None, host: str, grpc_port: int) -> Announced:
    """What a server that listens on `host` and `grpc_port` announces.

    `wanted` is HOST or HOST:PORT, as of --announce-address. Without it, that is the address it listens on, or if it
    listens on all, that of the interface by which this machine reaches others. InvalidValueError for one that nobody
    can dial.
    """
    if wanted:
        address = Address.parse("--announce-address", wanted, grpc_port)
        if address.host in _SOMEWHERE:
            raise InvalidValueError("--announce-address", wanted, "an address at which others reach this machine")
    else:
        address = Address(_own_address(host) if host in _SOMEWHERE else host, grpc_port)
    warning = None
    if address.is_loopback():
        warning = (
            f"announcing {address}, which only servers on this machine can reach; for others, listen on an address of "
            "the network (--host 0.0.0.0) and, behind a NAT or a proxy, give --announce-address"
        )
    return Announced(address, grpc_port, warning)


def _own_address(listening: str) -> str:
    """The address of the interface towards other machines; nothing is sent. Loopback where there is none."""
    family, somewhere = _SOMEWHERE[listening]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((somewhere, 9))
        except OSError:
            return _LOOPBACK[listening]
        return str(probe.getsockname()[0])
