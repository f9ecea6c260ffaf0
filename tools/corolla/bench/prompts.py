"""Prompts of an exact number of tokens."""

import random

from transformers import PreTrainedTokenizerBase

from corolla.errors import CorollaError

TRIES = 1000


def make_prompts(tokenizer: PreTrainedTokenizerBase, count: int, tokens: int, seed: int = 0) -> list[str]:
    """Different texts of random tokens, each `tokens` tokens long when they are read again."""
    chance = random.Random(seed)
    special = set(tokenizer.all_special_ids)
    ids = [index for index in range(len(tokenizer)) if index not in special]
    texts: list[str] = []
    for _ in range(TRIES * count):
        text = tokenizer.decode([chance.choice(ids) for _ in range(tokens)])
        kept = tokenizer(text).input_ids[:tokens]
        text = tokenizer.decode(kept, skip_special_tokens=True)
        if len(tokenizer(text).input_ids) == tokens and text not in texts and "\0" not in text:
            texts.append(text)
        if len(texts) == count:
            return texts
    raise CorollaError(f"no {count} texts of {tokens} tokens could be made with this tokenizer; try another length")
