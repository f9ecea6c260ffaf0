"""One running generation."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

from corolla.generate.request import GenerationRequest
from corolla.generate.sampling import Prediction, TokenChooser
from corolla.generate.text import TextStream
from corolla.remote.sessions import RouteSessions


@dataclass(frozen=True)
class Finished:
    """How a generation ended: `reason` is stop (end token or stop word) or length."""

    reason: str
    num_input_tokens: int
    num_output_tokens: int


class Output(Protocol):
    """Where a generation's text goes. No method blocks; all may be called after the client is gone."""

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for the text any more."""

    def poll(self) -> None:
        """Asks for a look whether anybody still waits; `cancelled` tells it soon."""

    def begin(self, session_id: str) -> None:
        """Tells the session by which a broken off generation can be gone on with."""

    def send(self, text: str, finished: Finished | None) -> None:
        """More text, and with the last of it how it ended."""

    def fail(self, error: Exception) -> None:
        """Ends the output with an error."""


@dataclass
class Setbacks:
    """How often a generation failed at one position."""

    _position: int = -1
    _count: int = 0

    def count_at(self, position: int) -> int:
        """Counts one more; starts anew where there was progress."""
        self._count = self._count + 1 if position == self._position else 1
        self._position = position
        return self._count


def _keep_no_log(position: int, token_id: int) -> None:
    """For generations that nobody has to go on with."""


@dataclass
class Sequence:
    """A generation in progress: `token_ids` are prompt and new tokens, the first `cached` of them in the cache.

    `log` is told every new token and its position before the text is sent. `resources` are freed by whoever
    lets the sequence go. `sessions` are those on the way through other servers, if there are any.
    """

    request: GenerationRequest
    prompt_ids: list[int]
    max_tokens: int
    chooser: TokenChooser
    text: TextStream
    output: Output
    session_id: str = ""
    cached: int = 0
    log: Callable[[int, int], None] = _keep_no_log
    resources: ExitStack = field(default_factory=ExitStack)
    sessions: RouteSessions | None = None
    setbacks: Setbacks = field(default_factory=Setbacks)
    token_ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_ids)

    @property
    def new_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - len(self.prompt_ids)

    @property
    def pending(self) -> list[int]:
        """Tokens the model has not seen yet: the prompt's rest, then always the newest one."""
        return self.token_ids[self.cached :]

    def accept(self, prediction: Prediction) -> Finished | None:
        """Chooses the next token, sends its text; returns how it ended, if it did."""
        self.cached = len(self.token_ids)
        token = self.chooser.choose(self.token_ids, prediction)
        self.log(self.cached, token)
        text, finished = self.append(token)
        if self.request.echo and self.new_tokens == 1:
            text = self.request.text_input + text
        self.output.send(text, finished)
        return finished

    def append(self, token: int) -> tuple[str, Finished | None]:
        """Takes a token; returns the text that can be sent now, and how the generation ended if it did."""
        self.token_ids.append(token)
        ended = token in self.chooser.end_tokens
        text = "" if ended else self.text.push(token)
        finished = self._finished(ended)
        if finished is not None:
            text += self.text.flush()
        return text, finished

    def _finished(self, ended: bool) -> Finished | None:
        if ended or self.text.stopped:
            reason = "stop"
        elif self.new_tokens >= self.max_tokens:
            reason = "length"
        else:
            return None
        return Finished(reason, len(self.prompt_ids), self.new_tokens)


StepFunction = Callable[[list[Sequence]], "list[Prediction | Exception]"]
"""Runs the pending tokens of sequences: what the model predicts after the last one of each, or an error."""
