"""Programs of inductor in a row: what each gets from the one before, from all, and of its own."""

from collections.abc import Sequence
from pathlib import Path

import torch

from corolla.kernels.build import load_kernels


class ProgramChain:
    """Compiled modules of corolla.model.compilation that run one after the other, without Python in between."""

    def __init__(self, files: Sequence[Path], own: Sequence[Sequence[torch.Tensor]]) -> None:
        """The program in files[i] gets the tensors own[i] in every run, behind those that all share."""
        load_kernels()
        self._all = range(len(files))
        self._chain = torch.classes.corolla.ProgramChain(list(map(str, files)), list(map(list, own)))

    def __call__(
        self,
        carried: torch.Tensor,
        shared: Sequence[torch.Tensor] = (),
        each: Sequence[torch.Tensor] = (),
        part: range | None = None,
    ) -> list[torch.Tensor]:
        """Each program gets the first output of the one before, the first one `carried`; returns the last outputs.

        Those of `each`, if there are any, are one tensor more for every program, behind its own. `part` are the
        programs that run, else all.
        """
        part = self._all if part is None else part
        outputs: list[torch.Tensor] = self._chain.run(carried, list(shared), list(each), part.start, part.stop)
        return outputs
