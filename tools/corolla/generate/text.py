"""Tokens to text that can be sent: whole characters only, and nothing that belongs to a stop word."""

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase


class TextStream:
    """The text of one generation, piece by piece.

    `push` returns what is safe to send after a token: complete UTF-8 characters, without an end that may still
    become a stop word. `stopped` tells that a stop word was met; the text ends before it.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], stop_words: Sequence[str]
    ) -> None:
        self._tokenizer = tokenizer
        self._decoder = DecodeStream(ids=list(prompt_ids), skip_special_tokens=True)
        self._prompt_ids = list(prompt_ids)
        self._token_ids: list[int] = []
        self._stop_words = stop_words
        self._decoded = ""
        self._held = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """The text that can be sent now that `token_id` is known; often empty."""
        self._token_ids.append(token_id)
        piece = self._decoder.step(self._tokenizer.backend_tokenizer, token_id)
        return self._release(piece) if piece else ""

    def flush(self) -> str:
        """What is left when no token follows: held text, and replacement characters for an unfinished one."""
        if self.stopped:
            return ""
        before = self._tokenizer.decode(self._prompt_ids, skip_special_tokens=True)
        whole = self._tokenizer.decode([*self._prompt_ids, *self._token_ids], skip_special_tokens=True)
        tail = self._release(whole[len(before) + len(self._decoded) :])
        rest, self._held = self._held, ""
        return tail + rest

    def _release(self, piece: str) -> str:
        self._decoded += piece
        text = self._held + piece
        found = [at for at in (text.find(word) for word in self._stop_words) if at >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        keep = max((_overlap(text, word) for word in self._stop_words), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, word: str) -> int:
    """The length of the longest end of `text` that begins `word`."""
    longest = min(len(text), len(word) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(word[:size])), 0)
