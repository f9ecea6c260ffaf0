"""Blocks that run in shards, one process each, which add up what they computed after each split layer.

Weights stay plain tensors: with tensors of torch.distributed.tensor, which PyTorch's own styles make of them, the steps
of small layers take far longer.
"""

import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from transformers import PretrainedConfig

from corolla.checkpoint.prepared import PreparedParts
from corolla.model.family import family_of
from corolla.model.sharding import EXPERTS, ROWWISE, HeadShard, Shard, block_plan, shard_tensors


class SummedOutput(ParallelStyle):
    """A module whose inputs are split over the shards: its output is added up over all of them."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()

        def add_up(_: nn.Module, __: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(output, group=group)
            return output

        module.register_forward_hook(add_up)
        return module


def parallel_block(block: nn.Module, config: PretrainedConfig, shard: Shard, mesh: DeviceMesh) -> nn.Module:
    """Makes of a whole block without weights the one of a shard, for the tensors that `shard_tensors` gives."""
    for name, tensor in shard_tensors(block.state_dict(), config, shard).items():
        owner, _, own_name = name.rpartition(".")
        block.get_submodule(owner).register_parameter(own_name, nn.Parameter(tensor))
    family_of(config).narrow(block, HeadShard.of(config, shard))
    modules = dict(block.named_modules())
    summed = [name for name, style in block_plan(config).items() if style in (ROWWISE, EXPERTS) and name in modules]
    return parallelize_module(block, mesh, {name: SummedOutput() for name in summed})


def parallelizer(parts: PreparedParts, mesh: DeviceMesh) -> Callable[[nn.Module], nn.Module]:
    """For BlockRange; see `parallel_block`."""
    return lambda block: parallel_block(block, parts.checkpoint.config, parts.shard, mesh)


def join_shards(shard: Shard, rendezvous: Path, device: torch.device) -> DeviceMesh:
    """Connects the processes of all shards, on one machine, through a file that must not exist before.

    Waits for all of them.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "nccl"
    dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=shard.rank, world_size=shard.count)
    return init_device_mesh(device.type, (shard.count,))
