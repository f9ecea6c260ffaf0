"""Whether the server that a model repository is for fits on this machine."""

from pathlib import Path

from corolla.checkpoint.source import Source
from corolla.model.batch_sizes import COMPILED
from corolla.planning.adapters import bytes_of_adapters
from corolla.planning.machine import device_memories, shared_memory_free
from corolla.planning.measurement import Conditions, known, process_memory
from corolla.planning.plan import MachinePlan, Setup, make_plan
from corolla.planning.reserve import Processes
from corolla.repository.plan import RepositoryPlan


def planned(plan: RepositoryPlan, out: Path, *, whole: bool = True) -> MachinePlan | None:
    """The memory that the server of a repository in the folder `out` takes; PlanError when there is less.

    Unless it is to be the `whole` server, as many of its blocks as fit. None where there is nothing to plan: for a
    server without blocks, and for a device that this machine does not have.
    """
    memories = device_memories(plan.device) if plan.device == "cpu" or _has_gpus() else ()
    if not plan.hosted or len(memories) < (plan.tensor_parallel if plan.device != "cpu" else 1):
        return None
    memories = memories[: plan.tensor_parallel] if plan.device != "cpu" else memories
    sources = [_resolved(source, out) for source in plan.adapters.values()]
    span = plan.span or bool(plan.registry)
    outcome = known(Conditions.of_plan(plan))
    setup = Setup(
        config=plan.config,
        dtype=plan.dtype,
        blocks=plan.hosted,
        quant=plan.quant,
        device=plan.device,
        packed=plan.decoder == COMPILED and plan.device == "cpu",
        shards=plan.tensor_parallel,
        page_size=plan.page_size,
        ends=plan.ends,
        span=span,
        adapter_bytes=bytes_of_adapters(sources, plan.config),
        process=process_memory(outcome) if outcome else None,
    )
    processes = Processes.of(len(plan.ranges), plan.tensor_parallel, plan.device, ends=plan.ends, span=span)
    given = {"working_processes": processes.working, "attn_cache_tokens": plan.cache_tokens}
    if whole:
        given["num_blocks"] = len(plan.hosted)
    return make_plan(setup, memories, shared_memory_free(), given)


def _resolved(source: Source, out: Path) -> Source:
    return (out / source).resolve() if isinstance(source, Path) else source


def _has_gpus() -> bool:
    import torch

    return torch.cuda.is_available()
