"""A dry run of real blocks in a process of its own: what it takes of memory, and how long its steps take.

python -m corolla.planning.dry_run REPOSITORY JSON measure
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from corolla.errors import CorollaError
from corolla.kv.run_directory import ENVIRONMENT_VARIABLE, SHARED_MEMORY
from corolla.server.processes import die_with_parent
from corolla.threads import let_idle_threads_sleep

if TYPE_CHECKING:
    from corolla.planning.running_blocks import RunningBlocks


@dataclass(frozen=True)
class DryRun:
    """What to run: blocks [start, end) of a repository, with a KV cache of so many tokens, 0 for as many as needed.

    Up to `steps` steps and `forwards` forwards are timed, for about `seconds` each. With `touch`, the whole cache is
    used in the end, as by a server that has been full. Without `ends`, embedding and head are left out.
    """

    start: int
    end: int
    cache_tokens: int = 0
    steps: int = 100
    forwards: int = 10
    seconds: float = 10.0
    touch: bool = False
    ends: bool = True


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
    lines = _in_process(repository, run, "measure").splitlines()
    return Outcome(**json.loads(lines[-1]))


def prepare(repository: Path, run: DryRun) -> None:
    """Makes sure that weights are prepared and decoders compiled, in a process apart: what does it grows by that."""
    _in_process(repository, run, "prepare")


def _in_process(repository: Path, run: DryRun, what: str) -> str:
    """What it prints."""
    environment = dict(os.environ)
    let_idle_threads_sleep(environment)
    command = [sys.executable, "-m", "corolla.planning.dry_run", str(repository), json.dumps(asdict(run)), what]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, preexec_fn=die_with_parent())
    if done.returncode:
        raise CorollaError(f"blocks {run.start}:{run.end} cannot be run to measure them; see the messages above")
    return done.stdout


def main() -> None:
    """The process itself; prints the outcome in JSON."""
    repository, run, what = Path(sys.argv[1]), DryRun(**json.loads(sys.argv[2])), sys.argv[3]
    with tempfile.TemporaryDirectory(prefix="corolla-dry-run-", dir=SHARED_MEMORY) as folder:
        os.environ[ENVIRONMENT_VARIABLE] = folder
        try:
            if what == "prepare":
                _open(repository, run)
            else:
                print(json.dumps(asdict(_run(repository, run, Path(folder)))))
        except CorollaError as error:
            sys.exit(f"corolla: {error}")


def _open(repository: Path, run: DryRun) -> "RunningBlocks":
    from corolla.planning.running_blocks import RunningBlocks
    from corolla.repository.reading import served_model

    model = served_model(repository, "chain")
    return RunningBlocks(model, range(run.start, run.end), run.cache_tokens, ends=run.ends)


def _run(repository: Path, run: DryRun, folder: Path) -> Outcome:
    """Imports come first, as what they take is measured apart."""
    import corolla.generate.engine
    import corolla.planning.running_blocks  # noqa: F401

    before = _memory(folder)
    blocks = _open(repository, run)
    blocks.step_in_all_ways()
    forward = _median("forwards", lambda _: blocks.forward(), run.forwards, run.seconds)
    with blocks.stepping(run.steps) as step:
        single = _median("steps", step, run.steps, run.seconds)
    ends = _median("ends", lambda _: blocks.pass_ends(), run.steps, run.seconds) if run.ends else 0.0
    if run.touch:
        blocks.touch_cache()
    after = _memory(folder)
    return Outcome(
        blocks=run.end - run.start,
        private=before["private"],
        work=after["private"] - before["private"],
        libraries=after["libraries"],
        weights=after["weights"],
        cache=after["cache"],
        pss=after["pss"],
        step=single,
        forward=forward,
        forward_positions=blocks.forward_positions,
        ends=ends,
    )


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
