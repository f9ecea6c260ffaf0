"""`corolla bench`: measure on this machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from corolla.bench.openmp import load_torch
from corolla.errors import EnvironmentProblemError
from corolla.quantization import NONE, QUANTS

if TYPE_CHECKING:
    from corolla.checkpoint.source import Source


class Numbers(click.ParamType):
    """Whole numbers with commas between them, each from `low` to `high`."""

    name = "n,n,..."

    def __init__(self, low: int, high: int) -> None:
        self._each = click.IntRange(low, high)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        """See click.ParamType."""
        parts = value.split(",") if isinstance(value, str) else value
        convert: Any = self._each.convert
        return list(dict.fromkeys(convert(part, param, ctx) for part in parts))


class Checkpoint(click.ParamType):
    """A local folder, or org/name@revision on the hub."""

    name = "checkpoint"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See click.ParamType."""
        from corolla.checkpoint.source import find_source

        return find_source(value)


_CHECKPOINT = click.argument("checkpoint", type=Checkpoint())
_DTYPE = click.option("--dtype", default="auto", show_default=True, help="auto, float32 or bfloat16.")
_QUANT = click.option("--quant", type=click.Choice(QUANTS), default=NONE, show_default=True, help="Of the server.")
_THREADS = click.option(
    "--threads", type=click.IntRange(1, 1024), default=2, show_default=True, help="Of every process."
)
_ROUNDS = click.option("--rounds", type=click.IntRange(1, 100), default=3, show_default=True)
_JSON = click.option("--json", "json_file", type=click.Path(path_type=Path), help="File for all figures.")
_MAX_TOKENS = click.option(
    "--max-tokens", type=click.IntRange(2, 4096), default=64, show_default=True, help="New tokens each."
)


def _max_batch_size(default: int) -> Any:
    return click.option(
        "--max-batch-size", type=click.IntRange(1, 1024), default=default, show_default=True, help="Rows of a step."
    )


@click.group(
    epilog="""\b
    Example:
      corolla bench generate .cache/demo-checkpoint --sessions 1,4 --json generate.json
      corolla bench pictures generate.json --out pictures"""
)
def command() -> None:
    """Measure on this machine: most of them a checkpoint, through a server that is started for it.

    A checkpoint is a local folder, or org/name or org/name@revision on the hub.
    """
    load_torch()


@command.command(epilog="Example: corolla bench generate .cache/demo-checkpoint --sessions 1,4 --json figures.json")
@_CHECKPOINT
@_DTYPE
@_QUANT
@click.option("--sessions", type=Numbers(1, 64), default="1,4,8,16", show_default=True, help="Generations at once.")
@_MAX_TOKENS
@_max_batch_size(16)
@_THREADS
@_ROUNDS
@_JSON
def generate(
    checkpoint: "Source",
    dtype: str,
    quant: str,
    sessions: list[int],
    max_tokens: int,
    max_batch_size: int,
    threads: int,
    rounds: int,
    json_file: Path | None,
) -> None:
    """Compare streamed generation through a server with `generate` of transformers, side by side.

    transformers is never quantized.
    """
    from corolla.bench.figures import Setting, write_figures
    from corolla.bench.generation import compare_generation, table
    from corolla.bench.serving import bench_server, local_folder, make_plan

    plan = make_plan(checkpoint, dtype, threads=threads, max_batch_size=max_batch_size, quant=quant)
    with bench_server(plan) as server:
        report = compare_generation(server, local_folder(plan), sessions, max_tokens, rounds, threads)
    click.echo(table(report))
    write_figures(json_file, Setting.of("generate", plan), report.to_json())


@command.command(epilog="Example: corolla bench merged .cache/demo-checkpoint --most 256 --json merged.json")
@_CHECKPOINT
@_DTYPE
@_QUANT
@click.option("--range-size", type=click.IntRange(1), default=1, show_default=True, help="Blocks of one range.")
@click.option("--most", type=click.IntRange(1, 4096), default=1024, show_default=True, help="Positions of a step.")
@click.option("--repetitions", type=click.IntRange(1, 1000), default=20, show_default=True, help="Per length, at most.")
@click.option("--seconds", type=click.FloatRange(0, 600), default=3.0, show_default=True, help="Per length, at most.")
@click.option("--steps", type=click.IntRange(1, 512), default=64, show_default=True, help="Of one position, streamed.")
@_max_batch_size(16)
@_THREADS
@_ROUNDS
@_JSON
def merged(
    checkpoint: "Source",
    dtype: str,
    quant: str,
    range_size: int,
    most: int,
    repetitions: int,
    seconds: float,
    steps: int,
    max_batch_size: int,
    threads: int,
    rounds: int,
    json_file: Path | None,
) -> None:
    """Compare steps through all blocks in one process with steps through a process per range.

    Tells from how many positions on it makes no difference, and what Triton itself costs: the same compiled chain
    runs in a bare loop of this process as well.
    """
    from corolla.bench.figures import Setting, write_figures
    from corolla.bench.lengths import Effort
    from corolla.bench.merged import measure_merged, table
    from corolla.bench.serving import bench_server, make_plan

    plan = make_plan(checkpoint, dtype, range_size, threads=threads, max_batch_size=max_batch_size, quant=quant)
    with bench_server(plan) as server:
        report = measure_merged(server, most, Effort(repetitions, seconds), steps, rounds)
    click.echo(table(report))
    write_figures(json_file, Setting.of("merged", plan), report.to_json())


@command.command(epilog="Example: corolla bench channel .cache/demo-checkpoint --capacities 0,8 --json channel.json")
@_CHECKPOINT
@_DTYPE
@click.option("--capacities", type=Numbers(0, 1024), default="0,1,2,8", show_default=True, help="Batches ahead.")
@click.option("--generations", type=click.IntRange(2, 64), default=32, show_default=True, help="At once.")
@click.option("--prompt-tokens", type=click.IntRange(2, 128), default=32, show_default=True, help="Of each.")
@click.option("--max-tokens", type=click.IntRange(1, 512), default=16, show_default=True, help="New tokens each.")
@click.option("--cancel-every", type=click.IntRange(2), default=4, show_default=True, help="Each such client leaves,")
@click.option("--cancel-after", type=click.IntRange(0, 10000), default=50, show_default=True, help="so many ms later.")
@_max_batch_size(16)
@_THREADS
@_ROUNDS
@_JSON
def channel(
    checkpoint: "Source",
    dtype: str,
    capacities: list[int],
    generations: int,
    prompt_tokens: int,
    max_tokens: int,
    cancel_every: int,
    cancel_after: int,
    max_batch_size: int,
    threads: int,
    rounds: int,
    json_file: Path | None,
) -> None:
    """Send bursts of generations of which some are cancelled, for several capacities of the batch channel.

    Runs the engine of the `generate` model in this process, without Triton, where what is computed for clients that
    have left can be counted.
    """
    from corolla.bench.channel import Burst, measure_channel, table
    from corolla.bench.figures import Setting, write_figures
    from corolla.bench.serving import make_plan

    burst = Burst(generations, prompt_tokens, max_tokens, cancel_every, cancel_after / 1e3)
    plan = make_plan(
        checkpoint, dtype, threads=threads, max_batch_size=max_batch_size, attn_cache_tokens=burst.positions
    )
    report = measure_channel(plan, capacities, burst, rounds)
    click.echo(table(report))
    write_figures(json_file, Setting.of("channel", plan), report.to_json())


@command.command(epilog="Example: corolla bench sizes .cache/demo-checkpoint --sizes 8 --sizes 8,1 --json sizes.json")
@_CHECKPOINT
@_DTYPE
@click.option(
    "--sizes", type=Numbers(1, 1024), multiple=True, default=["8", "8,4,1"], show_default=True,
    help="Decoder batch sizes of one server; may be given several times.",
)  # fmt: skip
@click.option("--requests", type=Numbers(1, 64), default="1,3,5,7", show_default=True, help="Streams at once.")
@_MAX_TOKENS
@_THREADS
@_ROUNDS
@_JSON
def sizes(
    checkpoint: "Source",
    dtype: str,
    sizes: tuple[list[int], ...],
    requests: list[int],
    max_tokens: int,
    threads: int,
    rounds: int,
    json_file: Path | None,
) -> None:
    """Compare servers whose decoders are compiled for different batch sizes, one after the other."""
    from corolla.bench.figures import Setting, write_figures
    from corolla.bench.serving import bench_server, make_plan
    from corolla.bench.sizes import measure_sizes, table, to_json

    results = []
    for chosen in sizes:
        sizes_down = tuple(sorted(chosen, reverse=True))
        plan = make_plan(
            checkpoint, dtype, threads=threads, max_batch_size=sizes_down[0], decoder_batch_sizes=sizes_down
        )
        with bench_server(plan) as server:
            results += measure_sizes(server, requests, max_tokens, rounds)
    click.echo(table(results))
    write_figures(json_file, Setting.of("sizes", plan), to_json(results))


@command.command(epilog="Example: corolla bench stalls .cache/demo-checkpoint --prompt-tokens 256 --json stalls.json")
@_CHECKPOINT
@_DTYPE
@_QUANT
@click.option("--streams", type=click.IntRange(1, 64), default=4, show_default=True, help="That run all the time.")
@click.option("--prompt-tokens", type=click.IntRange(2), default=1024, show_default=True, help="Of each long prompt.")
@click.option("--seconds", type=click.FloatRange(0.1, 60), default=2.0, show_default=True, help="Before each prompt.")
@_max_batch_size(16)
@_THREADS
@_ROUNDS
@_JSON
def stalls(
    checkpoint: "Source",
    dtype: str,
    quant: str,
    streams: int,
    prompt_tokens: int,
    seconds: float,
    max_batch_size: int,
    threads: int,
    rounds: int,
    json_file: Path | None,
) -> None:
    """Measure how long streams wait for their next response while a long prompt is computed."""
    from corolla.bench.figures import Setting, write_figures
    from corolla.bench.serving import bench_server, make_plan
    from corolla.bench.stalls import measure_stalls, table

    plan = make_plan(checkpoint, dtype, threads=threads, max_batch_size=max_batch_size, quant=quant)
    with bench_server(plan) as server:
        result = measure_stalls(server, streams, prompt_tokens, seconds, rounds)
    click.echo(table(result))
    write_figures(json_file, Setting.of("stalls", plan), result.to_json())


@command.command(epilog="Example: corolla bench mirror .cache/demo-checkpoint --clients 1,4 --json mirror.json")
@_CHECKPOINT
@_DTYPE
@click.option("--clients", type=Numbers(1, 64), default="1,2,4,8", show_default=True, help="Closed loops at once.")
@click.option("--seconds", type=click.FloatRange(0.1, 600), default=5.0, show_default=True, help="For each number.")
@_max_batch_size(8)
@_THREADS
@_JSON
def mirror(
    checkpoint: "Source",
    dtype: str,
    clients: list[int],
    seconds: float,
    max_batch_size: int,
    threads: int,
    json_file: Path | None,
) -> None:
    """Compare a server whose dynamic batcher prefers the decoder batch sizes with one that prefers none."""
    from corolla.bench.figures import Setting, write_figures
    from corolla.bench.mirror import measure_mirror, table, to_json
    from corolla.bench.serving import bench_server, make_plan

    results = []
    for mirrored in (True, False):
        plan = make_plan(checkpoint, dtype, threads=threads, max_batch_size=max_batch_size, mirror=mirrored)
        with bench_server(plan) as server:
            results += measure_mirror(server, clients, seconds)
    click.echo(table(results))
    write_figures(json_file, Setting.of("mirror", plan), to_json(results))


@command.command(epilog="Example: corolla bench swarm .cache/demo-checkpoint --sessions 8 --delay 50")
@_CHECKPOINT
@_DTYPE
@click.option("--sessions", type=Numbers(1, 64), default="1,8", show_default=True, help="Generations at once.")
@click.option("--delay", type=click.FloatRange(0, 10000), default=50.0, show_default=True, help="One way, in ms.")
@_MAX_TOKENS
@_max_batch_size(8)
@_THREADS
@_ROUNDS
def swarm(
    checkpoint: "Source",
    dtype: str,
    sessions: list[int],
    delay: float,
    max_tokens: int,
    max_batch_size: int,
    threads: int,
    rounds: int,
) -> None:
    """Serve a model on two servers of this machine, with half of the blocks each, and text through a third one.

    Compares many sessions with one, and a token over servers at a distance with the one-way trips that it must make.
    """
    from corolla.bench.serving import make_plan
    from corolla.bench.swarm import bench_swarm, measure_swarm, table

    plan = make_plan(checkpoint, dtype, threads=threads, max_batch_size=max_batch_size)
    with bench_swarm(plan) as served:
        click.echo(table(measure_swarm(served, sessions, max_tokens, delay / 1e3, rounds)))


@command.command(epilog="Example: corolla bench quality .cache/demo-checkpoint --text docs/protocol.md")
@_CHECKPOINT
@_DTYPE
@click.option(
    "--text", "files", multiple=True, required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Text to predict; may be given several times.",
)  # fmt: skip
@click.option("--window", type=click.IntRange(2), default=256, show_default=True, help="Tokens seen at once.")
@_THREADS
def quality(checkpoint: "Source", dtype: str, files: tuple[Path, ...], window: int, threads: int) -> None:
    """Compare what quantized weights predict, on our kernels and on those of bitsandbytes, in this process."""
    import torch

    from corolla.bench.quality import measure_quality, table
    from corolla.checkpoint.resolution import resolve_dtype
    from corolla.checkpoint.source import open_checkpoint

    torch.set_num_threads(threads)
    opened = open_checkpoint(checkpoint)
    chosen = resolve_dtype(dtype, opened.config, "cpu")
    click.echo(table(measure_quality(opened, chosen.torch, [file.read_text() for file in files], window)))


@command.command(epilog="Example: corolla bench linears --outputs 5632 --inputs 2048")
@click.option("--outputs", type=click.IntRange(1), default=5632, show_default=True)
@click.option("--inputs", type=click.IntRange(1), default=2048, show_default=True)
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True)
@click.option("--rows", type=Numbers(1, 4096), default="1,4,8,16,128", show_default=True, help="Rows of a call.")
@_THREADS
@_ROUNDS
def linears(outputs: int, inputs: int, dtype: str, rows: list[int], threads: int, rounds: int) -> None:
    """Compare the kernels of one linear layer, quantized or not, in this process."""
    from corolla.bench.linears import measure_linears, table
    from corolla.dtypes import dtype_named

    click.echo(table(measure_linears(outputs, inputs, dtype_named(dtype).torch, rows, threads, rounds)))


@command.command(epilog="Example: corolla bench routing --peers 1000 --blocks 80")
@click.option("--peers", type=click.IntRange(1, 100000), default=1000, show_default=True)
@click.option("--blocks", type=click.IntRange(1, 1024), default=80, show_default=True, help="Of the model.")
@click.option("--repetitions", type=click.IntRange(1, 1000), default=10, show_default=True, help="Swarms.")
def routing(peers: int, blocks: int, repetitions: int) -> None:
    """Time how long it takes to find routes in swarms made at random, in this process."""
    from corolla.bench.routing import measure_routing, table

    click.echo(table(measure_routing(peers, blocks, repetitions)))


@command.command(epilog="Example: corolla bench pictures generate.json merged.json --out docs/pictures")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder for the pictures.")
def pictures(files: tuple[Path, ...], out: Path) -> None:
    """Draw files that the other benchmarks wrote with --json, each as a PNG."""
    try:
        from corolla.bench.pictures import draw_files
    except ImportError as error:
        raise EnvironmentProblemError(f"{error}; install what draws: pip install 'corolla[bench]'") from error
    for picture in draw_files(files, out):
        click.echo(picture)
