"""Planned memory beside measured: of a process that serves a range of blocks, and of all processes of a server.

corolla make-checkpoint --shape S --out /tmp/llama-s
python tests/planned_memory.py range /tmp/llama-s --quant int8
python tests/planned_memory.py server /tmp/llama-s

`--family falcon`, `mixtral` and others write a checkpoint of that family to the folder first, if there is none.
"""

import argparse
import tempfile
from pathlib import Path

import psutil
from transformers import AutoConfig

from corolla.checkpoint.source import open_checkpoint
from corolla.checkpoint.synthetic import make_checkpoint
from corolla.client import CorollaClient
from corolla.dtypes import dtype_named
from corolla.kv.layout import default_attn_cache_tokens
from corolla.model.batch_sizes import COMPILED
from corolla.planning.dry_run import DryRun, dry_run, prepare
from corolla.planning.machine import DeviceMemory
from corolla.planning.measurement import MOST_BLOCKS, process_memory
from corolla.planning.plan import DevicePlan, Setup, make_plan
from corolla.planning.quantity import bytes_text
from corolla.repository.plan import RepositoryPlan, split_evenly
from corolla.repository.writer import write_repository
from servers import RunningServer

PLENTY = 2**50
FAMILIES = {
    "falcon": {"multi_query": True, "num_attention_heads": 16, "vocab_size": 8192},
    "mixtral": {
        "num_attention_heads": 16, "num_key_value_heads": 4, "num_local_experts": 4, "intermediate_size": 1408,
        "max_position_embeddings": 4096, "vocab_size": 8192,
    },
    "bloom": {"n_head": 16, "vocab_size": 8192, "seq_length": 2048},
}  # fmt: skip


def planned(plan: RepositoryPlan, repository: Path) -> DevicePlan:
    """With what a dry run of the first blocks took, as of `corolla plan --measure`, but a shorter one."""
    run = DryRun(0, min(MOST_BLOCKS, len(plan.hosted)), steps=10, forwards=2, ends=False)
    prepare(repository, run)
    process, packed = process_memory(dry_run(repository, run)), plan.decoder == COMPILED
    setup = Setup(plan.config, plan.dtype, plan.hosted, plan.quant, packed=packed, process=process)
    (device,) = make_plan(setup, [DeviceMemory("cpu", PLENTY, PLENTY, "")], PLENTY).devices
    return device


def compare_range(plan: RepositoryPlan, repository: Path) -> None:
    """The last range, in a process by itself that has used its whole cache.

    Libraries count in full: its proportional set size is this where no other process maps them.
    """
    device, blocks = planned(plan, repository), plan.ranges[-1]
    each = device.number("block_bytes") + device.number("cache_bytes")
    besides = sum(device.number(name) for name in ("process_bytes", "work_bytes", "library_bytes"))
    expected = len(blocks) * each + besides
    tokens = default_attn_cache_tokens(plan.config)
    run = DryRun(blocks.start, blocks.stop, tokens, steps=1, forwards=1, touch=True, ends=False)
    prepare(repository, run)
    found = dry_run(repository, run)
    process = found.private + found.work + found.libraries
    for name, bytes_planned, bytes_found in (
        ("weights", len(blocks) * device.number("block_bytes"), found.weights),
        ("KV cache", len(blocks) * device.number("cache_bytes"), found.cache),
        ("process", besides, process),
        ("all", expected, found.weights + found.cache + process),
    ):
        print(_row(name, bytes_planned, bytes_found))


def compare_server(plan: RepositoryPlan, repository: Path) -> None:
    """All processes after a long prompt; of the KV cache, what its files take."""
    device = planned(plan, repository)
    with RunningServer(repository) as server:
        with CorollaClient(server.grpc) as client:
            for _ in client.generate("a long prompt, " * 200, max_tokens=8):
                pass
        cache = server.run_directory / "kv"
        found = sum(file.stat().st_blocks * 512 for file in cache.iterdir())
        root = psutil.Process(server.process.pid)
        for process in (root, *root.children(recursive=True)):
            maps = process.memory_maps(grouped=True)
            found += sum(mapping.pss for mapping in maps if not mapping.path.startswith(str(cache)))
    print(_row("server", device.needed, found))


def _row(name: str, expected: int, found: int) -> str:
    share = expected / found - 1
    return f"{name:<10} planned {bytes_text(expected):>10}  measured {bytes_text(found):>10}  {share:+6.1%}"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["range", "server"])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--family", choices=FAMILIES)
    parser.add_argument("--quant", default="none")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-batch-size", type=int, default=16)
    parser.add_argument("--decoder", default="compiled")
    arguments = parser.parse_args()
    dtype = dtype_named(arguments.dtype)
    if arguments.family and not (arguments.checkpoint / "config.json").exists():
        options = {"hidden_size": 1024, "num_hidden_layers": 8} | FAMILIES[arguments.family]
        make_checkpoint(AutoConfig.for_model(arguments.family, **options), dtype, 0, arguments.checkpoint)
    config = open_checkpoint(arguments.checkpoint).config
    blocks = range(config.num_hidden_layers)
    plan = RepositoryPlan(
        arguments.checkpoint.resolve(), config, dtype, split_evenly(blocks, -(-len(blocks) // 2)),
        quant=arguments.quant, max_batch_size=arguments.max_batch_size, decoder=arguments.decoder,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="corolla-planned-") as folder:
        write_repository(plan, Path(folder))
        {"range": compare_range, "server": compare_server}[arguments.what](plan, Path(folder))


if __name__ == "__main__":
    main()
