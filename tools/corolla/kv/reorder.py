"""Beam search: rows take over each other's caches."""

from collections.abc import Callable, Sequence
from itertools import count
from operator import ge

import numpy as np
from numpy.typing import NDArray

from corolla.kv.layout import KVLayout
from corolla.kv.session import Session
from corolla.kv.steps import SessionSteps, StepRows

CopySlots = Callable[[NDArray[np.int64], NDArray[np.int64]], None]


class CacheReorderer:
    """Copies caches between sessions, page by page, and only pages whose contents differ.

    Each page of a session that took part in a reordering has a content number, known to this process: pages
    with equal numbers hold the same. The numbers are forgotten when another process stepped the session.
    """

    def __init__(self, steps: SessionSteps, layout: KVLayout, copy: CopySlots) -> None:
        """`copy` copies keys and values from slots to slots; see KVArena.copy."""
        self._steps = steps
        self._layout = layout
        self._copy_slots = copy
        self._page_size = layout.page_size
        self._numbers = count(1)
        self._contents: dict[int, NDArray[np.int64]] = {}
        self.copied_pages = 0

    def apply(self, rows: StepRows) -> None:
        """Lets row i continue the cache of row `rows.sources[i]`; a step that was made already is left as it is.

        If the process dies in here, the rows it was writing keep what they shared with their sources, and
        their next step reports the gap.
        """
        sources = rows.sources
        if sources is None or self._was_made(rows):
            return
        contents = self._contents_of(rows)
        pages = [-(-start // self._page_size) for start in rows.starts]
        copies = [
            np.flatnonzero(contents[row][:used] != contents[source][:used])
            for row, (source, used) in enumerate(zip(sources, pages, strict=True))
        ]
        shared = [
            int(copy[0]) * self._page_size if len(copy) else min(start, cached)
            for copy, start, cached in zip(copies, rows.starts, rows.cached, strict=True)
        ]
        self._steps.truncate(rows, shared)
        self._copy(sources, rows, copies)
        before = [content.copy() for content in contents]
        for row, source in enumerate(sources):
            contents[row][copies[row]] = before[source][copies[row]]

    def wrote(self, rows: StepRows) -> None:
        """Notes that a step of this process wrote into the rows' pages."""
        for session, start in zip(rows.sessions, rows.starts, strict=True):
            content = self._contents.get(session.epoch)
            if content is not None:
                for page in range(start // self._page_size, -(-(start + rows.new_tokens) // self._page_size)):
                    content[page] = next(self._numbers)

    def _was_made(self, rows: StepRows) -> bool:
        """Whether the last step that was completed is this one: its mark stands until another one's is written."""
        same_step = (self._steps.marks(rows)[..., 1] == rows.signature).all()
        return bool(same_step) and all(map(ge, rows.cached, rows.starts))

    def _contents_of(self, rows: StepRows) -> list[NDArray[np.int64]]:
        mine = (self._steps.marks(rows)[..., 0] == self._steps.process_number).all(axis=1)
        return [self._content_of(session, known) for session, known in zip(rows.sessions, mine.tolist(), strict=True)]

    def _content_of(self, session: Session, known: bool) -> NDArray[np.int64]:
        if len(self._contents) > self._layout.pages:
            self._contents.clear()
        if not known or session.epoch not in self._contents:
            pages = len(session.slots) // self._page_size
            self._contents[session.epoch] = np.fromiter(self._numbers, np.int64, pages)
        return self._contents[session.epoch]

    def _copy(self, sources: Sequence[int], rows: StepRows, copies: list[NDArray[np.int64]]) -> None:
        pages = [session.slots.reshape(-1, self._page_size) for session in rows.sessions]
        targets = np.concatenate([pages[row][copy].ravel() for row, copy in enumerate(copies)])
        origins = np.concatenate([pages[source][copy].ravel() for source, copy in zip(sources, copies, strict=True)])
        self.copied_pages += len(targets) // self._page_size
        self._copy_slots(origins, targets)
