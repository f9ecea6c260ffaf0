"""What a server is best run with on this machine, each choice with its reason."""

from dataclasses import dataclass

from corolla.cgroups import usable_cores
from corolla.checkpoint.resolution import Resolved
from corolla.dtypes import DType
from corolla.model.batch_sizes import COMPILED
from corolla.threads import thread_count


@dataclass(frozen=True)
class Choice:
    """One choice, by the name of its flag if it has one."""

    name: str
    value: str
    reason: str


def explained_choices(
    dtype: Resolved[DType], quant: Resolved[str], decoder: str, device: str, threads: int, shards: int
) -> list[Choice]:
    """Dtype, quantization, decoder, threads and instances."""
    return [
        Choice("dtype", dtype.value.name, dtype.reason),
        Choice("quant", quant.value, quant.reason),
        Choice("decoder", decoder, _decoder_reason(decoder, device)),
        _threads(threads, shards),
        Choice(
            "instances", "1",
            "of each model: a second one would share the weights, but also the cores and the memory's speed, which "
            "one uses up",
        ),
    ]  # fmt: skip


def _decoder_reason(decoder: str, device: str) -> str:
    if decoder != COMPILED:
        return "the modules themselves; shards have no other"
    return "programs per batch size, packed weights" if device == "cpu" else "CUDA graphs per batch size"


def _threads(wanted: int, shards: int) -> Choice:
    """Every process may use all cores: see corolla.threads."""
    cores, count = usable_cores(), thread_count(wanted, shards)
    each = f"{cores} cores" if shards == 1 else f"{cores} cores for {shards} shards"
    if wanted > count:
        reason = f"{each}: {wanted} would oversubscribe them"
    elif wanted:
        reason = f"--threads, of {each}"
    else:
        reason = f"{each}: one process computes at a time, and gets them all"
    return Choice("threads", str(count), reason)
