"""Dry runs, remembered in the disk cache under what their outcome depends on: hardware, versions, model, choices."""

import hashlib
import json
import platform
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
import transformers

from corolla import __version__
from corolla.checkpoint.disk_cache import DiskCache
from corolla.checkpoint.source import open_checkpoint
from corolla.kernels.build import processor_flags
from corolla.planning.dry_run import DryRun, Outcome, dry_run
from corolla.planning.quantity import Origin
from corolla.planning.reserve import ProcessMemory
from corolla.planning.sizes import WeightForm, block_bytes
from corolla.repository.reading import served_model
from corolla.serving.parameters import ServedModel
from corolla.threads import thread_count

FORMAT = 1
MOST_BLOCKS = 8
MOST_BYTES = 4 * 2**30
"""As many blocks are run, and as many bytes of them: more than caches of processors hold, less than takes long."""


def measured(repository: Path, *, again: bool = False) -> Outcome:
    """The outcome of a dry run of some of a repository's blocks; run now if it is not known yet, or `again`.

    The first time, weights are prepared and decoders compiled, which takes minutes. CorollaError as of `dry_run`.
    """
    model = served_model(repository, "chain")
    name = _name(model)
    if again:
        (DiskCache.default().folder / name).unlink(missing_ok=True)

    def run(target: Path) -> None:
        first = model.blocks.start
        outcome = dry_run(repository, DryRun(first, first + _most_blocks(model)))
        target.write_text(json.dumps(asdict(outcome)))

    return _read(DiskCache.default().file(name, run))


def known(repository: Path) -> Outcome | None:
    """The same, if it has been measured before."""
    file = DiskCache.default().folder / _name(served_model(repository, "chain"))
    try:
        return _read(file)
    except FileNotFoundError:
        return None


def process_memory(outcome: Outcome) -> ProcessMemory:
    """What a plan makes of it."""
    formula = f"a dry run of {outcome.blocks} blocks"
    return ProcessMemory(outcome.private, outcome.work, outcome.libraries, Origin.MEASURED, formula)


def remembered(key: object, make: Callable[[], float], *, again: bool = False) -> float:
    """A measured number under whatever it depends on."""
    name = _file_name("numbers", key)
    if again:
        (DiskCache.default().folder / name).unlink(missing_ok=True)
    file = DiskCache.default().file(name, lambda target: _write(target, make()))
    return float(json.loads(file.read_text()))


def _write(target: Path, value: float) -> None:
    target.write_text(json.dumps(value))


def _read(file: Path) -> Outcome:
    return Outcome(**json.loads(file.read_text()))


def _most_blocks(model: ServedModel) -> int:
    config = open_checkpoint(model.checkpoint).config
    each = block_bytes(config, WeightForm(model.dtype.torch, model.quant, model.packed))
    return max(1, min(len(model.blocks), MOST_BLOCKS, MOST_BYTES // each))


def _name(model: ServedModel) -> str:
    config = open_checkpoint(model.checkpoint).config.to_dict() | {"_name_or_path": ""}
    choices = (model.dtype.name, model.quant, model.decoder_batch_sizes, thread_count(model.threads))
    return _file_name("dry-runs", (_hardware(model.device), choices, model.page_size, config))


def _file_name(kind: str, key: object) -> str:
    text = json.dumps([FORMAT, __version__, torch.__version__, transformers.__version__, key], default=str)
    return f"measurements/{kind}-{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def _hardware(device: torch.device) -> str:
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} {' '.join(sorted(processor_flags()))}"
