"""Checkpoints of any family with seeded random weights and a byte-level tokenizer, for benchmarks and tests."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedTokenizerFast

from corolla.dtypes import DType

END_OF_TEXT = "<|endoftext|>"

SHAPES = {
    "S": LlamaConfig(
        hidden_size=1024, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=8,
        intermediate_size=2816, vocab_size=8192, max_position_embeddings=4096,
    ),
    "M": LlamaConfig(
        hidden_size=2048, num_hidden_layers=22, num_attention_heads=32, num_key_value_heads=4,
        intermediate_size=5632, vocab_size=32000, max_position_embeddings=4096,
    ),
}  # fmt: skip


def make_checkpoint(config: PretrainedConfig, dtype: DType, seed: int, out: Path, max_shard_size: str = "1GB") -> None:
    """Writes weights, config and tokenizer to `out` in Hugging Face format, with a progress bar.

    Matrices are normal with standard deviation `config.initializer_range`, vectors are 1: much as transformers
    initialises the model, but from a generator of its own, so that the same seed gives the same file.
    """
    config.dtype = dtype.torch
    config.eos_token_id, config.bos_token_id = 256, None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).to(dtype.torch)
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: _random_tensor(parameter, config, dtype, generator)
        for name, parameter in tqdm(model.named_parameters(), desc="random weights", unit="tensor", disable=None)
    }
    model.load_state_dict(weights, assign=True, strict=False)
    model.tie_weights()
    model.save_pretrained(out, max_shard_size=max_shard_size)
    byte_tokenizer(config.vocab_size).save_pretrained(out)


def byte_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """One token per byte, an end token, and tokens that no text contains up to `vocab_size`."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), END_OF_TEXT]
    tokens += [f"<{index}>" for index in range(len(tokens), vocab_size)]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)


def _random_tensor(
    parameter: nn.Parameter, config: PretrainedConfig, dtype: DType, generator: torch.Generator
) -> torch.Tensor:
    if parameter.ndim == 1:
        return torch.ones(parameter.shape, dtype=dtype.torch)
    return torch.randn(parameter.shape, generator=generator).mul_(config.initializer_range).to(dtype.torch)
