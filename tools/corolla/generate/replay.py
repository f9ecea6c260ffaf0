"""Going on with a generation whose process died: what was said already, and what the client has not heard."""

from transformers import PreTrainedTokenizerBase

from corolla.errors import InvalidValueError
from corolla.generate.sequence import Finished, Sequence


def replay(
    sequence: Sequence, new_token_ids: list[int], tokenizer: PreTrainedTokenizerBase, vocabulary: int
) -> tuple[str, Finished | None]:
    """Brings a fresh sequence to where the generation was broken off, `new_token_ids` after its prompt.

    Returns the text that its client has not received yet, and how the generation ended if it had. The
    request's text is the prompt, with or without the text received; InvalidValueError for any other.
    """
    text, finished = "", None
    for token_id in new_token_ids:
        piece, finished = sequence.append(token_id)
        text += piece
        if finished is not None:
            break
    received = _received(sequence, text, tokenizer)
    sequence.chooser.skip(sequence.new_tokens, vocabulary)
    return text[len(received) :], finished


def _received(sequence: Sequence, said: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The end of the request's text that is a beginning of `said`, where what is before it is the prompt."""
    text = sequence.request.text_input
    for end in range(max(0, len(text) - len(said)), len(text) + 1):
        if said.startswith(text[end:]) and tokenizer(text[:end]).input_ids == sequence.prompt_ids:
            return text[end:]
    raise InvalidValueError("text_input", text, "the session's prompt, with or without the text received after it")
