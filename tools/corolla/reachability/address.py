"""Addresses of servers, as they are announced to others."""

import ipaddress
import socket
from dataclasses import dataclass

from corolla.errors import InvalidValueError


@dataclass(frozen=True)
class Address:
    """Host, which is a name or an IP address, and port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, field: str, text: str, default_port: int = 0) -> "Address":
        """HOST:PORT, [IPv6]:PORT, and with a `default_port` one without a port; InvalidValueError, naming `field`."""
        host, colon, port = text.rpartition(":")
        if default_port and (not colon or text.endswith("]") or (text.count(":") > 1 and "[" not in text)):
            host, port = text, str(default_port)
        host = host.removeprefix("[").removesuffix("]")
        if not host or any(letter.isspace() or letter == "/" for letter in host) or not _is_port(port):
            raise InvalidValueError(field, text, "HOST:PORT, such as 10.0.0.7:8001 or gpu7.example.com:8001")
        return cls(host, int(port))

    def resolve(self) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
        """The IP addresses of the host, none for a name that is not known."""
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except OSError:
            return []
        return [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]

    def is_loopback(self) -> bool:
        """Whether it means each machine itself."""
        return any(found.is_loopback for found in self.resolve())


def _is_port(text: str) -> bool:
    return text.isdecimal() and 0 < int(text) < 2**16
