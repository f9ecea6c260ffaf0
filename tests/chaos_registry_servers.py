"""Kills the registry of two servers while they generate, and checks that no generation fails or changes.

The first server has the ends and the first blocks, the other one the rest. The registry is away for two of its TTLs,
and the servers go on for more than a third one when it is back.

python tests/chaos_registry_servers.py --seconds 60
"""

import argparse
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from chaos_peers import generate, keep_generating
from chaos_registry import ENGINES, Engine
from checkpoints import SERVED, random_prompt
from corolla.peers.directory import PeerDirectory
from corolla.peers.record import PeerState
from corolla.peers.registry import DEFAULT_TTL
from servers import RunningServer
from swarm_servers import MODEL, REVISION, SwarmServer, write_server
from waiting import wait_until

FIRST, REST = range(0, 2), range(2, 5)
PROMPT_TOKENS = (3, 17, 60, 200)
LONG_TOKENS, SHORT_TOKENS = 300, 5
BEFORE_SECONDS = 5.0
AFTER_SECONDS = DEFAULT_TTL + 5.0


@dataclass(frozen=True)
class Seen:
    """What a run saw: generations of LONG_TOKENS, those of SHORT_TOKENS that began in the absence, and seconds."""

    long: int
    short: int
    starts: float
    stops: float

    def __str__(self) -> str:
        return (
            f"{self.long} generations of {LONG_TOKENS} tokens, {len(PROMPT_TOKENS)} at a time, and {self.short} new "
            f"ones of {SHORT_TOKENS} while it was away, all equal to the undisturbed ones; both servers ONLINE "
            f"afterwards; they started in {self.starts:.0f} s and stopped in {self.stops:.0f} s"
        )


def main() -> None:
    """One line per engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="How long a registry is away.")
    parser.add_argument("--engines", default=",".join(ENGINES), help="Those that are killed.")
    parser.add_argument("--cache", type=Path, help="disk cache to use [default: one that is deleted at the end]")
    options = parser.parse_args()
    for name in options.engines.split(","):
        with tempfile.TemporaryDirectory(prefix="corolla-chaos-") as text:
            folder = Path(text)
            with closing(ENGINES[name](folder)) as engine:
                seen = absence(engine, options.seconds, folder, options.cache or folder / "cache")
        print(f"{name}, away {options.seconds:.0f} s: {seen}", flush=True)


def absence(engine: Engine, seconds: float, folder: Path, cache: Path) -> Seen:
    """Kills the registry of two servers for a time."""
    checkpoint = folder / "checkpoint"
    SERVED.write(checkpoint)
    entry = write_server(folder / "entry", checkpoint, FIRST, engine.url, ends=True)
    other = write_server(folder / "other", checkpoint, REST, engine.url)
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        begun = time.monotonic()
        starting = [pool.submit(SwarmServer, place, folder / f"run-{place.name}", cache) for place in (entry, other)]
        servers = [stack.enter_context(future.result()) for future in starting]
        wait_until_online(engine.url, servers)
        started = time.monotonic()
        long, short = generated(engine, seconds, servers[0].grpc)
        wait_until_online(engine.url, servers)
        stopping = time.monotonic()
        assert list(pool.map(SwarmServer.stop, servers)) == [0, 0]
        stopped = time.monotonic()
    with closing(PeerDirectory(engine.url, MODEL, REVISION)) as directory:
        assert not directory.peers()
    return Seen(long, short, started - begun, stopped - stopping)


def generated(engine: Engine, seconds: float, address: str) -> tuple[int, int]:
    """How many long generations there were, and short ones that began while the registry was away."""
    prompts = [random_prompt(length, seed=length) for length in PROMPT_TOKENS]
    first, first_expected = prompts[0], generate(address, prompts[0], SHORT_TOKENS)
    back, over = threading.Event(), threading.Event()
    with ThreadPoolExecutor(len(prompts) + 1) as pool:
        expected = list(pool.map(lambda prompt: generate(address, prompt, LONG_TOKENS), prompts))
        try:
            long = [
                pool.submit(keep_generating, address, prompt, LONG_TOKENS, text, over.is_set)
                for prompt, text in zip(prompts, expected, strict=True)
            ]
            time.sleep(BEFORE_SECONDS)
            engine.kill()
            short = pool.submit(keep_generating, address, first, SHORT_TOKENS, first_expected, back.is_set)
            time.sleep(seconds)
            back.set()
            engine.start()
            time.sleep(AFTER_SECONDS)
        finally:
            back.set()
            over.set()
    return sum(map(unharmed, long)), unharmed(short)


def unharmed(future: Future[list[str]]) -> int:
    """How many generations there were, none of which had a problem."""
    outcomes = future.result()
    problems = [problem for problem in outcomes if problem]
    assert not problems, "\n".join(problems[:5])
    return len(outcomes)


def wait_until_online(registry: str, servers: Sequence[RunningServer]) -> None:
    """As one sees it who asks the registry for the first time."""
    with closing(PeerDirectory(registry, MODEL, REVISION)) as directory:
        addresses = sorted(server.grpc for server in servers)
        wait_until(
            lambda: sorted(peer.address for peer in directory.peers() if peer.state is PeerState.ONLINE) == addresses
        )


if __name__ == "__main__":
    main()
