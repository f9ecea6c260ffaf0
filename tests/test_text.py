"""Streamed text is whole characters, stops before stop words, and adds up to what decoding all tokens gives."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from checkpoints import word_tokenizer
from corolla.checkpoint.synthetic import END_OF_TEXT, byte_tokenizer
from corolla.generate.text import TextStream

BYTES = byte_tokenizer(257)
END_ID = 256


def byte_ids(text: str | bytes) -> list[int]:
    raw = text if isinstance(text, bytes) else text.encode()
    return [id_of_byte(byte) for byte in raw]


def id_of_byte(byte: int) -> int:
    """Bytes from 0xC0 on are written as the character of that number."""
    if byte < 0x80:
        return int(BYTES(chr(byte)).input_ids[0])
    if byte < 0xC0:
        return int(BYTES(bytes([0xC3, byte]).decode()).input_ids[1])
    return int(BYTES.convert_tokens_to_ids(chr(byte)))


def stream(ids: list[int], stop_words: tuple[str, ...] = (), prompt: str = "say: ") -> tuple[list[str], TextStream]:
    """All pieces; the last one is what was left at the end."""
    text = TextStream(BYTES, BYTES(prompt).input_ids, stop_words)
    pieces = []
    for token in ids:
        pieces.append(text.push(token))
        if text.stopped:
            break
    return [*pieces, text.flush()], text


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1))
@settings(deadline=None)
def test_pieces_are_whole_characters_and_add_up(text: str) -> None:
    pieces, _ = stream(byte_ids(text))
    assert "".join(pieces) == text
    end = 0
    for character in text:
        start, end = end, end + len(character.encode())
        if character == "\ufffd":
            break  # cannot be told from an unfinished character before more text follows
        assert pieces[start:end] == [""] * (end - start - 1) + [character]


@given(st.binary(min_size=1, max_size=30))
@settings(deadline=None)
def test_bytes_that_are_no_text_become_what_the_tokenizer_makes_of_them(raw: bytes) -> None:
    pieces, _ = stream(byte_ids(raw))
    assert "".join(pieces) == raw.decode(errors="replace")
    assert not any(piece.endswith("\ufffd") for piece in pieces[:-1]), "a character that may still be completed"


@given(
    st.text("abc", min_size=1, max_size=40),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
@settings(deadline=None, max_examples=300)
def test_text_ends_before_the_first_stop_word_however_it_is_split(text: str, stop_words: list[str]) -> None:
    pieces, state = stream(byte_ids(text), tuple(stop_words))
    ends = [text.find(word) + len(word) for word in stop_words if word in text]
    if not ends:
        assert ("".join(pieces), state.stopped) == (text, False)
        return
    seen = text[: min(ends)]
    assert state.stopped
    assert "".join(pieces) == seen[: min(seen.find(word) for word in stop_words if word in seen)]


def test_text_that_may_become_a_stop_word_is_held_and_sent_when_it_does_not() -> None:
    pieces, _ = stream(byte_ids("a ENx END"), ("END",))
    assert pieces == ["a", " ", "", "", "ENx", " ", "", "", "", ""]


def test_held_text_is_sent_at_the_end() -> None:
    pieces, state = stream(byte_ids("a EN"), ("END",))
    assert (pieces[-1], state.stopped) == ("EN", False)


def test_unfinished_character_becomes_a_replacement_at_the_end() -> None:
    pieces, _ = stream(byte_ids("é€".encode()[:-1]))
    assert pieces == ["", "é", "", "", "\ufffd"]


def test_stop_word_may_hold_multi_byte_characters() -> None:
    pieces, state = stream(byte_ids("ab ✿ cd"), (" ✿",))
    assert ("".join(pieces), state.stopped) == ("ab", True)


def test_stop_word_that_begins_in_the_prompt_does_not_count() -> None:
    pieces, state = stream(byte_ids("D and on"), ("END",), prompt="the EN")
    assert ("".join(pieces), state.stopped) == ("D and on", False)


def test_special_tokens_are_no_text() -> None:
    pieces, _ = stream([*byte_ids("a"), END_ID, *byte_ids("b")])
    assert "".join(pieces) == "ab"
    assert END_OF_TEXT not in "".join(pieces)


def sentence_piece_like() -> PreTrainedTokenizerFast:
    """Spaces as U+2581 and unknown characters as bytes, as the tokenizer of Llama 2 does it."""
    tokens = ["<unk>", "▁", "▁a", "▁b", "c", *(f"<0x{byte:02X}>" for byte in range(256))]
    model = models.BPE({token: i for i, token in enumerate(tokens)}, merges=[], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def tidying() -> PreTrainedTokenizerFast:
    """Its decode takes the space before a full stop away."""
    words = ["hello", ",", ".", "you", "do", "n't", "go"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="go"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=True)


@pytest.mark.parametrize(
    ("tokenizer", "prompt", "ids"),
    [
        (sentence_piece_like(), [2, 4], [3, 4, 1, 2, 4, 4]),
        (sentence_piece_like(), [2], [5 + byte for byte in "é✿".encode()] + [3]),
        (sentence_piece_like(), [1], [1, 1, 2]),
        (word_tokenizer(301), [5], [17, 18]),
        (tidying(), [0], [3, 4, 6]),
    ],
)
def test_text_is_what_decoding_adds_to_the_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: list[int], ids: list[int]
) -> None:
    text = TextStream(tokenizer, prompt, ())
    pieces = [*(text.push(token) for token in ids), text.flush()]
    assert tokenizer.decode(prompt) + "".join(pieces) == tokenizer.decode(prompt + ids)


def test_unfinished_character_after_byte_tokens_repeats_nothing() -> None:
    """This decoder makes replacements of a whole run of bytes when one of them is missing."""
    text = TextStream(sentence_piece_like(), [2], ())
    pieces = [*(text.push(5 + byte) for byte in "é✿".encode()[:-1]), text.flush()]
    assert pieces[:2] == ["", "é"]
    assert set("".join(pieces[2:])) == {"\ufffd"}


def test_tidying_tokenizer_loses_no_text() -> None:
    """What its decode takes away may come or not, but no word is lost or repeated."""
    text = TextStream(tidying(), [0], ("never",))
    pieces = [*(text.push(token) for token in [1, 3, 4, 5, 6, 2]), text.flush()]
    assert "".join(pieces).split() == [",", "you", "do", "n't", "go", "."]


def test_every_prefix_of_the_stream_is_a_prefix_of_the_text() -> None:
    text = "naïve ✿ text"
    pieces, _ = stream(byte_ids(text))
    sent = ["".join(pieces[:count]) for count in range(len(pieces) + 1)]
    assert all(after.startswith(before) for before, after in pairwise(sent))
    assert sent[-1] == text
