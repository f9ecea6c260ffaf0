"""The tokens of generations, in shared memory, so that another process can go on with them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from corolla.kv.layout import KVLayout
from corolla.kv.run_directory import prepared_run_directory
from corolla.kv.session import Session
from corolla.kv.shared_memory import map_array


class TokenLog:
    """One token id per slot of the arena; per record whose they are, how many are known, and how many were the prompt.

    The session is told by its epoch, so that nobody reads what an earlier session of the same record left.
    """

    def __init__(self, directory: Path, layout: KVLayout) -> None:
        with prepared_run_directory(directory, layout):
            self._tokens: NDArray[np.int32] = map_array(directory / "tokens", (layout.slots,), np.dtype(np.int32))
            self._counts: NDArray[np.int64] = map_array(directory / "counts", (layout.pages, 3), np.dtype(np.int64))

    def begin(self, session: Session, prompt_ids: Sequence[int]) -> None:
        """Logs the prompt of a session that was just opened."""
        self._tokens[session.slots[: len(prompt_ids)]] = prompt_ids
        self._counts[session.record] = (session.epoch, len(prompt_ids), len(prompt_ids))

    def append(self, session: Session, position: int, token_id: int) -> None:
        """Logs the token at `position`, the first unknown one."""
        self._tokens[session.slots[position]] = token_id
        self._counts[session.record, 1] = position + 1

    def read(self, session: Session) -> tuple[list[int], int]:
        """All known tokens of a session, and how many of them are its prompt: none if it has no log."""
        epoch, known, prompt = self._counts[session.record].tolist()
        if epoch != session.epoch:
            return [], 0
        return self._tokens[session.slots[:known]].tolist(), prompt
