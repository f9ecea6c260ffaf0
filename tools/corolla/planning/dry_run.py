"""A dry run of real blocks in a process of its own: what it takes of memory, and how long its steps take.

python -m corolla.planning.dry_run REPOSITORY JSON
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from corolla.errors import CorollaError
from corolla.kv.run_directory import ENVIRONMENT_VARIABLE, SHARED_MEMORY
from corolla.server.processes import die_with_parent
from corolla.threads import let_idle_threads_sleep, thread_count

PROMPT_POSITIONS = 16
FORWARD_POSITIONS = 1024
SHORT_POSITIONS = 128
LONGEST_PROMPT = 4096


@dataclass(frozen=True)
class DryRun:
    """What to run: blocks [start, end) of a repository, with a KV cache of so many tokens, 0 for as many as needed.

    Up to `steps` steps and `forwards` forwards are timed, for about `seconds` each. With `touch`, the whole cache is
    used in the end, as by a server that has been full.
    """

    start: int
    end: int
    cache_tokens: int = 0
    steps: int = 100
    forwards: int = 10
    seconds: float = 10.0
    touch: bool = False


@dataclass(frozen=True)
class Outcome:
    """Of `blocks` blocks: bytes of the process, by what they are, and seconds.

    `private` is what the process has for itself before it opens blocks, `work` what comes to it by opening them and
    by steps of all kinds; `libraries`, `weights` and `cache` are mapped files. `pss` is its proportional set size in
    the end. `step` is one step of one token, `forward` one of `forward_positions` tokens without cache, through all
    blocks; `ends` are embedding, head and choice for one token.
    """

    blocks: int
    private: int
    work: int
    libraries: int
    weights: int
    cache: int
    pss: int
    step: float
    forward: float
    forward_positions: int
    ends: float


def dry_run(repository: Path, run: DryRun) -> Outcome:
    """Runs the blocks as the `chain` of a repository runs them. CorollaError with what went wrong."""
    environment = dict(os.environ)
    let_idle_threads_sleep(environment)
    command = [sys.executable, "-m", "corolla.planning.dry_run", str(repository), json.dumps(asdict(run))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, preexec_fn=die_with_parent())
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        raise CorollaError(f"blocks {run.start}:{run.end} cannot be run to measure them; see the messages above")
    return Outcome(**json.loads(lines[-1]))


def main() -> None:
    """The process itself; writes the outcome in JSON."""
    repository, run = Path(sys.argv[1]), DryRun(**json.loads(sys.argv[2]))
    with tempfile.TemporaryDirectory(prefix="corolla-dry-run-", dir=SHARED_MEMORY) as folder:
        os.environ[ENVIRONMENT_VARIABLE] = folder
        try:
            outcome = _run(repository, run, Path(folder))
        except CorollaError as error:
            sys.exit(f"corolla: {error}")
    print(json.dumps(asdict(outcome)))


def _run(repository: Path, run: DryRun, folder: Path) -> Outcome:
    import torch

    from corolla.generate.engine import GenerateEngine  # noqa: F401  (what `generate` imports)
    from corolla.kv.session import OpenRequest
    from corolla.model.ends import Embedding, Head
    from corolla.repository.reading import served_model
    from corolla.serving.blocks import BlocksRequest
    from corolla.serving.hosted_blocks import HostedBlocks
    from corolla.serving.hosting import Host

    written = served_model(repository, "chain")
    context = _context(written.checkpoint)
    longest = min(context, LONGEST_PROMPT)
    rows = max(written.decoder_batch_sizes, default=16)
    tokens = run.cache_tokens or longest + rows * written.page_size
    model = replace(written, blocks=range(run.start, run.end), attn_cache_tokens=tokens, adapters={})
    torch.set_num_threads(thread_count(model.threads))
    before = _memory(folder)
    with ThreadPoolExecutor(1) as opener:  # as in the backend: OpenMP's threads would else be those of the opener
        host = opener.submit(Host, model).result()
        table = host.session_table()
        service = opener.submit(lambda: HostedBlocks(host, table).current).result()
        embedding, head = Embedding(host.parts), Head(host.parts)
    hidden_size = host.checkpoint.config.hidden_size

    def states(count: int, positions: int) -> torch.Tensor:
        return torch.randn(count, positions, hidden_size).to(model.dtype.torch)

    def step(hidden_states: torch.Tensor, ids: list[str] | None = None, start: int = 0) -> torch.Tensor:
        starts = None if ids is None else [start] * len(ids)
        (output,) = service.run([BlocksRequest(hidden_states, ids, starts)])
        if isinstance(output, Exception):
            raise output
        return output

    @contextmanager
    def sessions(count: int, length: int) -> Iterator[list[str]]:
        ids = [table.open(OpenRequest(length)).id for _ in range(count)]
        yield ids
        for session_id in ids:
            table.close(session_id)

    with sessions(1, min(longest, tokens)) as ids:
        step(states(1, min(longest, tokens) - 1), ids)
    with sessions(1, min(SHORT_POSITIONS, tokens)) as ids:
        step(states(1, min(SHORT_POSITIONS, tokens)), ids)
    rows = min(rows, tokens // model.page_size)
    with sessions(rows, 2) as ids:
        step(states(rows, 1), ids)

    positions = min(FORWARD_POSITIONS, context)
    sequence = states(1, positions)
    forward = _median("forwards", lambda _: step(sequence), run.forwards, run.seconds)
    most = min(run.steps, min(longest, tokens) - PROMPT_POSITIONS)
    with sessions(1, PROMPT_POSITIONS + most) as ids, service.steps.held(ids[0]):
        step(states(1, PROMPT_POSITIONS), ids)
        token = states(1, 1)
        single = _median("steps", lambda n: step(token, ids, PROMPT_POSITIONS + n), most, run.seconds)
        ends = _median("ends", lambda _: head(embedding(torch.tensor([[0]]))).argmax(), most, run.seconds)
    if run.touch:
        for block in model.blocks:
            service.arena[block].keys.sum(), service.arena[block].values.sum()
    after = _memory(folder)
    return Outcome(
        blocks=len(model.blocks),
        private=before["private"],
        work=after["private"] - before["private"],
        libraries=after["libraries"],
        weights=after["weights"],
        cache=after["cache"],
        pss=after["pss"],
        step=single,
        forward=forward,
        forward_positions=positions,
        ends=ends,
    )


def _context(source: object) -> int:
    from corolla.checkpoint.source import open_checkpoint
    from corolla.model.shape import ModelShape

    return ModelShape.of(open_checkpoint(source).config).context_length  # type: ignore[arg-type]


def _median(name: str, act: Callable[[int], object], most: int, seconds: float) -> float:
    """Seconds of one call, of up to `most`; at least one, and none begins after `seconds`."""
    from tqdm import tqdm

    taken: list[float] = []
    deadline = time.monotonic() + seconds
    for number in tqdm(range(most), desc=name, unit=name.removesuffix("s"), disable=None):
        start = time.perf_counter()
        act(number)
        taken.append(time.perf_counter() - start)
        if time.monotonic() > deadline:
            break
    return statistics.median(taken)


def _memory(run_directory: Path) -> dict[str, int]:
    """Bytes of this process in memory, by what they are."""
    import psutil

    found = {"private": 0, "libraries": 0, "weights": 0, "cache": 0}
    process = psutil.Process()
    for mapping in process.memory_maps(grouped=True):
        if mapping.path.startswith(str(run_directory / "kv")):
            found["cache"] += mapping.rss
        elif mapping.path.endswith(".safetensors"):
            found["weights"] += mapping.rss
        elif mapping.path.startswith("/") and not mapping.path.startswith("/dev/"):
            found["libraries"] += mapping.rss - mapping.private_dirty
            found["private"] += mapping.private_dirty
        else:
            found["private"] += mapping.rss
    return found | {"pss": process.memory_full_info().pss}


if __name__ == "__main__":
    main()
