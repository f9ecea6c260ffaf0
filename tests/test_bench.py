"""Benchmarks: their figures are what they say, and every subcommand runs to its end."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from checkpoints import SERVED
from corolla.bench import serving
from corolla.bench.bursts import BurstClient, Watch
from corolla.bench.figures import Setting, read_figures, write_figures
from corolla.bench.lengths import StepTimes, crossing, powers_of_two
from corolla.bench.memory import read_speed
from corolla.bench.merged import crossing_text
from corolla.bench.overhead import Overhead
from corolla.bench.pictures import DRAWINGS, draw_files
from corolla.bench.serving import bench_server, make_plan
from corolla.bench.sizes import rows_of_step
from corolla.bench.stalls import stalls
from corolla.bench.streaming import streamed_steps
from corolla.bench.tables import markdown
from corolla.bench.timing import percentile
from corolla.cli.main import cli
from corolla.errors import CorollaError
from corolla.generate.sequence import Finished
from corolla.serving.blocks import BlocksRequest

PNG = b"\x89PNG\r\n\x1a\n"
RUN = {"decode": 90.0, "whole": 80.0, "first_token": 0.02}
SETTING = {"checkpoint": "S", "dtype": "bfloat16", "threads": 2}
SAMPLES: dict[str, dict[str, Any]] = {
    "generate": {"comparisons": [{"sessions": n, "ours": RUN, "theirs": RUN, "ratio": 1.0} for n in (1, 4)]},
    "merged": {
        "ranges": 8,
        "crossing": 4,
        "lengths": [{"positions": n, "merged": 2.0 * n, "unmerged": 4.0 + n} for n in (1, 2, 4, 8)],
    },
    "channel": {
        "burst": {"generations": 32},
        "results": [
            {"capacity": 0, "throughput": 90.0, "freed": None, "wasted_prompts": 16.0, "wasted_tokens": 2.0},
            {"capacity": 8, "throughput": 80.0, "freed": 40.0, "wasted_prompts": 32.0, "wasted_tokens": 0.0},
        ],
    },
    "sizes": {"results": [{"sizes": s, "requests": n, "run": RUN} for s in ([8], [8, 4, 1]) for n in (1, 3)]},
    "mirror": {
        "results": [
            {"mirror": m, "clients": n, "steps_per_second": 100.0 * n, "p95": 9.0, "rows_per_batch": 1.5}
            for m in (True, False)
            for n in (1, 8)
        ]
    },
}


def test_gaps_count_for_the_prompt_that_they_overlap() -> None:
    gaps = [(0.0, 0.010), (0.010, 0.022), (1.0, 1.011), (1.011, 1.040), (1.040, 1.050), (2.0, 2.030)]
    result = stalls(gaps, [(1.005, 1.045)], 1024, 4)
    assert (round(result.undisturbed, 6), round(result.p99, 6), round(result.prompt, 6)) == (12.0, 29.0, 40.0)
    assert round(result.ratio, 3) == 2.417


def times(*ratios: float) -> list[StepTimes]:
    """Steps of 1, 2, 4, ... positions, unmerged so many times as long as merged."""
    return [StepTimes(2**index, 10.0, 10.0 * ratio) for index, ratio in enumerate(ratios)]


def test_crossing_is_where_unmerged_steps_stay_as_fast() -> None:
    assert crossing(times(2.0, 0.9, 1.5, 1.0, 0.95)) == 8, "what is fast by chance in between does not count"
    assert crossing(times(1.0, 0.9)) == 1
    assert crossing(times(0.5, 1.01)) is None
    assert crossing(times(2.0, 1.04, 1.01), tolerance=0.05) == 2


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        ((2.0, 1.5), "Merged steps are faster up to 2 positions, the longest measured."),
        ((2.0, 1.03), "faster up to 2 positions, the longest measured. From 2 positions on, unmerged steps take at"),
        ((2.0, 1.03, 0.9), "From 4 positions on, unmerged steps are no slower than merged ones. From 2 positions on"),
    ],
)
def test_crossing_in_words(ratios: tuple[float, ...], said: str) -> None:
    assert said in crossing_text(times(*ratios))


def test_lengths_are_powers_of_two_within_bounds() -> None:
    assert powers_of_two(1) == [1]
    assert powers_of_two(1000) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert powers_of_two(1024)[-1] == 1024


def test_ratio_of_streams_is_the_median_of_ratios() -> None:
    streamed = streamed_steps([(10.0, 10.0), (30.0, 10.0), (40.0, 20.0)], 64)
    assert (streamed.merged, streamed.unmerged, streamed.ratio) == (30.0, 10.0, 2.0)


def test_costs_of_triton_are_in_percent_of_the_bare_loop() -> None:
    overhead = Overhead(bare_step=10.0, raw_step=11.0, bare_token=20.0, streamed_token=19.0)
    assert overhead.step_cost == pytest.approx(10.0)
    assert overhead.token_cost == pytest.approx(-5.0)


@pytest.mark.parametrize(
    ("requests", "sizes", "rows", "padding"),
    [(1, (8,), 8, 7), (1, (8, 4, 1), 1, 0), (3, (8, 4, 1), 4, 1), (5, (4, 1), 5, 0), (8, (4, 1), 8, 0)],
)
def test_rows_of_a_step(requests: int, sizes: tuple[int, ...], rows: int, padding: int) -> None:
    assert rows_of_step(requests, sizes) == (rows, padding)


def test_percentile_is_one_of_the_values() -> None:
    assert percentile([3.0], 95) == 3.0
    assert percentile([float(n) for n in range(1, 101)], 95) == 95.0
    assert percentile([4.0, 1.0, 2.0, 3.0], 50) == 2.0


def test_markdown_table() -> None:
    assert markdown(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


def test_memory_speed_is_that_of_a_machine() -> None:
    assert 1e8 < read_speed(size=2**24, rounds=2) < 1e13


def test_what_is_computed_for_clients_that_left_is_counted() -> None:
    stays, leaves, ended = BurstClient(), BurstClient(), BurstClient()
    clients = [stays, leaves, ended]
    watch = Watch()
    watch.begin(clients)
    for name, client in zip(("stays", "leaves", "ended"), clients, strict=True):
        client.begin(name)
    ended.send("", Finished("length", 3, 7))
    for client in (leaves, ended):
        client.leave()
    step = [BlocksRequest(torch.zeros(1, 3, 4), [client.session_id], [0]) for client in clients]
    watch.computes(step)
    watch.computes([BlocksRequest(torch.zeros(1, 1, 4), ["leaves"], [3])])
    assert (watch.wasted_prompts, watch.wasted_tokens) == (3, 1)
    assert not leaves.cancelled, "nothing was sent since"
    leaves.send("text", None)
    assert leaves.cancelled
    watch.frees("leaves")
    assert leaves.freed >= leaves.left > 0
    assert (stays.is_freed.is_set(), leaves.is_freed.is_set()) == (False, True)


def test_figures_say_what_they_are_of(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    write_figures(file, Setting("sizes", **SETTING), {"results": []})
    assert read_figures(file) == {"benchmark": "sizes", **SETTING, "results": []}
    write_figures(None, Setting("sizes", **SETTING), {})


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"benchmark": "sizes"}'])
def test_other_files_are_no_figures(tmp_path: Path, content: str) -> None:
    file = tmp_path / "figures.json"
    file.write_text(content)
    with pytest.raises(CorollaError, match=r"figures\.json.*--json"):
        read_figures(file)


def test_every_benchmark_has_a_picture(tmp_path: Path) -> None:
    assert SAMPLES.keys() == DRAWINGS.keys()
    files = []
    for name, sample in SAMPLES.items():
        files.append(tmp_path / f"{name}.json")
        write_figures(files[-1], Setting(name, **SETTING), sample)
    pictures = draw_files(files, tmp_path / "pictures")
    assert [picture.name for picture in pictures] == [f"{name}-S-bfloat16.png" for name in SAMPLES]
    for picture in pictures:
        assert picture.read_bytes().startswith(PNG)
        assert picture.stat().st_size < 60_000, picture


def test_no_picture_of_an_unknown_benchmark(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    write_figures(file, Setting("dance", **SETTING), {})
    with pytest.raises(CorollaError, match="'dance'; known are channel, generate"):
        draw_files([file], tmp_path)


def bench(*arguments: object) -> Result:
    """`corolla bench` with these arguments."""
    return CliRunner().invoke(cli, ["bench", *map(str, arguments)], catch_exceptions=False)


@pytest.mark.parametrize("name", [*DRAWINGS, "linears", "pictures", "quality", "routing", "swarm"])
def test_every_benchmark_explains_itself_with_an_example(name: str) -> None:
    assert f"Example: corolla bench {name} " in bench(name, "--help").output


@pytest.mark.parametrize("given", ["", "1,x", "0", "1,65"])
def test_lists_of_numbers_are_checked(tmp_path: Path, given: str) -> None:
    result = bench("generate", tmp_path, "--sessions", given)
    assert result.exit_code == 2
    assert "Invalid value for '--sessions'" in result.output


def test_benchmarks_run_and_can_be_drawn(tmp_path: Path, suite_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All on one server, whatever the plan of each: starting servers takes longer than all else."""
    monkeypatch.setenv("COROLLA_CACHE", str(suite_cache))
    checkpoint = tmp_path / "checkpoint"
    replace(SERVED, fragments=False).write(checkpoint)
    with bench_server(make_plan(checkpoint, "auto", threads=1, max_batch_size=4)) as server:
        monkeypatch.setattr(serving, "bench_server", lambda plan: nullcontext(replace(server, plan=plan)))
        run_benchmarks(checkpoint, tmp_path)


def test_routes_in_swarms_are_timed() -> None:
    result = bench("routing", "--peers", 20, "--blocks", 8, "--repetitions", 2)
    assert result.output.splitlines()[2].startswith("| 20 | 8 | "), result.output


def compare_quantizations(checkpoint: Path, folder: Path) -> None:
    """The benchmarks that need no server."""
    text = folder / "text.txt"
    text.write_text("t1 t2 t3 t4 t5")
    result = bench("quality", checkpoint, "--dtype", "float32", "--threads", 1, "--text", text, "--window", 3)
    assert result.exit_code == 0, result.output
    kinds = [line.split(" | ")[:2] for line in result.output.splitlines() if line.startswith(("| int8", "| nf4"))]
    assert kinds == [[f"| {quant}", kernels] for quant in ("int8", "nf4") for kernels in ("Corolla", "bitsandbytes")]
    result = bench("linears", "--outputs", 64, "--inputs", 64, "--rows", "1,2", "--threads", 1, "--rounds", 1)
    assert result.exit_code == 0, result.output
    assert "| Corolla, nf4 | 0.0 | " in result.output


def watch_streams(checkpoint: Path, folder: Path) -> None:
    file = folder / "stalls.json"
    chosen = ("--streams", 2, "--prompt-tokens", 100, "--seconds", 0.2, "--max-batch-size", 4, "--rounds", 1)
    result = bench("stalls", checkpoint, "--threads", 1, *chosen, "--json", file)
    assert result.exit_code == 0, result.output
    figures = read_figures(file)
    assert (figures["streams"], figures["prompt_tokens"]) == (2, 100)
    assert figures["undisturbed"] > 0
    assert figures["p99"] > 0


def run_benchmarks(checkpoint: Path, folder: Path) -> None:
    """Every subcommand as briefly as it can."""
    options: dict[str, tuple[object, ...]] = {
        "generate": ("--sessions", "2", "--max-tokens", 4, "--max-batch-size", 4, "--rounds", 1),
        "merged": (
            "--range-size", 3, "--most", 4, "--repetitions", 2, "--seconds", 1, "--steps", 16, "--max-batch-size", 4,
            "--rounds", 1,
        ),
        "channel": ("--capacities", "0,1", "--generations", 4, "--cancel-after", 0, "--max-batch-size", 4,
                    "--rounds", 1),
        "sizes": ("--sizes", "4,1", "--requests", "1,3", "--max-tokens", 4, "--rounds", 1),
        "mirror": ("--clients", "2", "--seconds", 0.2, "--max-batch-size", 4),
    }  # fmt: skip
    compare_quantizations(checkpoint, folder)
    watch_streams(checkpoint, folder)
    figures = {}
    for name, chosen in options.items():
        file = folder / f"{name}.json"
        result = bench(name, checkpoint, "--threads", 1, *chosen, "--json", file)
        assert result.exit_code == 0, result.output
        assert "| --- |" in result.output
        figures[name] = read_figures(file)
        assert (figures[name]["benchmark"], figures[name]["checkpoint"]) == (name, "checkpoint")
    assert [step["positions"] for step in figures["merged"]["lengths"]] == [1, 2, 4]
    assert figures["channel"]["results"][0]["cancelled"] <= 1
    assert [(r["rows"], r["padding"]) for r in figures["sizes"]["results"]] == [(1, 0), (4, 1)]
    assert [r["mirror"] for r in figures["mirror"]["results"]] == [True, False]
    assert all(1 <= r["rows_per_batch"] <= 2 for r in figures["mirror"]["results"])
    result = bench("pictures", *(folder / f"{name}.json" for name in options), "--out", folder / "pictures")
    assert result.exit_code == 0, result.output
    assert len(list((folder / "pictures").glob("*.png"))) == len(options)
    assert json.loads((folder / "generate.json").read_text())["read_speed"] > 1e8
