"""When the responses of one streamed request came, as its client sees it."""

import time
from dataclasses import dataclass, field


@dataclass
class Timing:
    """Times in seconds of the performance counter; `tokens` is what the last response tells, 0 until then.

    The server sends several tokens in one response when they pile up, and does not say how many. So a token has no
    time of its own, except where every response is known to be one token.
    """

    start: float = field(default_factory=time.perf_counter)
    responses: list[float] = field(default_factory=list)
    end: float = 0.0
    tokens: int = 0

    def response_came(self) -> None:
        """To be called for each response with text, when it comes."""
        self.responses.append(time.perf_counter())

    def request_ended(self) -> None:
        self.end = time.perf_counter()

    @property
    def first_token(self) -> float | None:
        """From the request to the first response with text; None if no text came at all."""
        return self.responses[0] - self.start if self.responses else None

    @property
    def inter_token(self) -> float | None:
        """Mean time per token after the first response, which is taken to hold one token.

        None where that means nothing: a single token, or all of them in one response.
        """
        if len(self.responses) < 2 or self.tokens < 2:
            return None
        return (self.responses[-1] - self.responses[0]) / (self.tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """From each response to the next: what a reader waits for, whatever number of tokens it brings."""
        return [later - earlier for earlier, later in zip(self.responses, self.responses[1:], strict=False)]

    @property
    def whole(self) -> float:
        return self.end - self.start
