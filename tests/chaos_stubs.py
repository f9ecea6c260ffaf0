"""Kills the processes of models under running generations, and checks that no token changes and no page is lost.

python tests/chaos_stubs.py model_repository --rounds 20
"""

import argparse
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from corolla.client import CorollaClient
from corolla.errors import CorollaError
from servers import RunningServer

STREAM_ERROR_SECONDS = 5.0
RECOVERY_SECONDS = 60.0
PROMPTS = ["A block range is", "The session table " * 30, "Every process maps", "When a process dies, " * 25]


@dataclass(frozen=True)
class Outcome:
    """One generation under fire: its text, and the times at which its stream broke off."""

    text: str
    breaks: list[float]


def generate_through(address: str, prompt: str, max_tokens: int) -> Outcome:
    """Streams a generation; goes on with it as often as it breaks off."""
    text, session_id, breaks = "", None, []
    deadline = time.monotonic() + RECOVERY_SECONDS
    while True:
        options = {"session_id": session_id} if session_id else {}
        try:
            with CorollaClient(address) as client:
                for chunk in client.generate(prompt + text, max_tokens=max_tokens, **options):
                    session_id = chunk.session_id or session_id
                    text += chunk.text
                    if chunk.finish_reason:
                        return Outcome(text, breaks)
        except CorollaError as error:
            breaks.append(time.monotonic())
            if time.monotonic() > deadline:
                raise AssertionError(f"not recovered after {RECOVERY_SECONDS} s: {error}") from error
            time.sleep(0.05)


class Battlefield:
    """A server with generations to disturb; the undisturbed texts are taken first."""

    def __init__(self, server: RunningServer, max_tokens: int, seed: int) -> None:
        self._server = server
        self._max_tokens = max_tokens
        self._random = random.Random(seed)
        self._expected = [generate_through(server.grpc, prompt, max_tokens).text for prompt in PROMPTS]

    def round(self, model: str) -> list[float]:
        """Kills the model's process at a random moment of four generations; returns how long each break lasted.

        Asserts that every text is the undisturbed one, that streams break only with the process that holds
        them, within STREAM_ERROR_SECONDS, and that all pages come back.
        """
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            running = [pool.submit(generate_through, self._server.grpc, prompt, self._max_tokens) for prompt in PROMPTS]
            time.sleep(self._random.uniform(0.0, 0.8))
            killed_pid = self._server.stub_pids(model)[0]
            os.kill(killed_pid, signal.SIGKILL)
            killed = time.monotonic()
            outcomes = [future.result() for future in running]
        for outcome, expected, prompt in zip(outcomes, self._expected, PROMPTS, strict=True):
            assert outcome.text == expected, f"{model}: {prompt[:20]!r} gave {outcome.text!r}, not {expected!r}"
        delays = [outcome.breaks[0] - killed for outcome in outcomes if outcome.breaks]
        assert model == "generate" or not delays, f"{model}: streams broke off, {delays}"
        assert all(delay < STREAM_ERROR_SECONDS for delay in delays), f"{model}: errors came after {delays} s"
        wait_until(lambda: killed_pid not in self._server.stub_pids(model) and bool(self._server.stub_pids(model)))
        wait_until(self._is_empty)
        return delays

    def _is_empty(self) -> bool:
        try:
            with CorollaClient(self._server.grpc) as client:
                status = client.sessions("stat")
        except CorollaError:
            return False
        return bool(status["free_tokens"] == status["total_tokens"] and status["open_sessions"] == 0)


def wait_until(condition: Callable[[], bool], timeout: float = RECOVERY_SECONDS) -> None:
    """Polls a condition; AssertionError when it does not come true."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not so after {timeout} s"
        time.sleep(0.05)


def models_in_turn(server: RunningServer) -> Iterator[str]:
    """All models with a process, over and over."""
    models = sorted({stub.model for stub in server.stubs()})
    while True:
        yield from models


def main() -> None:
    """Runs the long form and prints what it saw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with RunningServer(options.repository) as server:
        battlefield = Battlefield(server, options.max_tokens, options.seed)
        models = models_in_turn(server)
        delays: list[float] = []
        for _ in tqdm(range(options.rounds), desc="processes killed", file=sys.stderr):
            delays += battlefield.round(next(models))
        recoveries = server.log.count("serves again")
    print(
        f"{options.rounds} processes killed, {recoveries} recoveries, {len(PROMPTS) * options.rounds} generations equal"
    )
    if delays:
        print(f"streams broken off: {len(delays)}, error after {min(delays):.1f} to {max(delays):.1f} s, texts equal")


if __name__ == "__main__":
    main()
