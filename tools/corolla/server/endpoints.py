"""The addresses a server listens on: free ports are picked and taken ones refused before it starts."""

import random
import socket
from dataclasses import dataclass

import psutil

from corolla.errors import EnvironmentProblemError, InvalidValueError
from corolla.server.options import ServerOptions

_PICKED_PORTS = range(20000, 32768)
"""Below the ports that the kernel gives to outgoing connections, which might take one before the server does."""


@dataclass(frozen=True)
class Endpoint:
    """A host and port that clients on this machine reach."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def accepts(self) -> bool:
        """Whether something listens there."""
        try:
            socket.create_connection((self.host, self.port), timeout=5).close()
        except OSError:
            return False
        return True


@dataclass(frozen=True)
class Endpoints:
    """Where the services of one server are; None for one that is switched off."""

    http: Endpoint
    grpc: Endpoint | None
    metrics: Endpoint | None

    def __str__(self) -> str:
        named = [f"HTTP http://{self.http}"]
        named += [f"gRPC {self.grpc}"] if self.grpc else []
        named += [f"metrics http://{self.metrics}/metrics"] if self.metrics else []
        return ", ".join(named)


def choose_endpoints(options: ServerOptions) -> Endpoints:
    """Picks free ports where 0 is asked for; EnvironmentProblemError where a port is taken."""
    wanted = {"http": options.http_port, "grpc": options.grpc_port, "metrics": options.metrics_port}
    taken: set[int] = set()
    chosen: dict[str, Endpoint | None] = {}
    for service, port in wanted.items():
        if not options.serves(service):
            chosen[service] = None
            continue
        address = options.address(service)
        if port in taken:
            raise InvalidValueError(f"--{service}-port", port, "a port of its own for each of the three services")
        port = port or _pick_port(address, taken | set(wanted.values()))
        _require_free(service, address, port)
        taken.add(port)
        chosen[service] = Endpoint(_reachable(address), port)
    http = chosen["http"]
    assert http is not None
    return Endpoints(http, chosen["grpc"], chosen["metrics"])


def _pick_port(address: str, avoid: set[int]) -> int:
    for port in random.sample(_PICKED_PORTS, 200):
        if port not in avoid and _bind_error(address, port) is None:
            return port
    raise EnvironmentProblemError(f"no free port found on {address}: pass --http-port, --grpc-port, --metrics-port")


def _require_free(service: str, address: str, port: int) -> None:
    problem = port_problem(address, port)
    if problem is not None:
        raise EnvironmentProblemError(
            f"--{service}-port: port {port} on {address} cannot be used ({problem}); stop what uses it, or pass "
            f"another --{service}-port (0: any free one)"
        )


def port_problem(address: str, port: int) -> str | None:
    """Why a server cannot listen there; None if it can."""
    error = _bind_error(address, port)
    if error is None:
        return None
    owner = _listener(port)
    return (error.strerror or str(error)) + (f", by {owner}" if owner else "")


def _bind_error(address: str, port: int) -> OSError | None:
    try:
        family, kind, protocol, _, socket_address = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(socket_address)
            probe.listen()
    except OSError as error:
        return error
    return None


def _listener(port: int) -> str | None:
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr[1:2] == (port,) and connection.pid:
                return f"{psutil.Process(connection.pid).name()} with process id {connection.pid}"
    except psutil.Error:
        pass
    return None


def _reachable(address: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
