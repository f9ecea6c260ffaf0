"""What a server was sent, so that another one can be sent the same."""

import torch


class History:
    """The inputs of one session on one span, by position."""

    def __init__(self) -> None:
        self._states: torch.Tensor | None = None

    def write(self, start: int, hidden_states: torch.Tensor) -> None:
        """Keeps [T, H] for the positions from `start` on; a step that is repeated replaces what it wrote."""
        end = start + len(hidden_states)
        if self._states is None or end > len(self._states):
            grown = hidden_states.new_empty(2 * end, hidden_states.shape[1])
            if self._states is not None:
                grown[:start] = self._states[:start]
            self._states = grown
        self._states[start:end] = hidden_states

    def read(self, start: int, end: int) -> torch.Tensor:
        """[end - start, H], all of which were written."""
        assert self._states is not None
        return self._states[start:end]
