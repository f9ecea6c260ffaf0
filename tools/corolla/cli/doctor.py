"""`corolla doctor`: is this machine fit to serve?"""

from collections.abc import Iterator
from typing import Any

import click

from corolla.cli.repository_options import repository_options
from corolla.cli.server_options import server_options
from corolla.errors import CorollaError
from corolla.reachability.announced import announced_address
from corolla.repository.choices import Choices
from corolla.server.checks import Check, check_compiler, describe, run_checks
from corolla.server.machine_checks import check_gpu, check_memory, check_port, check_versions


@click.command(
    epilog="""\b
    Examples:
      corolla doctor
      corolla doctor ./my-llama --dtype bfloat16
      corolla doctor ./repository --announce-address 203.0.113.5:8001 --peer 198.51.100.7:8001"""
)
@click.argument("checkpoint", metavar="[CHECKPOINT|REPO]", required=False)
@click.option(
    "--peer",
    "peers",
    multiple=True,
    metavar="HOST:PORT",
    help="gRPC endpoint of a server that is asked to dial this one; may be given repeatedly. [default: some of the "
    "registry]",
)
@server_options
@repository_options
def command(
    checkpoint: str | None,
    peers: tuple[str, ...],
    host: str,
    grpc_port: int,
    announce_address: str | None,
    http_port: int,
    metrics_port: int,
    **choices: Any,
) -> None:
    """Check what a server needs on this machine; say what to do about what is missing.

    With CHECKPOINT or REPO, also whether it can be read and fits; with a registry or --peer, whether other servers can
    reach one that listens here. Takes the options of `corolla serve`. Exits with status 1 if anything is missing.
    """
    ports = {"http": http_port, "grpc": grpc_port, "metrics": metrics_port}
    fit = True
    for check in _checks(checkpoint, Choices(**choices), peers, host, ports, announce_address):
        click.echo(("ok      " if check.ok else "PROBLEM ") + describe(check))
        fit &= check.ok
    if not fit:
        raise SystemExit(1)


def _checks(
    checkpoint: str | None,
    choices: Choices,
    peers: tuple[str, ...],
    host: str,
    ports: dict[str, int],
    announce_address: str | None,
) -> Iterator[Check]:
    yield check_versions()
    yield from run_checks()
    yield check_compiler()
    yield check_memory()
    yield from (check_port(service, host, port) for service, port in ports.items())
    registry, device = choices.registry, choices.device
    if checkpoint is not None:
        from corolla.server.model_checks import check_model

        plan, found = check_model(checkpoint, choices)
        yield from found
        if plan is not None:
            registry, device = plan.registry, plan.device
    yield check_gpu(device)
    if registry or peers:
        yield from _swarm_checks(registry, peers, host, ports["grpc"], announce_address)


def _swarm_checks(
    registry: str, peers: tuple[str, ...], host: str, grpc_port: int, announce_address: str | None
) -> Iterator[Check]:
    from corolla.server.model_checks import check_reachability, check_registry

    if registry:
        yield check_registry(registry)
    if not grpc_port:
        yield Check("reachability", not peers, "not checked with --grpc-port 0", "give the port that is forwarded")
        return
    try:
        announced = announced_address(announce_address, host, grpc_port)
    except CorollaError as error:
        yield Check("reachability", False, str(error))
        return
    yield check_reachability(announced, host, registry, peers)
