"""`corolla serve`: start and supervise a server for a model repository."""

import json
import logging
import math
import signal
import sys
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import click

from corolla.balance.policy import LOOK_SECONDS
from corolla.cli.own_blocks import blocks_that_fit, own_blocks
from corolla.cli.repository_argument import repository_to_serve
from corolla.cli.repository_options import repository_options
from corolla.cli.server_options import server_options
from corolla.errors import InvalidValueError
from corolla.peers.membership import DEFAULT_THROUGHPUT, MembershipOptions, membership
from corolla.peers.record import Throughput
from corolla.reachability.report import report_reachability
from corolla.repository.reading import registry_of
from corolla.server.options import DRAIN_TIMEOUT_SECONDS, ServerOptions
from corolla.server.supervisor import ReadyServer, Supervisor


class ThroughputType(click.ParamType):
    """Three numbers above 0, as in `Throughput`."""

    name = "N,N,N"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> Throughput:
        """InvalidValueError for anything else."""
        try:
            inference, forward, network = map(float, value.split(","))
            if not 0 < min(inference, forward, network) <= max(inference, forward, network) < math.inf:
                raise ValueError
        except ValueError as error:
            raise InvalidValueError("--throughput", value, "three numbers above 0, such as 120,4000,8000") from error
        return Throughput(inference, forward, network)


_EXAMPLES = """
Try it from another terminal:

  {programs}/corolla generate "A block range is" --address {grpc}

  curl -N -X POST http://{http}/v2/models/generate/generate_stream \\
    -d '{{"text_input": "A block range is", "max_tokens": 32, "stream": true}}'

  {programs}/python - <<'EOF'
  import numpy as np
  import tritonclient.http as triton
  client = triton.InferenceServerClient("{http}")
  ids = triton.InferInput("input_ids", [1, 4], "INT64")
  ids.set_data_from_numpy(np.array([[1, 2, 3, 4]]))
  print(client.infer("pipeline", [ids]).as_numpy("logits").shape)
  EOF

Stop the server with Ctrl-C.
"""


@click.command(
    context_settings={"ignore_unknown_options": True},
    epilog="""\b
    Examples:
      corolla serve ./my-llama --dtype bfloat16
      corolla serve ./my-llama --num-blocks 8 --registry etcd://10.0.0.1:2379
      corolla serve ./model_repository
      corolla serve ./model_repository --host 0.0.0.0 --http-port 9000 --log-file server.log
      corolla serve ./model_repository --log-verbose=1 --metrics-interval-ms=500""",
)
@click.argument("checkpoint", metavar="CHECKPOINT|REPO")
@server_options
@click.option(
    "--run-dir",
    "run_directory",
    type=click.Path(path_type=Path),
    help="New or empty folder for the KV cache and the session table. [default: a fresh one in /dev/shm]",
)
@click.option(
    "--backends", type=click.Path(path_type=Path), help="Folder of the backends. [default: that of this checkout]"
)
@click.option("--log-file", type=click.Path(path_type=Path), help="File for the server's log. [default: stderr]")
@click.option(
    "--drain-timeout",
    type=click.FloatRange(0, 86400),
    default=DRAIN_TIMEOUT_SECONDS,
    show_default=True,
    help="Seconds that sessions in use have to end, or to go on elsewhere, when the server is told to stop.",
)
@click.option("--ready-file", type=click.Path(path_type=Path), help="File to hold the addresses while it serves.")
@click.option(
    "--num-blocks",
    type=click.IntRange(1),
    help="Host so many blocks of CHECKPOINT: those of which the servers in --registry are shortest, now and later. "
    "[default: with --registry and neither --blocks nor --ranges, as many as fit; if all do, all]",
)
@click.option(
    "--balance-period",
    type=click.FloatRange(0, min_open=True),
    default=LOOK_SECONDS,
    show_default=True,
    help="Seconds between looks whether other blocks need this server more; with --num-blocks.",
)
@click.option(
    "--throughput",
    type=ThroughputType(),
    help="Tokens/s of one block: single steps, long forwards, network. [default: as measured by --measure here or in "
    "`corolla plan`; if never, as fast as others are by default]",
)
@click.option("--measure", is_flag=True, help="Measure it first, unless that was done before; takes minutes.")
@click.option("--examples", is_flag=True, help="Print calls to try once it serves.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Folder for the repository of CHECKPOINT. [default: one in ~/.local/state/corolla, named after what it holds]",
)
@repository_options
@click.argument("tritonserver_flags", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(
    ctx: click.Context,
    checkpoint: str,
    host: str,
    http_port: int,
    grpc_port: int,
    metrics_port: int,
    run_directory: Path | None,
    backends: Path | None,
    log_file: Path | None,
    drain_timeout: float,
    ready_file: Path | None,
    announce_address: str | None,
    num_blocks: int | None,
    balance_period: float,
    throughput: Throughput | None,
    measure: bool,
    examples: bool,
    out: Path | None,
    tritonserver_flags: tuple[str, ...],
    **choices: Any,
) -> None:
    """Serve CHECKPOINT, or the models of REPO, until interrupted.

    CHECKPOINT is a local folder in Hugging Face format or org/name on the hub; its repository is written first, as by
    `corolla init` with the same options. REPO was written before; of these options, --registry wins over what it says.

    tritonserver is started and watched: it is started again if it dies, and a model whose process dies is loaded
    again. Any other flag goes to tritonserver as it is.
    """
    own = None
    num_blocks = num_blocks or blocks_that_fit(checkpoint, out, choices)
    if num_blocks is not None:
        own = own_blocks(ctx, checkpoint, out, choices, num_blocks, throughput or DEFAULT_THROUGHPUT, balance_period)
    repository = own.first() if own else repository_to_serve(ctx, checkpoint, out, choices)
    options = ServerOptions(
        repository,
        host,
        http_port,
        grpc_port,
        metrics_port,
        tritonserver_flags,
        backends,
        run_directory,
        announce_address=announce_address,
        drain_timeout=drain_timeout,
    )
    registry = choices["registry"] or registry_of(repository)
    speed = throughput or _throughput(repository, registry, measure=measure)
    member = MembershipOptions(registry, speed, movable=own is not None)
    with ExitStack() as stack:
        sink = stack.enter_context(log_file.open("a")) if log_file else sys.stderr
        _log_to({sys.stderr, sink})
        if ready_file:
            stack.callback(ready_file.unlink, missing_ok=True)
        joined = stack.enter_context(membership(options, member))
        if own and joined:
            options = replace(options, repository=own.settled(joined, repository))

        def announce(ready: ReadyServer) -> None:
            if joined:
                joined.ready(ready)
            click.echo(f"corolla: serving {supervisor.repository} at {ready.endpoints}")
            if registry and ready.endpoints.grpc:
                announced = options.announced(ready.endpoints.grpc.port)
                threading.Thread(target=report_reachability, args=(registry, announced), daemon=True).start()
            if ready_file:
                _write_ready_file(ready_file, ready)
            if examples:
                programs = Path(sys.prefix, "bin")
                if programs.is_relative_to(Path.cwd()):
                    programs = programs.relative_to(Path.cwd())
                click.echo(_EXAMPLES.format(http=ready.endpoints.http, grpc=ready.endpoints.grpc, programs=programs))

        supervisor = Supervisor(options, announce, sink, joined.down if joined else lambda stopping: None)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda *_: supervisor.stop())
        if own and joined:
            stack.enter_context(own.moving(joined, supervisor))
        supervisor.run()


def _throughput(repository: Path, registry: str, *, measure: bool) -> Throughput:
    """What a server with blocks announces."""
    if not registry or not (repository / "chain").is_dir():
        return DEFAULT_THROUGHPUT
    from corolla.planning.throughput import known_throughput, measured_throughput  # takes seconds to import

    return measured_throughput(repository) if measure else known_throughput(repository) or DEFAULT_THROUGHPUT


def _log_to(streams: set[TextIO]) -> None:
    logger = logging.getLogger("corolla")
    logger.setLevel(logging.INFO)
    for stream in streams:
        handler = logging.StreamHandler(stream)
        handler.setFormatter(logging.Formatter("corolla: %(message)s"))
        logger.addHandler(handler)


def _write_ready_file(path: Path, ready: ReadyServer) -> None:
    endpoints = ready.endpoints
    content = {
        "http": str(endpoints.http),
        "grpc": str(endpoints.grpc) if endpoints.grpc else None,
        "metrics": str(endpoints.metrics) if endpoints.metrics else None,
        "pid": ready.pid,
        "run_directory": str(ready.run_directory),
    }
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(content))
    new.rename(path)
