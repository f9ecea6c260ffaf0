"""Tokens are chosen as transformers' `generate` chooses them, with the same settings and the same seed."""

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from checkpoints import random_prompt, text_of
from conftest import Served
from corolla.generate.request import GenerationRequest
from corolla.generate.sampling import Prediction, PresenceFrequencyPenalty, TokenChooser
from reference import Reference

SEED = 12
TOKENS = 24
PROMPT = random_prompt(9, seed=9)


def predict(logits: torch.Tensor) -> Prediction:
    """What a step gives for logits [V]."""
    return Prediction.of_rows(logits[None], [int(logits.argmax())])[0]


def choose_all(reference: Reference, request: GenerationRequest, defaults: GenerationConfig) -> list[int]:
    """The new tokens up to the end token or TOKENS of them."""
    chooser = TokenChooser(request, defaults, reference.tokenizer, PROMPT)
    token_ids = list(PROMPT)
    for _ in range(TOKENS):
        token_ids.append(chooser.choose(token_ids, predict(reference.logits(torch.tensor([token_ids]))[0, -1])))
        if token_ids[-1] in chooser.end_tokens:
            break
    return token_ids[len(PROMPT) :]


def chosen(served: Served, config: dict[str, Any] | None = None, **options: Any) -> list[int]:
    """With `config` as the checkpoint's generation_config.json."""
    request = GenerationRequest(text_of(PROMPT), random_seed=SEED, **options)
    return choose_all(served.reference, request, GenerationConfig(**({"eos_token_id": 256} | (config or {}))))


def expected(served: Served, *, sample: bool, **settings: Any) -> list[int]:
    return served.reference.generate(PROMPT, seed=SEED if sample else None, max_new_tokens=TOKENS, **settings)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"top_k": 1}, {"temperature": 0.0, "top_p": 0.5}])
def test_greedy_tokens(grouped: Served, options: dict[str, Any]) -> None:
    assert chosen(grouped, **options) == expected(grouped, sample=False)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7},
        {"temperature": 1.0},
        {"temperature": 2.5, "top_k": 0},
        {"top_k": 5},
        {"top_p": 0.6},
        {"top_p": 1.0, "top_k": 0},
        {"min_p": 0.3},
        {"temperature": 1.5, "top_k": 30, "top_p": 0.8, "min_p": 0.05},
        {"temperature": 1.5, "repetition_penalty": 1.4},
        {"temperature": 0.01},
    ],
    ids=str,
)
def test_sampled_tokens(grouped: Served, settings: dict[str, Any]) -> None:
    assert chosen(grouped, **settings) == expected(grouped, sample=True, **settings)


@pytest.mark.parametrize("penalty", [0.5, 1.3, 2.0])
def test_repetition_penalty_counts_prompt_and_new_tokens(grouped: Served, penalty: float) -> None:
    assert chosen(grouped, repetition_penalty=penalty) == expected(grouped, sample=False, repetition_penalty=penalty)


@pytest.mark.parametrize("sample", [False, True])
def test_bad_words_of_one_and_of_several_tokens(grouped: Served, sample: bool) -> None:
    how: dict[str, Any] = {"temperature": 0.8} if sample else {}
    free = chosen(grouped, **how)
    words = [[free[0]], [free[3], free[4]], [free[7]]]
    bound = chosen(grouped, bad_words=tuple(text_of(word) for word in words), **how)
    assert bound == expected(grouped, sample=sample, bad_words_ids=words, **how)
    assert bound != free


@pytest.mark.parametrize("min_tokens", [0, 3, 11])
def test_min_tokens_holds_back_every_end_token(grouped: Served, min_tokens: int) -> None:
    ends = [256, expected(grouped, sample=False)[4]]
    tokens = chosen(grouped, {"eos_token_id": ends}, min_tokens=min_tokens)
    assert tokens == expected(grouped, sample=False, eos_token_id=ends, min_new_tokens=min_tokens or None)
    assert len(tokens) >= min_tokens


def test_ignored_end_tokens_do_not_end(grouped: Served) -> None:
    free = expected(grouped, sample=False)
    assert chosen(grouped, {"eos_token_id": free[4]}, ignore_eos=True) == free
    assert chosen(grouped, {"eos_token_id": free[4]}) == free[:5]


def test_tokenizer_names_the_end_token_where_no_config_does(grouped: Served) -> None:
    request = GenerationRequest(text_of(PROMPT))
    chooser = TokenChooser(request, GenerationConfig(), grouped.reference.tokenizer, PROMPT)
    assert chooser.end_tokens == {256}


def test_generation_config_of_the_checkpoint_decides_what_the_request_leaves_open(grouped: Served) -> None:
    config = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2}
    settings = {name: value for name, value in config.items() if name != "do_sample"}
    assert chosen(grouped, config) == expected(grouped, sample=True, **settings)
    assert chosen(grouped, config, top_k=3) == expected(grouped, sample=True, **(settings | {"top_k": 3}))
    assert chosen(grouped, config, temperature=0.0) == expected(grouped, sample=False, repetition_penalty=1.2)


def test_without_a_seed_two_generations_differ(grouped: Served) -> None:
    request = GenerationRequest(text_of(PROMPT), temperature=2.0, top_k=0)
    config = GenerationConfig(eos_token_id=256)
    assert choose_all(grouped.reference, request, config) != choose_all(grouped.reference, request, config)


@pytest.mark.parametrize("seed", [0, 2**63 - 1, 2**63, 2**64 - 1])
def test_seeds_of_64_bits_are_those_of_torch(grouped: Served, seed: int) -> None:
    logits = torch.zeros(301)
    torch.manual_seed(seed if seed < 2**63 else seed - 2**64)
    drawn = [int(torch.multinomial(logits.softmax(-1), 1)) for _ in range(5)]
    request = GenerationRequest(text_of(PROMPT), random_seed=seed, temperature=1.0, top_k=0)
    chooser = TokenChooser(request, GenerationConfig(), grouped.reference.tokenizer, PROMPT)
    assert [chooser.choose(PROMPT, predict(logits)) for _ in range(5)] == drawn


def test_presence_and_frequency_penalties_count_new_tokens_only() -> None:
    scores = torch.zeros(1, 6)
    penalised = PresenceFrequencyPenalty(2, 0.5, 0.25)(torch.tensor([[5, 1, 1, 3, 3, 3]]), scores)
    assert penalised.tolist() == [[0, -0.75, 0, -1.25, 0, 0]]
    assert scores.tolist() == [[0] * 6]


def test_frequency_penalty_keeps_tokens_from_repeating(grouped: Served) -> None:
    plain, bound = chosen(grouped), chosen(grouped, frequency_penalty=2.0, presence_penalty=2.0)
    assert len(set(bound)) > len(set(plain))


def test_choosing_leaves_the_global_generator_alone(grouped: Served) -> None:
    before = torch.get_rng_state()
    chosen(grouped, temperature=1.0)
    assert torch.equal(torch.get_rng_state(), before)


def test_bad_word_is_kept_out_at_the_beginning_of_a_text_and_after_a_space() -> None:
    words = Tokenizer(models.WordLevel({"cat": 0, "Ġcat": 1, "dog": 2, "Ġcatfish": 3}, unk_token="dog"))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    logits = torch.tensor([4.0, 3.0, 1.0, 2.0])
    for bad_words, expected_token in (((), 0), (("cat",), 3)):
        chooser = TokenChooser(GenerationRequest("dog", bad_words=bad_words), GenerationConfig(), tokenizer, [2])
        assert chooser.choose([2], predict(logits)) == expected_token
