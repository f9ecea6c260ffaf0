"""What a dry run predicts of one session's speed beside what a server streams, in turn.

corolla make-checkpoint --shape S --out /tmp/llama-s
python tests/planned_speed.py /tmp/llama-s
"""

import argparse
import statistics
import tempfile
from pathlib import Path

from transformers import AutoTokenizer

from corolla.bench.prompts import make_prompts
from corolla.bench.serving import bench_server, make_plan
from corolla.bench.streams import run_streams
from corolla.planning.dry_run import DryRun, dry_run
from corolla.planning.measurement import MOST_BLOCKS
from corolla.planning.throughput import speed_of
from corolla.repository.writer import write_repository

PROMPT_TOKENS = 16


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quant", default="none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=64)
    arguments = parser.parse_args()
    plan = make_plan(arguments.checkpoint, arguments.dtype, quant=arguments.quant)
    blocks = len(plan.hosted)
    prompts = make_prompts(AutoTokenizer.from_pretrained(arguments.checkpoint), 1, PROMPT_TOKENS)
    ratios = []
    with tempfile.TemporaryDirectory(prefix="corolla-planned-") as folder, bench_server(plan) as server:
        write_repository(plan, Path(folder))
        run_streams(server.grpc, prompts, arguments.max_tokens)
        for _ in range(arguments.rounds):
            outcome = dry_run(Path(folder), DryRun(0, min(blocks, MOST_BLOCKS), forwards=1, seconds=5))
            predicted = speed_of(outcome, 1.0, blocks).session
            served = run_streams(server.grpc, prompts, arguments.max_tokens).decode
            ratios.append(predicted / served)
            print(f"predicted {predicted:6.1f} tok/s  served {served:6.1f}  {ratios[-1] - 1:+6.1%}", flush=True)
    print(f"median {statistics.median(ratios) - 1:+.1%}")


if __name__ == "__main__":
    main()
