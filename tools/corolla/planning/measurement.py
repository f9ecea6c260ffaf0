"""Dry runs, remembered in the disk cache under what their outcome depends on: hardware, versions, model, choices."""

import hashlib
import json
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from transformers import PretrainedConfig

from corolla import __version__
from corolla.checkpoint.disk_cache import DiskCache
from corolla.checkpoint.source import open_checkpoint
from corolla.kernels.build import processor_flags
from corolla.model.batch_sizes import COMPILED
from corolla.planning.dry_run import DryRun, Outcome, dry_run, prepare
from corolla.planning.quantity import Origin
from corolla.planning.reserve import ProcessMemory
from corolla.planning.sizes import WeightForm, block_bytes
from corolla.repository.plan import RepositoryPlan
from corolla.repository.reading import served_model
from corolla.serving.parameters import ServedModel
from corolla.threads import thread_count

FORMAT = 3
MOST_BLOCKS = 8
MOST_BYTES = 4 * 2**30
"""As many blocks are run, and as many bytes of them: more than caches of processors hold, less than takes long."""


@dataclass(frozen=True)
class Conditions:
    """What the outcome of a dry run depends on, besides the machine and versions."""

    config: PretrainedConfig
    device: str
    dtype: str
    quant: str
    decoder_batch_sizes: tuple[int, ...]
    threads: int
    page_size: int
    ends: bool

    @classmethod
    def of_repository(cls, repository: Path) -> "Conditions":
        """Of what is written."""
        model = served_model(repository, "chain")
        return cls(
            config=open_checkpoint(model.checkpoint).config,
            device=model.device.type,
            dtype=model.dtype.name,
            quant=model.quant,
            decoder_batch_sizes=model.decoder_batch_sizes,
            threads=model.threads,
            page_size=model.page_size,
            ends=(repository / "embed").is_dir(),
        )

    @classmethod
    def of_plan(cls, plan: RepositoryPlan) -> "Conditions":
        """Of the models that a plan is for."""
        return cls(
            config=plan.config,
            device=plan.device,
            dtype=plan.dtype.name,
            quant=plan.quant,
            decoder_batch_sizes=plan.batch_sizes if plan.decoder == COMPILED else (),
            threads=plan.threads,
            page_size=plan.page_size,
            ends=plan.ends,
        )

    def key(self) -> list[object]:
        """The same for the same conditions, wherever the checkpoint lies."""
        config = self.config.to_dict() | {"_name_or_path": ""}
        threads = thread_count(self.threads)
        choices = (self.dtype, self.quant, self.decoder_batch_sizes, threads, self.page_size, self.ends)
        return [_hardware(self.device), choices, config]


def measured(repository: Path, *, again: bool = False) -> Outcome:
    """The outcome of a dry run of some of a repository's blocks; run now if it is not known yet, or `again`.

    The first time, weights are prepared and decoders compiled, which takes minutes. CorollaError as of `dry_run`.
    """
    model = served_model(repository, "chain")
    conditions = Conditions.of_repository(repository)
    name = _file_name("dry-runs", conditions.key())
    if again:
        (DiskCache.default().folder / name).unlink(missing_ok=True)

    def run(target: Path) -> None:
        first = model.blocks.start
        blocks = DryRun(first, first + _most_blocks(model), ends=conditions.ends)
        prepare(repository, blocks)
        target.write_text(json.dumps(asdict(dry_run(repository, blocks))))

    return _read(DiskCache.default().file(name, run))


def known(conditions: Conditions) -> Outcome | None:
    """The same, if it has been measured before."""
    try:
        return _read(DiskCache.default().folder / _file_name("dry-runs", conditions.key()))
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


def _file_name(kind: str, key: object) -> str:
    text = json.dumps([FORMAT, __version__, torch.__version__, transformers.__version__, key], default=str)
    return f"measurements/{kind}-{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def _hardware(device: str) -> str:
    if device != "cpu":
        return torch.cuda.get_device_name() if torch.cuda.is_available() else device
    return f"{platform.machine()} {' '.join(sorted(processor_flags()))}"
