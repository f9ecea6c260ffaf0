"""The files of `--json`: what was measured, on what, and all figures."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from corolla.errors import CorollaError
from corolla.quantization import NONE
from corolla.repository.plan import RepositoryPlan


@dataclass(frozen=True)
class Setting:
    """Which benchmark was run on which checkpoint; `dtype` with the quantization, if any; `threads` per process."""

    benchmark: str
    checkpoint: str
    dtype: str
    threads: int

    @classmethod
    def of(cls, benchmark: str, plan: RepositoryPlan) -> "Setting":
        """The setting of a benchmark of what a plan serves."""
        dtype = plan.dtype.name if plan.quant == NONE else f"{plan.dtype.name}-{plan.quant}"
        return cls(benchmark, plan.checkpoint.name, dtype, plan.threads)


def write_figures(file: Path | None, setting: Setting, figures: dict[str, Any]) -> None:
    """Writes both as one JSON object, if there is a file."""
    if file is not None:
        file.write_text(json.dumps(asdict(setting) | figures, indent=2) + "\n")


def read_figures(file: Path) -> dict[str, Any]:
    """What `write_figures` wrote; CorollaError for any other file."""
    try:
        figures = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CorollaError(f"{file}: no figures can be read ({error}); write them with --json") from error
    if not isinstance(figures, dict) or not {"benchmark", "checkpoint", "dtype", "threads"} <= figures.keys():
        raise CorollaError(f"{file}: no figures of a benchmark; write them with `corolla bench ... --json`")
    return figures
