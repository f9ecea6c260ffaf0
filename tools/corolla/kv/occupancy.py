"""The state of a server's KV cache as seen from outside its models: only reads, and nothing has to be there yet."""

import json
from dataclasses import dataclass
from pathlib import Path

import apsw

from corolla.kv.database import Database
from corolla.kv.run_directory import LAYOUT, SESSIONS


@dataclass(frozen=True)
class Occupancy:
    """Token positions of the cache, and the names of the loaded adapters, in order."""

    total_tokens: int
    free_tokens: int
    adapters: tuple[str, ...]

    @classmethod
    def of(cls, run_directory: Path) -> "Occupancy":
        """All empty as long as no model of the server has loaded."""
        try:
            layout = json.loads((run_directory / LAYOUT).read_text())
            connection = Database(run_directory / SESSIONS).connection()
            (used,) = connection.execute("SELECT COUNT(*) FROM pages").fetchone()
            names = connection.execute("SELECT name FROM adapters WHERE NOT unloaded ORDER BY name").fetchall()
        except (OSError, ValueError, apsw.Error):
            return cls(0, 0, ())
        pages, page_size = layout["pages"], layout["page_size"]
        return cls(pages * page_size, (pages - used) * page_size, tuple(name for (name,) in names))
