"""Load on `generate` over gRPC: a stream of tritonclient per request.

locust -f tests/load/grpc_stream.py --headless -u 4 -r 4 -t 30s -s 30 -H 127.0.0.1:8001
"""

import grpc_gevent  # noqa: F401
from corolla.client import CorollaClient
from prompts import prompts
from timing import Timing
from users import StreamingUser


class GrpcStreamUser(StreamingUser):
    """Has a connection of its own."""

    host = "127.0.0.1:8001"
    kind = "gRPC stream"

    def on_start(self) -> None:
        super().on_start()
        self._client = self.connections.enter_context(CorollaClient(self.address))
        self._prompts = prompts(self.options.prompt_words, self.options.seed)

    def request(self, timing: Timing) -> None:
        tokens = self.options.max_tokens
        for chunk in self._client.generate(next(self._prompts), max_tokens=tokens, min_length=tokens):
            if chunk.text:
                timing.response_came()
            timing.tokens = chunk.num_output_tokens or 0
