"""Choosing the next token, with the logits processors of transformers."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.generation import logits_process as hf

from corolla.generate.request import GenerationRequest

DEFAULT_TOP_K = 50
"""What transformers' `generate` takes where neither the request nor the checkpoint says anything; 0: no limit."""


class PresenceFrequencyPenalty(hf.LogitsProcessor):
    """logit -= frequency_penalty * count + presence_penalty * (count > 0), over the new tokens.

    The formula is that of the `presence_penalty` and `frequency_penalty` of OpenAI's completions API.
    """

    def __init__(self, prompt_length: int, presence: float, frequency: float) -> None:
        self._prompt_length = prompt_length
        self._presence = presence
        self._frequency = frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """`input_ids` [1, N] int64 and `scores` [1, V] float32 to scores [1, V]."""
        new = input_ids[0, self._prompt_length :]
        counts = torch.bincount(new, minlength=scores.shape[-1]).to(scores.dtype)
        return scores - self._frequency * counts - self._presence * (counts > 0)


@dataclass(frozen=True)
class Prediction:
    """What a model says of the next token: its logits [V] float32, and which of them is the largest."""

    logits: torch.Tensor
    best: int

    @classmethod
    def of_rows(cls, logits: torch.Tensor, best: Sequence[int]) -> list["Prediction"]:
        """One per row of logits [N, V], with the number of the greatest of each."""
        return [cls(row, number) for row, number in zip(logits, best, strict=True)]


class TokenChooser:
    """Chooses the tokens of one generation from its logits.

    With the same settings and seed the tokens are those of transformers' `generate`.
    """

    def __init__(
        self,
        request: GenerationRequest,
        defaults: GenerationConfig,
        tokenizer: PreTrainedTokenizerBase,
        prompt_ids: Sequence[int],
    ) -> None:
        self.end_tokens = frozenset() if request.ignore_eos else _end_tokens(defaults, tokenizer)
        self._sample = _is_sampling(request, defaults)
        self._processors = _processors(request, defaults, tokenizer, prompt_ids, self.end_tokens, self._sample)
        self._generator = torch.Generator()
        seed = request.random_seed if request.random_seed is not None else secrets.randbits(63)
        self._generator.manual_seed(seed - 2**64 if seed >= 2**63 else seed)

    def skip(self, tokens: int, vocabulary: int) -> None:
        """Goes on as if `tokens` had been chosen already: draws as many random numbers as they did."""
        if self._sample:
            for _ in range(tokens):
                torch.multinomial(torch.ones(1, vocabulary), 1, generator=self._generator)

    def choose(self, token_ids: Sequence[int], prediction: Prediction) -> int:
        """The token after `token_ids` (prompt and new tokens so far)."""
        if not self._processors and not self._sample:
            return prediction.best
        scores = prediction.logits[None]
        if self._processors:
            scores = self._processors(torch.tensor([token_ids]), scores)
        if not self._sample:
            return int(scores.argmax())
        return int(torch.multinomial(scores.softmax(-1), 1, generator=self._generator))


def _is_sampling(request: GenerationRequest, defaults: GenerationConfig) -> bool:
    """A request that names a way to sample is sampled; 0 and 1 are the ways to ask for greedy tokens."""
    if request.temperature == 0 or request.top_k == 1:
        return False
    asked = (request.temperature, request.top_k, request.top_p, request.min_p)
    return any(value is not None for value in asked) or bool(defaults.do_sample)


def _end_tokens(defaults: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    ends = defaults.eos_token_id if defaults.eos_token_id is not None else tokenizer.eos_token_id
    if ends is None:
        return frozenset()
    return frozenset(ends if isinstance(ends, list) else [ends])


def _processors(
    request: GenerationRequest,
    defaults: GenerationConfig,
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: Sequence[int],
    end_tokens: frozenset[int],
    sample: bool,
) -> hf.LogitsProcessorList:
    """In the order in which transformers' `generate` applies them."""

    def setting(name: str) -> float | None:
        asked = getattr(request, name)
        value: float | None = asked if asked is not None else getattr(defaults, name, None)
        return value

    ends = torch.tensor(sorted(end_tokens)) if end_tokens else None
    processors = hf.LogitsProcessorList()
    penalty = setting("repetition_penalty")
    if penalty is not None and penalty != 1.0:
        processors.append(hf.RepetitionPenaltyLogitsProcessor(penalty))
    if request.presence_penalty or request.frequency_penalty:
        processors.append(
            PresenceFrequencyPenalty(len(prompt_ids), request.presence_penalty, request.frequency_penalty)
        )
    if request.bad_words:
        processors.append(hf.NoBadWordsLogitsProcessor(_bad_words_ids(request.bad_words, tokenizer), ends))
    if request.min_tokens and ends is not None:
        processors.append(hf.MinNewTokensLengthLogitsProcessor(len(prompt_ids), request.min_tokens, ends))
    if not sample:
        return processors
    temperature, top_k, top_p, min_p = (setting(name) for name in ("temperature", "top_k", "top_p", "min_p"))
    if temperature is not None and temperature != 1.0:
        processors.append(hf.TemperatureLogitsWarper(float(temperature)))
    top_k = DEFAULT_TOP_K if top_k is None else top_k
    if top_k:
        processors.append(hf.TopKLogitsWarper(int(top_k)))
    if top_p is not None and top_p < 1.0:
        processors.append(hf.TopPLogitsWarper(top_p))
    if min_p:
        processors.append(hf.MinPLogitsWarper(min_p))
    return processors


def _bad_words_ids(words: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of each word as it begins a text and as it follows a space."""
    spellings = [spelling for word in words for spelling in (word, f" {word}")]
    ids = {tuple(tokenizer(spelling, add_special_tokens=False).input_ids) for spelling in spellings}
    return [list(word) for word in sorted(ids) if word]
