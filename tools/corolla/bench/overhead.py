"""What Triton costs: the compiled chain in a bare Python loop of this process against the same through a server."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from corolla.bench.lengths import milliseconds
from corolla.bench.local_models import LocalModels
from corolla.bench.streaming import PROMPT_POSITIONS
from corolla.kv.session import OpenRequest
from corolla.serving.blocks import BlocksRequest


@dataclass(frozen=True)
class Overhead:
    """Milliseconds per token of one session.

    `bare_step` is the chain alone in this process, `raw_step` the same step through the `chain` model over gRPC.
    `bare_token` is embedding, chain, head and the greatest logit in this process, `streamed_token` a token of one
    stream of `generate`.
    """

    bare_step: float
    raw_step: float
    bare_token: float
    streamed_token: float

    @property
    def step_cost(self) -> float:
        """What `raw_step` adds to `bare_step`, in percent."""
        return 100 * (self.raw_step / self.bare_step - 1)

    @property
    def token_cost(self) -> float:
        """What `streamed_token` adds to `bare_token`, in percent."""
        return 100 * (self.streamed_token / self.bare_token - 1)


def median_overhead(rounds: Sequence[Overhead]) -> Overhead:
    """The medians of repeated rounds, figure by figure."""
    return Overhead(
        statistics.median(r.bare_step for r in rounds),
        statistics.median(r.raw_step for r in rounds),
        statistics.median(r.bare_token for r in rounds),
        statistics.median(r.streamed_token for r in rounds),
    )


def bare_step(models: LocalModels, steps: int) -> float:
    """Milliseconds per step of one position after a prompt."""
    hidden_size = models.checkpoint.config.hidden_size
    prompt, token = (
        torch.randn(1, positions, hidden_size).to(models.chain.arena.layout.torch_dtype)
        for positions in (PROMPT_POSITIONS, 1)
    )
    session_id = models.table.open(OpenRequest(PROMPT_POSITIONS + steps)).id
    try:
        with models.chain.steps.held(session_id):
            _run(models, prompt, session_id, 0)
            taken = milliseconds(lambda: [
                _run(models, token, session_id, PROMPT_POSITIONS + step) for step in range(steps)
            ])  # fmt: skip
    finally:
        models.table.close(session_id)
    return taken / steps


def bare_token(models: LocalModels, prompt_ids: list[int], steps: int) -> float:
    """Milliseconds per greedy token after the first one."""
    session_id = models.table.open(OpenRequest(len(prompt_ids) + steps)).id
    try:
        with models.chain.steps.held(session_id):
            token = _next(models, prompt_ids, session_id, 0)
            start = len(prompt_ids)

            def generate() -> None:
                following = token
                for step in range(steps):
                    following = _next(models, [following], session_id, start + step)

            taken = milliseconds(generate)
    finally:
        models.table.close(session_id)
    return taken / steps


def _next(models: LocalModels, token_ids: list[int], session_id: str, position: int) -> int:
    output = _run(models, models.embedding(torch.tensor([token_ids])), session_id, position)
    return models.head.best(output[:, -1:])[1][0]


def _run(models: LocalModels, hidden_states: torch.Tensor, session_id: str, position: int) -> torch.Tensor:
    (output,) = models.chain.run([BlocksRequest(hidden_states, [session_id], [position])])
    if isinstance(output, Exception):
        raise output
    return output
