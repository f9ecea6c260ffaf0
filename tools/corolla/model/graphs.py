"""Chain steps captured in CUDA graphs, one per batch size and width of the page table."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from corolla.model.attention import PagedRows

Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, PagedRows], torch.Tensor]
Capture = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], None], torch.Tensor]]
"""Captures a function on fixed memory; returns how to replay it, and its output's memory."""


def cuda_capture(function: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """See Capture. Runs the function first, on a stream of its own, as torch.cuda.graph wants it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = function()
    return graph.replay, output


@dataclass(frozen=True)
class _Graph:
    inputs: list[torch.Tensor]
    replay: Callable[[], None]
    output: torch.Tensor


class GraphedChain:
    """Captures a step the first time that its batch size and page table width (a power of two) occur."""

    def __init__(self, step: Step, capture: Capture = cuda_capture) -> None:
        self._step = step
        self._capture = capture
        self._graphs: dict[tuple[int, int], _Graph] = {}

    def __call__(
        self, hidden_states: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, rows: PagedRows
    ) -> torch.Tensor:
        """See corolla.model.decoders.ChainStep."""
        width = 1 << (rows.pages.shape[1] - 1).bit_length()
        pages = torch.nn.functional.pad(rows.pages, (0, width - rows.pages.shape[1]))
        inputs = [hidden_states, cosines, sines, pages, rows.positions]
        key = (len(hidden_states), width)
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._captured(inputs)
        for own, given in zip(graph.inputs, inputs, strict=True):
            own.copy_(given)
        graph.replay()
        return graph.output.clone()

    def _captured(self, inputs: list[torch.Tensor]) -> _Graph:
        own = [tensor.clone() for tensor in inputs]
        hidden_states, cosines, sines, pages, positions = own
        rows = PagedRows(pages, positions)
        replay, output = self._capture(lambda: self._step(hidden_states, cosines, sines, rows))
        return _Graph(own, replay, output)
