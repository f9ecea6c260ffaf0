"""Mixtral: a router and experts, whose tensors lie one by one in checkpoints and in one piece in the block."""

import re
from collections import defaultdict

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer, MixtralRMSNorm, MixtralRotaryEmbedding

from corolla.model.family import Family, Tensors

EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(w[123])\.weight")


def _block(config: PretrainedConfig, index: int) -> nn.Module:
    config._experts_implementation = "grouped_mm"
    block: nn.Module = MixtralDecoderLayer(config, index)
    return block


def _block_tensors(tensors: Tensors) -> Tensors:
    joined: Tensors = {}
    experts: dict[str, dict[int, torch.Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        name = name.replace("block_sparse_moe.", "mlp.")
        if found := EXPERT.fullmatch(name):
            experts[found[2]][int(found[1])] = tensor
        else:
            joined[name] = tensor
    if experts:
        gate, down, up = (torch.stack([each for _, each in sorted(experts[w].items())]) for w in ("w1", "w2", "w3"))
        joined["mlp.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
        joined["mlp.experts.down_proj"] = down
    return joined


FAMILY = Family(
    block=_block,
    rotary_embedding=MixtralRotaryEmbedding,
    final_norm=lambda config: MixtralRMSNorm(config.hidden_size, eps=config.rms_norm_eps),
    block_tensors=_block_tensors,
)
