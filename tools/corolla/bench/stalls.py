"""What a long prompt does to streams that run: the time between their responses while it is computed, and before."""

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from threading import Event, Thread
from typing import Any

from tqdm import tqdm
from transformers import AutoTokenizer

from corolla.bench.prompts import make_prompts
from corolla.bench.serving import BenchServer, local_folder
from corolla.bench.tables import markdown
from corolla.bench.timing import percentile
from corolla.client import CorollaClient
from corolla.errors import CorollaError
from corolla.model.shape import ModelShape

STREAM_PROMPT_TOKENS, STREAM_TOKENS = 16, 1024
Gap = tuple[float, float]
"""From one response of a stream to its next, by time.perf_counter()."""


@dataclass(frozen=True)
class Stalls:
    """Milliseconds between two responses of each of `streams`.

    `undisturbed` is their median without a prompt of `prompt_tokens`, `p99` their 99th percentile while one is
    computed, which takes `prompt` milliseconds to its first token.
    """

    streams: int
    prompt_tokens: int
    undisturbed: float
    p99: float
    prompt: float

    @property
    def ratio(self) -> float:
        """How many times `undisturbed` the 99th percentile is."""
        return self.p99 / self.undisturbed

    def to_json(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)


def measure_stalls(server: BenchServer, streams: int, prompt_tokens: int, seconds: float, rounds: int) -> Stalls:
    """`rounds` prompts, one after the other, each after `seconds` without one. CorollaError for too long a prompt."""
    most = ModelShape.of(server.plan.config).context_length
    if prompt_tokens >= most:
        raise CorollaError(f"a prompt of {prompt_tokens} tokens: this model takes up to {most - 1}")
    tokenizer = AutoTokenizer.from_pretrained(local_folder(server.plan))
    prompts = make_prompts(tokenizer, rounds, prompt_tokens, seed=1)
    beginnings = make_prompts(tokenizer, streams, STREAM_PROMPT_TOKENS)
    computed = []
    max_tokens = min(STREAM_TOKENS, most - STREAM_PROMPT_TOKENS)
    with _running(server.grpc, beginnings, max_tokens) as gaps, CorollaClient(server.grpc) as client:
        for prompt in tqdm(prompts, desc="prompts", unit="prompt"):
            time.sleep(seconds)
            start = time.perf_counter()
            for _ in client.generate(prompt, max_tokens=1):
                pass
            computed.append((start, time.perf_counter()))
        time.sleep(seconds)
    return stalls(gaps, computed, prompt_tokens, streams)


def stalls(gaps: Sequence[Gap], computed: Sequence[Gap], prompt_tokens: int, streams: int) -> Stalls:
    """From all gaps of the streams and the times at which prompts were computed."""
    disturbed = [any(start < end and begin < stop for start, stop in computed) for begin, end in gaps]
    lengths = [(end - begin) * 1e3 for begin, end in gaps]
    return Stalls(
        streams=streams,
        prompt_tokens=prompt_tokens,
        undisturbed=statistics.median(length for length, d in zip(lengths, disturbed, strict=True) if not d),
        p99=percentile([length for length, d in zip(lengths, disturbed, strict=True) if d], 99),
        prompt=statistics.median((stop - start) * 1e3 for start, stop in computed),
    )


@contextmanager
def _running(address: str, prompts: Sequence[str], max_tokens: int) -> Iterator[list[Gap]]:
    """Keeps a stream running for each prompt; gives the gaps of all, complete when the context ends."""
    ended, gaps = Event(), list[Gap]()
    threads = [Thread(target=_stream, args=(address, prompt, max_tokens, ended, gaps)) for prompt in prompts]
    for thread in threads:
        thread.start()
    try:
        yield gaps
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def _stream(address: str, prompt: str, max_tokens: int, ended: Event, gaps: list[Gap]) -> None:
    parameters = json.dumps({"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0})
    with CorollaClient(address) as client:
        while not ended.is_set():
            times = []
            for _ in client.generate(prompt, sampling_parameters=parameters):
                times.append(time.perf_counter())
                if ended.is_set():
                    break
            gaps.extend(pairwise(times))


def table(result: Stalls) -> str:
    """The result as Markdown."""
    return markdown(
        ["streams", "undisturbed, median ms", "prompt", "99th percentile meanwhile, ms", "ratio", "first token, ms"],
        [[
            str(result.streams), f"{result.undisturbed:.1f}", f"{result.prompt_tokens} tokens", f"{result.p99:.1f}",
            f"{result.ratio:.2f}", f"{result.prompt:.0f}",
        ]],
    )  # fmt: skip
