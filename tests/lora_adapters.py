"""Adapters for test checkpoints, written by `peft`, and what `peft` computes with them."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from reference import Reference


def write_adapter(checkpoint: Path, folder: Path, seed: int, **config: Any) -> Path:
    """An adapter with weights drawn from `seed`, large enough to change what a model says."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(checkpoint), LoraConfig(**config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_" in name:
                weight.copy_(0.1 * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(folder)
    return folder


class AdaptedReference(Reference):
    """The whole model in one piece, with an adapter."""

    def __init__(self, checkpoint: Path, adapter: Path) -> None:
        super().__init__(checkpoint)
        self.model = PeftModel.from_pretrained(self.model, adapter).eval()
