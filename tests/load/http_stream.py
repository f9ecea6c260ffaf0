"""Load on `generate` over HTTP: server-sent events of /generate_stream.

locust -f tests/load/http_stream.py --headless -u 4 -r 4 -t 30s -s 30 -H http://127.0.0.1:8000
"""

import json
from collections.abc import Iterator
from typing import Any

import requests

from prompts import prompts
from timing import Timing
from users import StreamingUser

TIMEOUT_SECONDS = 120
"""Without a byte from the server."""


class HttpStreamUser(StreamingUser):
    """Keeps one connection, as a client of a chat does."""

    host = "http://127.0.0.1:8000"
    kind = "HTTP stream"

    def on_start(self) -> None:
        super().on_start()
        self._http = self.connections.enter_context(requests.Session())
        self._prompts = prompts(self.options.prompt_words, self.options.seed)

    def request(self, timing: Timing) -> None:
        tokens = self.options.max_tokens
        body = {"text_input": next(self._prompts), "stream": True, "max_tokens": tokens, "min_length": tokens}
        for event in self._events(body):
            if event["text_output"]:
                timing.response_came()
            timing.tokens = event.get("num_output_tokens", 0)

    def _events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events as they come; RuntimeError with the server's message."""
        url = f"http://{self.address}/v2/models/generate/generate_stream"
        with self._http.post(url, json=body, stream=True, timeout=TIMEOUT_SECONDS) as response:
            for line in response.iter_lines():
                if line:
                    event = json.loads(line.removeprefix(b"data: "))
                    if "error" in event:
                        raise RuntimeError(f"{response.status_code}: {event['error']}")
                    yield event
