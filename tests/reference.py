"""What transformers itself computes from a checkpoint: the truth of all exactness tests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class Reference:
    """The whole model in one piece."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self._generated: dict[str, list[int]] = {}

    @torch.inference_mode()
    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V] of token ids [B, T]."""
        return self.model(input_ids, use_cache=False).logits.float()

    def generate(self, prompt_ids: Sequence[int], seed: int | None = None, **settings: Any) -> list[int]:
        """New token ids, the end token among them; sampled from the global generator with `seed`, greedy without."""
        key = repr((prompt_ids, seed, sorted(settings.items())))
        if key not in self._generated:
            self._generated[key] = self._generate(prompt_ids, seed, settings)
        return list(self._generated[key])

    def _generate(self, prompt_ids: Sequence[int], seed: int | None, settings: dict[str, Any]) -> list[int]:
        if seed is not None:
            torch.manual_seed(seed)
        settings = {"max_new_tokens": 64, "do_sample": seed is not None, "pad_token_id": 0} | settings
        prompt = torch.tensor([list(prompt_ids)])
        with torch.inference_mode():
            whole = self.model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
        new: list[int] = whole[0, prompt.shape[1] :].tolist()
        return new

    def lead(self, prompt_ids: Sequence[int], new_ids: Sequence[int]) -> float:
        """By how much the best logit is ahead of the next one, at least, over all new tokens."""
        logits = self.logits(torch.tensor([[*prompt_ids, *new_ids]]))[0, len(prompt_ids) - 1 : -1]
        best, second = logits.topk(2).values.unbind(-1)
        return float((best - second).min())

    def text(self, prompt_ids: Sequence[int], new_ids: Sequence[int]) -> str:
        """The text that new tokens add to the prompt's."""
        before = self.tokenizer.decode(list(prompt_ids), skip_special_tokens=True)
        after = self.tokenizer.decode([*prompt_ids, *new_ids], skip_special_tokens=True)
        assert after.startswith(before)
        added: str = after[len(before) :]
        return added
