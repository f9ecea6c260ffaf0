"""CPU time that sessions and pages cost a decode step, without the model.

python tests/step_overhead.py
"""

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from corolla.kv.arena import host_arena
from corolla.kv.layout import KVLayout
from corolla.kv.paged_cache import PagedCache
from corolla.kv.session import OpenRequest
from corolla.kv.steps import Row, SessionSteps
from corolla.kv.table import SessionTable

LAYOUT = KVLayout(pages=256, page_size=16, blocks=8, kv_heads=8, head_dim=64, dtype="bfloat16")
POSITION = 80


def microseconds(act: Callable[[], object], repetitions: int = 3000) -> float:
    """CPU time of one call."""
    start = time.thread_time()
    for _ in range(repetitions):
        act()
    return (time.thread_time() - start) / repetitions * 1e6


def main() -> None:
    """Prints the page table's part and the session checks' part, as the generate loop pays them."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, ExitStack() as pins:
        table = SessionTable(Path(folder), LAYOUT, context_length=1024)
        steps, arena = SessionSteps(table, range(8)), host_arena(Path(folder), LAYOUT, range(8))
        for count in (1, 8):
            ids = [table.open(OpenRequest(128)).id for _ in range(count)]
            for session_id in ids:
                pins.enter_context(steps.held(session_id))
            with steps.running([Row(session_id, 0) for session_id in ids], POSITION):
                pass
            rows = [Row(session_id, POSITION) for session_id in ids]

            def check(rows: list[Row] = rows) -> None:
                with steps.running(rows, 1):
                    pass

            with steps.running(rows, 1) as checked:
                pages = microseconds(lambda checked=checked: PagedCache(arena, checked))  # type: ignore[misc]
            print(f"{count} rows: pages to slots {pages:.1f} us, session checks {microseconds(check):.1f} us")


if __name__ == "__main__":
    main()
