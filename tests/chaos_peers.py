"""Kills whole servers of a swarm under running generations, and checks that no token changes.

Three parts of a model of 8 blocks, each on two servers, and one server with the ends, all on this machine. A server is
killed with all its processes, in turn, but never the last one that holds its blocks, and is started again at once.

python tests/chaos_peers.py --seconds 120
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from tqdm import tqdm

from checkpoints import Case, random_prompt, text_of
from corolla.client import CorollaClient
from corolla.errors import CorollaError
from swarm_servers import Announced, SwarmServer, write_server
from waiting import wait_until

CASE = Case(
    name="chaos",
    ranges=(range(0, 3), range(3, 6), range(6, 8)),
    config={
        "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 256,
        "max_position_embeddings": 1024,
    },
    seed=12,
)  # fmt: skip
PROMPT_TOKENS = (3, 9, 17, 40, 60, 90, 130, 200)


@dataclass
class Part:
    """One of the servers that hold the same blocks; started again and again."""

    blocks: range
    repository: Path
    run_directory: Path
    server: SwarmServer | None = None
    seconds: list[float] = field(default_factory=list)
    """How long the starts took, until others knew of it."""


class Swarm:
    """Servers for all parts."""

    def __init__(self, folder: Path, cache: Path, replicas: int) -> None:
        self._cache = cache
        registry = f"sqlite:///{folder / 'peers.db'}"
        checkpoint = folder / "checkpoint"
        CASE.write(checkpoint)
        entry = write_server(folder / "entry", checkpoint, range(0), registry, ends=True, step_timeout=3.0)
        self.entry = Part(range(0), entry, folder / "run-entry")
        self.parts = []
        for blocks in CASE.ranges:
            name = f"{blocks.start}-{blocks.stop}"
            repository = write_server(folder / name, checkpoint, blocks, registry)
            self.parts += [Part(blocks, repository, folder / f"run-{name}-{index}") for index in range(replicas)]
        self._announced = Announced(registry)
        self._starting = Lock()

    def start(self, part: Part) -> SwarmServer:
        """Starts a server, and waits until others know of it."""
        with self._starting:  # several at once would all take as long as the last one
            begun = time.monotonic()
            server = SwarmServer(part.repository, part.run_directory, self._cache)
            wait_until(lambda: self._announced.online(server))
            server.give_way()  # on few cores, the generations would hold up the next start for minutes
        part.server = server
        part.seconds.append(time.monotonic() - begun)
        return server

    def kill(self, part: Part) -> None:
        """kill -9 of all its processes; its announcement is left to expire."""
        assert part.server is not None
        server, part.server = part.server, None
        server.kill()

    def can_be_killed(self) -> list[Part]:
        """Parts that another server holds as well."""
        up = [part for part in self.parts if part.server is not None]
        return [part for part in up if any(other.blocks == part.blocks for other in up if other is not part)]

    def stop(self) -> None:
        for part in (*self.parts, self.entry):
            if part.server is not None:
                self.kill(part)
        self._announced.close()


def generate(address: str, prompt: list[int], max_tokens: int) -> str:
    """The greedy text after a prompt."""
    with CorollaClient(address) as client:
        options = {"max_tokens": max_tokens, "sampling_parameters": '{"ignore_eos": true}', "timeout": 120.0}
        return "".join(chunk.text for chunk in client.generate(text_of(prompt), **options))


def keep_generating(
    address: str, prompt: list[int], max_tokens: int, expected: str, is_over: Callable[[], bool]
) -> list[str]:
    """Generates the same over and over; returns what was wrong, one line per generation, empty where nothing was."""
    problems = []
    while not is_over():
        try:
            text = generate(address, prompt, max_tokens)
            problems.append("" if text == expected else f"{len(prompt)} tokens: {text!r}, not {expected!r}")
        except CorollaError as error:
            problems.append(f"{len(prompt)} tokens: {error}")
    return problems


def run_chaos(swarm: Swarm, address: str, seconds: float, interval: float, max_tokens: int, seed: int) -> str:
    """Kills a server every `interval` seconds, where one can be spared; returns what was seen.

    Asserts that all texts are those of an undisturbed run.
    """
    chosen = random.Random(seed)
    prompts = [random_prompt(length, seed=length) for length in PROMPT_TOKENS]
    expected = [generate(address, prompt, max_tokens) for prompt in prompts]
    killed, waited = 0, 0
    restarts: list[Future[SwarmServer]] = []
    with ThreadPoolExecutor(len(prompts) + len(swarm.parts)) as pool:
        end = time.monotonic() + seconds
        running = [
            pool.submit(keep_generating, address, prompt, max_tokens, text, lambda: time.monotonic() > end)
            for prompt, text in zip(prompts, expected, strict=True)
        ]
        with tqdm(total=int(seconds), desc="seconds", file=sys.stderr) as progress:
            while time.monotonic() < end:
                time.sleep(interval)
                progress.update(int(interval))
                candidates = swarm.can_be_killed()
                if not candidates:
                    waited += 1
                    continue
                part = chosen.choice(candidates)
                swarm.kill(part)
                killed += 1
                restarts.append(pool.submit(swarm.start, part))
        outcomes = [problem for future in running for problem in future.result()]
        for restart in restarts:
            restart.result()
    problems = [problem for problem in outcomes if problem]
    assert not problems, "\n".join(problems[:5])
    starts = sorted(took for part in swarm.parts for took in part.seconds)
    return (
        f"{killed} servers killed, {waited} times none could be spared; {len(outcomes)} generations of {max_tokens} "
        f"tokens, 8 at a time, all equal to the undisturbed ones; starts took {starts[0]:.0f} to {starts[-1]:.0f} s"
    )


def main() -> None:
    """Runs it and prints what it saw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="of killing")
    parser.add_argument("--interval", type=float, default=5.0, help="seconds from one kill to the next")
    parser.add_argument("--replicas", type=int, default=2, help="servers with the same blocks")
    parser.add_argument("--max-tokens", type=int, default=400, help="of each generation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", type=Path, help="disk cache to use [default: one that is deleted at the end]")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="corolla-chaos-")))
        swarm = Swarm(folder, options.cache or folder / "cache", options.replicas)
        stack.callback(swarm.stop)
        for part in tqdm(swarm.parts, desc="servers started", file=sys.stderr):
            swarm.start(part)
        entry = swarm.start(swarm.entry)
        print(run_chaos(swarm, entry.grpc, options.seconds, options.interval, options.max_tokens, options.seed))


if __name__ == "__main__":
    main()
