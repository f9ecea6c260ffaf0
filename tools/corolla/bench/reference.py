"""The peer in the same process: `generate` of transformers."""

import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation import LogitsProcessor, LogitsProcessorList

from corolla.bench.timing import RunResult, Timing


class _Clock(LogitsProcessor):
    """Notes when each token is chosen."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return scores


class TransformersPeer:
    """A checkpoint in eager mode, as `from_pretrained` gives it."""

    def __init__(self, checkpoint: Path, dtype: torch.dtype, threads: int) -> None:
        torch.set_num_threads(threads)
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self._model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).eval()
        self._model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def run(self, prompts: Sequence[str], max_tokens: int) -> RunResult:
        """One batch of all prompts, which must have equally many tokens, greedy."""
        input_ids = torch.tensor([self.tokenizer(prompt).input_ids for prompt in prompts])
        clock = _Clock()
        sent = time.perf_counter()
        self._model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
            logits_processor=LogitsProcessorList([clock]),
        )
        last = time.perf_counter()
        return RunResult.of([Timing(sent, clock.times[0], last, max_tokens)] * len(prompts))

    @torch.inference_mode()
    def prefill(self, prompt: str) -> float:
        """Tokens per second of one prompt, up to the logits of its last token."""
        input_ids = torch.tensor([self.tokenizer(prompt).input_ids])
        start = time.perf_counter()
        self._model(input_ids, use_cache=True, logits_to_keep=1)
        return input_ids.shape[1] / (time.perf_counter() - start)

    @staticmethod
    def memory() -> int:
        """The most bytes that this process has held so far."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
