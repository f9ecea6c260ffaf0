"""Generations of many clients at once, through a server."""

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from corolla.bench.timing import RunResult, Timing
from corolla.client import CorollaClient


def run_streams(address: str, prompts: Sequence[str], max_tokens: int) -> RunResult:
    """One client with a connection of its own per prompt, all sent at once, streamed, greedy, end tokens ignored."""
    barrier = Barrier(len(prompts))
    with ThreadPoolExecutor(len(prompts)) as pool:
        timings = list(pool.map(lambda prompt: _stream(address, prompt, max_tokens, barrier), prompts))
    return RunResult.of(timings)


def _stream(address: str, prompt: str, max_tokens: int, barrier: Barrier) -> Timing:
    first, tokens = 0.0, 0
    parameters = json.dumps({"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0})
    with CorollaClient(address) as client:
        barrier.wait()
        sent = time.perf_counter()
        for chunk in client.generate(prompt, sampling_parameters=parameters):
            last = time.perf_counter()
            first = first or last
            tokens = chunk.num_output_tokens or tokens
    return Timing(sent, first, last, tokens)
