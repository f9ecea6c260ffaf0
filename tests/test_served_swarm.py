"""One model on several real servers: two of them hold the same blocks, and each in turn stops or dies."""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from checkpoints import SERVED, random_prompt, text_of
from corolla.client import CorollaClient
from reference import Reference
from swarm_servers import Announced, SwarmServer, write_server
from waiting import wait_until

FIRST, REST = range(0, 2), range(2, 5)
TOKENS = 300


@dataclass
class Swarm:
    """`entry` has the ends and the first blocks, each of `others` the rest."""

    entry: SwarmServer
    others: list[SwarmServer]
    reference: Reference

    def sessions(self, server: SwarmServer) -> int:
        with CorollaClient(server.grpc) as client:
            return int(client.sessions("stat")["open_sessions"])

    def used(self) -> SwarmServer:
        """The one of the others that has sessions now."""
        wait_until(lambda: any(self.sessions(other) for other in self.others))
        return next(other for other in self.others if self.sessions(other))


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory, suite_cache: Path) -> Iterator[Swarm]:
    folder = tmp_path_factory.mktemp("swarm")
    checkpoint, registry = folder / "checkpoint", f"sqlite:///{folder / 'peers.db'}"
    SERVED.write(checkpoint)
    entry = write_server(folder / "entry", checkpoint, FIRST, registry, ends=True, step_timeout=1.0)
    other = write_server(folder / "other", checkpoint, REST, registry)

    def start(repository: Path, run_directory: str) -> SwarmServer:
        return stack.enter_context(SwarmServer(repository, folder / run_directory, suite_cache))

    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        starting = [pool.submit(start, *names) for names in ((entry, "run-0"), (other, "run-1"), (other, "run-2"))]
        servers = [future.result() for future in starting]
        with closing(Announced(registry)) as announced:
            wait_until(lambda: announced.online(*servers))
        yield Swarm(servers[0], servers[1:], Reference(checkpoint))


def test_text_is_that_of_transformers_while_servers_stop_and_die(swarm: Swarm) -> None:
    prompts = [random_prompt(length, seed=length) for length in (5, 40, 200)]

    def generate(prompt: list[int]) -> str:
        with CorollaClient(swarm.entry.grpc) as client:
            options = {"max_tokens": TOKENS, "sampling_parameters": '{"ignore_eos": true}'}
            return "".join(chunk.text for chunk in client.generate(text_of(prompt), **options))

    expected = [swarm.reference.generate(prompt, max_new_tokens=TOKENS, eos_token_id=None) for prompt in prompts]
    with ThreadPoolExecutor() as pool:
        running = [pool.submit(generate, prompt) for prompt in prompts]
        stopped = swarm.used()
        stopped.signal(signal.SIGSTOP)
        (other,) = (server for server in swarm.others if server is not stopped)
        wait_until(lambda: swarm.sessions(other) > 0)
        stopped.signal(signal.SIGCONT)
        other.kill()
        texts = [future.result() for future in running]
    for prompt, tokens, text in zip(prompts, expected, texts, strict=True):
        assert text == swarm.reference.text(prompt, tokens)
    for server in (swarm.entry, stopped):
        wait_until(lambda server=server: swarm.sessions(server) == 0)  # type: ignore[misc]
