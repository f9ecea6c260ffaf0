"""What a user may ask of a server, and the command line of tritonserver that follows from it."""

from dataclasses import dataclass
from pathlib import Path

from corolla.errors import InvalidValueError
from corolla.reachability.announced import Announced, announced_address
from corolla.server.checks import MIN_SHM_BYTES

EXIT_TIMEOUT_SECONDS = 20
"""How long tritonserver may wait for requests in flight when it is told to stop."""

DRAIN_TIMEOUT_SECONDS = 30.0
"""How long sessions in use may go on before that."""

_FALSE = ("false", "False", "0", "off")


@dataclass(frozen=True)
class ServerOptions:
    """One server; a port 0 means any free one. `flags` go to tritonserver as they are and override ours."""

    repository: Path
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    flags: tuple[str, ...] = ()
    backends: Path | None = None
    """Folder of the python-based backends; None: the project's own."""
    run_directory: Path | None = None
    """A new or empty folder on shared memory; None: a fresh one in /dev/shm."""
    min_shm_bytes: int = MIN_SHM_BYTES
    announce_address: str | None = None
    """HOST or HOST:PORT at which other servers reach this one's gRPC endpoint; None: as `announced_address` says."""
    drain_timeout: float = DRAIN_TIMEOUT_SECONDS
    """Seconds that sessions in use have to end, or to go on elsewhere, when the server is to stop."""

    def __post_init__(self) -> None:
        if not self.repository.is_dir():
            raise InvalidValueError("REPO", str(self.repository), "a folder with models, as `corolla init` writes it")
        if self.backends is not None and not self.backends.is_dir():
            raise InvalidValueError("--backends", str(self.backends), "a folder with one folder per backend")
        if not self.serves("http"):
            raise InvalidValueError(
                "--allow-http", "false", "true: health and recovery go over HTTP; keep it local with --host 127.0.0.1"
            )

    def given(self, flag: str) -> list[str]:
        """The values given for a tritonserver flag, in order, as in `--flag=value` or `--flag value`."""
        values = []
        for position, word in enumerate(self.flags):
            name, equals, value = word.partition("=")
            if name == flag:
                values.append(value if equals else next(iter(self.flags[position + 1 : position + 2]), ""))
        return values

    def serves(self, service: str) -> bool:
        """Whether the service (http, grpc or metrics) is on."""
        return (self.given(f"--allow-{service}") or ["true"])[-1] not in _FALSE

    def address(self, service: str) -> str:
        """The address the service listens on."""
        return (self.given(f"--{service}-address") or [self.host])[-1]

    def announced(self, grpc_port: int) -> Announced:
        """What other servers are told of its gRPC endpoint, on the port that was chosen."""
        return announced_address(self.announce_address, self.address("grpc"), grpc_port)

    def http_headers(self) -> dict[str, str]:
        """The headers that a restricted HTTP API wants, from `--http-restricted-api=APIS:KEY=VALUE`."""
        return dict(value.rpartition(":")[2].split("=", 1) for value in self.given("--http-restricted-api"))

    def tritonserver_flags(self, backend_directory: Path, ports: dict[str, int]) -> list[str]:
        """The flags for tritonserver; `ports` per service."""
        ours = [
            f"--backend-directory={backend_directory}",
            f"--exit-timeout-secs={EXIT_TIMEOUT_SECONDS}",
        ]
        for service, port in ports.items():
            ours += [f"--{service}-address={self.host}", f"--{service}-port={port}"]
        if not self.given("--model-control-mode"):
            ours += ["--model-control-mode=explicit", "--load-model=*"]
        if not self.given("--strict-model-config"):
            ours.append("--disable-auto-complete-config")
        kept = [flag for flag in ours if not self.given(flag.partition("=")[0])]
        return [f"--model-repository={self.repository.resolve()}", *kept, *self.flags]
