"""Pictures of figures that benchmarks have written, one per file."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from corolla.bench.figures import read_figures
from corolla.errors import CorollaError

OURS, THEIRS = "tab:blue", "tab:orange"
WIDTH, HEIGHT, DOTS_PER_INCH = 7.5, 4.0, 90


def draw_files(files: Iterable[Path], folder: Path) -> list[Path]:
    """Draws each file as PNG in `folder`, which is made; later files of the same name win. CorollaError."""
    folder.mkdir(parents=True, exist_ok=True)
    return [draw_file(file, folder) for file in files]


def draw_file(file: Path, folder: Path) -> Path:
    """The picture of one file, named after benchmark, checkpoint and dtype."""
    figures = read_figures(file)
    name = figures["benchmark"]
    if name not in DRAWINGS:
        raise CorollaError(f"{file}: no picture of the benchmark {name!r}; known are {', '.join(sorted(DRAWINGS))}")
    picture = Figure(figsize=(WIDTH, HEIGHT), dpi=DOTS_PER_INCH, layout="constrained")
    title = DRAWINGS[name](figures, picture)
    threads = "1 thread" if figures["threads"] == 1 else f"{figures['threads']} threads"
    picture.suptitle(f"{title}\n{figures['checkpoint']}, {figures['dtype']}, {threads}", fontsize=11)
    target = folder / f"{name}-{figures['checkpoint']}-{figures['dtype']}.png"
    picture.savefig(target)
    return target


def _generate(figures: dict[str, Any], picture: Figure) -> str:
    compared = figures["comparisons"]
    axes = _axes(picture, "generations at once", "decoding, tokens/s")
    _bars(axes, [c["sessions"] for c in compared], {
        "Corolla, through the server": [c["ours"]["decode"] for c in compared],
        "transformers": [c["theirs"]["decode"] for c in compared],
    })  # fmt: skip
    return "Decoding, all generations together"


def _merged(figures: dict[str, Any], picture: Figure) -> str:
    times = figures["lengths"]
    positions = [t["positions"] for t in times]
    axes = _axes(picture, "positions of the step", "time of one step, ms")
    axes.plot(positions, [t["merged"] for t in times], "o-", color=OURS, label="merged (chain)")
    label = f"unmerged ({figures['ranges']} ranges)"
    axes.plot(positions, [t["unmerged"] for t in times], "s-", color=THEIRS, label=label)
    if figures["crossing"] is not None:
        axes.axvline(figures["crossing"], color="gray", linestyle=":", label="unmerged no slower from here on")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(positions, [str(count) for count in positions])
    axes.legend()
    return "One step of one session, merged against unmerged"


def _channel(figures: dict[str, Any], picture: Figure) -> str:
    results = figures["results"]
    panels = {
        "others, tokens/s": [r["throughput"] for r in results],
        "cancelled to pages free, ms": [r["freed"] or 0.0 for r in results],
        "wasted positions per burst": [r["wasted_prompts"] + r["wasted_tokens"] for r in results],
    }
    for number, (label, values) in enumerate(panels.items(), 1):
        axes = _axes(picture, "channel capacity, batches", label, (1, len(panels), number))
        _bars(axes, [r["capacity"] for r in results], {"": values})
    return f"Bursts of {figures['burst']['generations']} generations, some cancelled"


def _sizes(figures: dict[str, Any], picture: Figure) -> str:
    by_sizes: dict[str, dict[int, float]] = defaultdict(dict)
    for result in figures["results"]:
        by_sizes[f"sizes {', '.join(map(str, result['sizes']))}"][result["requests"]] = result["run"]["decode"]
    requests = sorted({r["requests"] for r in figures["results"]})
    axes = _axes(picture, "requests at once", "decoding, tokens/s")
    _bars(axes, requests, {name: [speeds[count] for count in requests] for name, speeds in by_sizes.items()})
    return "Decoding with decoders compiled for different batch sizes"


def _mirror(figures: dict[str, Any], picture: Figure) -> str:
    panels = {"steps_per_second": "steps/s of all clients", "p95": "p95 of a step, ms", "rows_per_batch": "rows/batch"}
    for number, (key, label) in enumerate(panels.items(), 1):
        axes = _axes(picture, "clients", label, (1, len(panels), number))
        for mirror, name, color in ((True, "mirrored sizes", OURS), (False, "no preferred sizes", THEIRS)):
            chosen = [r for r in figures["results"] if r["mirror"] == mirror]
            axes.plot([r["clients"] for r in chosen], [r[key] for r in chosen], "o-", color=color, label=name)
        axes.set_xticks(sorted({r["clients"] for r in figures["results"]}))
        axes.set_ylim(bottom=0)
    picture.axes[0].legend(fontsize=8)
    return "Steps of clients in closed loops, batched by Triton"


DRAWINGS: dict[str, Callable[[dict[str, Any], Figure], str]] = {
    "generate": _generate,
    "merged": _merged,
    "channel": _channel,
    "sizes": _sizes,
    "mirror": _mirror,
}
"""Per benchmark what draws its figures and returns what they show."""


def _axes(picture: Figure, x: str, y: str, place: tuple[int, int, int] = (1, 1, 1)) -> Axes:
    axes = picture.add_subplot(*place)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(axis="y", alpha=0.3)
    return axes


def _bars(axes: Axes, labels: list[int], groups: dict[str, list[float]]) -> None:
    """Groups of bars side by side, one per label in each."""
    width = 0.8 / len(groups)
    for number, (name, values) in enumerate(groups.items()):
        offset = (number - (len(groups) - 1) / 2) * width
        bars = axes.bar([place + offset for place in range(len(labels))], values, width, label=name)
        axes.bar_label(bars, [_short(value) for value in values], fontsize=8)
    axes.set_xticks(range(len(labels)), [str(label) for label in labels])
    axes.margins(y=0.12)
    if len(groups) > 1:
        axes.legend()


def _short(value: float) -> str:
    """Three digits, or all those before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
