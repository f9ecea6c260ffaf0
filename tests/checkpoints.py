"""Small random checkpoints, each with something that a server could get wrong."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerFast

from corolla.checkpoint.synthetic import make_checkpoint
from corolla.dtypes import dtype_named

END_OF_TEXT_ID = 256
"""As `make_checkpoint` writes it into the config."""
FRAGMENTS = range(100, 194)
"""Ids of the tokens that are single bytes: 30 that begin a character of two bytes, 64 that end one."""


@dataclass(frozen=True)
class Case:
    """A checkpoint and the ranges it is served in. `prefix` is taken off the names of its tensors."""

    name: str
    ranges: tuple[range, ...]
    config: dict[str, Any]
    max_shard_size: str = "1GB"
    seed: int = 0
    fragments: bool = field(default=False)
    model_type: str = "llama"
    prefix: str = ""

    @property
    def blocks(self) -> int:
        return self.ranges[-1].stop

    def model_config(self) -> PretrainedConfig:
        common = {
            "vocab_size": 301,
            "num_hidden_layers": self.blocks,
            "max_position_embeddings": 512,
            "intermediate_size": 150,
            "initializer_range": 0.12,
            "tie_word_embeddings": False,
        }
        return AutoConfig.for_model(self.model_type, **(common | self.config))

    def write(self, folder: Path) -> None:
        """Writes the checkpoint; its tokenizer takes texts such as "t5 t17", the names of token ids.

        Qwen2's takes bytes: whatever a checkpoint says, transformers splits its texts by the rules of the family.
        """
        config = self.model_config()
        make_checkpoint(config, dtype_named("float32"), self.seed, folder, self.max_shard_size)
        _edit_tensors(folder, self.seed, self.prefix)
        if self.model_type != "qwen2":
            word_tokenizer(config.vocab_size, fragments=self.fragments).save_pretrained(folder)


GROUPED = Case(
    name="grouped-untied-llama3-sharded",
    ranges=(range(0, 2), range(2, 4)),
    config={
        "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 128,
        },
    },
    max_shard_size="200KB",
)  # fmt: skip

CASES = (
    GROUPED,
    Case(
        name="multi-query-tied-linear-single-file",
        ranges=(range(0, 2), range(2, 3), range(3, 5)),
        config={
            "hidden_size": 120, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 24,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
        },
        seed=1,
    ),
    Case(
        name="full-untied-dynamic-sharded",
        ranges=(range(0, 1), range(1, 3)),
        config={
            "hidden_size": 120, "num_attention_heads": 5, "num_key_value_heads": 5,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        },
        max_shard_size="300KB",
        seed=2,
    ),
    Case(
        name="wide-heads-tied-yarn-sharded",
        ranges=(range(0, 3),),
        config={
            "hidden_size": 120, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 24,
            "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128,
            },
        },
        max_shard_size="300KB",
        seed=3,
    ),
    Case(
        name="biases-untied-default-single-file",
        ranges=(range(0, 2), range(2, 3), range(3, 5)),
        config={
            "hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
            "attention_bias": True, "mlp_bias": True,
        },
        seed=4,
    ),
)  # fmt: skip

MIXTRAL = Case(
    name="mixtral",
    ranges=(range(0, 1), range(1, 2)),
    config={
        "hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 72,
        "num_local_experts": 5, "num_experts_per_tok": 2,
    },
    model_type="mixtral",
    seed=7,
)  # fmt: skip
BLOOM = Case(
    name="bloom",
    ranges=(range(0, 1), range(1, 2)),
    config={
        "hidden_size": 96, "num_attention_heads": 6, "tie_word_embeddings": True,
        "max_position_embeddings": None, "seq_length": 512,
    },
    model_type="bloom",
    prefix="transformer.",
    seed=8,
)  # fmt: skip
FALCON_ALIBI = Case(
    name="falcon-sequential-alibi",
    ranges=(range(0, 1), range(1, 2)),
    config={
        "hidden_size": 96, "num_attention_heads": 6, "tie_word_embeddings": True,
        "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True,
    },
    model_type="falcon",
    seed=9,
)  # fmt: skip
FALCON_GROUPED = Case(
    name="falcon-grouped",
    ranges=(range(0, 1), range(1, 2)),
    config={
        "hidden_size": 96, "num_attention_heads": 6, "num_kv_heads": 2, "tie_word_embeddings": True,
        "new_decoder_architecture": True,
    },
    model_type="falcon",
    seed=10,
)  # fmt: skip
QWEN2_MIXED = Case(
    name="qwen2-window-in-one-block",
    ranges=(range(0, 1), range(1, 2)),
    config={
        "hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
        "use_sliding_window": True, "sliding_window": 37, "max_window_layers": 1,
    },
    model_type="qwen2",
    seed=11,
)  # fmt: skip

MIXTRAL_WINDOW = Case(
    name="mixtral-window",
    ranges=(range(0, 1), range(1, 2)),
    config={
        "hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 1, "intermediate_size": 72,
        "num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 60,
    },
    model_type="mixtral",
    seed=16,
)  # fmt: skip

FAMILIES = (
    MIXTRAL,
    BLOOM,
    FALCON_ALIBI,
    FALCON_GROUPED,
    QWEN2_MIXED,
    MIXTRAL_WINDOW,
    Case(
        name="falcon-multi-query",
        ranges=(range(0, 1), range(1, 2)),
        config={"hidden_size": 96, "num_attention_heads": 6, "tie_word_embeddings": True},
        model_type="falcon",
        seed=12,
    ),
    Case(
        name="falcon-grouped-one-norm",
        ranges=(range(0, 1), range(1, 2)),
        config={
            "hidden_size": 96, "num_attention_heads": 6, "num_kv_heads": 3, "tie_word_embeddings": True,
            "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1,
        },
        model_type="falcon",
        seed=13,
    ),
    Case(
        name="falcon-multi-query-alibi",
        ranges=(range(0, 1), range(1, 2)),
        config={"hidden_size": 96, "num_attention_heads": 4, "tie_word_embeddings": True, "alibi": True},
        model_type="falcon",
        seed=14,
    ),
    Case(
        name="mistral-window-yarn",
        ranges=(range(0, 1), range(1, 2)),
        config={
            "hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 50,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128,
            },
        },
        model_type="mistral",
        seed=15,
    ),
    Case(
        name="qwen3",
        ranges=(range(0, 1), range(1, 2)),
        config={"hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
        model_type="qwen3",
        seed=17,
    ),
    Case(
        name="gemma",
        ranges=(range(0, 1), range(1, 2)),
        config={
            "hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32,
            "tie_word_embeddings": True,
        },
        model_type="gemma",
        seed=18,
    ),
)  # fmt: skip
"""Each family, and each form of it that computes something else; blocks are ranges of their own."""

SERVED = Case(
    name="served",
    ranges=(range(0, 2), range(2, 3), range(3, 5)),
    config={
        "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 256,
        "max_position_embeddings": 1024,
    },
    seed=6,
    fragments=True,
)  # fmt: skip
"""The checkpoint of the tests on the real server. Its tokenizer can split characters."""


def word_tokenizer(vocab_size: int, *, fragments: bool = False) -> PreTrainedTokenizerFast:
    """Token `i` is the word "t<i>", with a space before it; with `fragments`, some tokens are single bytes.

    Words that are no token become "t0". Fragments come out of texts only, no text is split into them.
    """
    tokens = [f"Ġt{index}" for index in range(vocab_size)]
    tokens[END_OF_TEXT_ID] = "<|endoftext|>"
    if fragments:
        begins = [_byte_level(bytes([byte, 0x80]))[0] for byte in range(0xC2, 0xE0)]
        ends = [_byte_level(bytes([0xC3, byte]))[1] for byte in range(0x80, 0xC0)]
        tokens[FRAGMENTS.start : FRAGMENTS.stop] = begins + ends
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="Ġt0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(" ", "merged_with_next"),
            pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


def text_of(token_ids: list[int]) -> str:
    """The text of word tokens."""
    return " ".join(f"t{token}" for token in token_ids)


def ids_of(text: str) -> list[int]:
    """The inverse of `text_of`."""
    return [int(word.removeprefix("t")) for word in text.split()]


def random_prompt(length: int, seed: int, vocab_size: int = 301) -> list[int]:
    """Ids of word tokens."""
    words = torch.tensor([i for i in range(vocab_size) if i != END_OF_TEXT_ID and i not in FRAGMENTS])
    return words[torch.randint(len(words), (length,), generator=torch.Generator().manual_seed(seed))].tolist()


def _byte_level(character: bytes) -> str:
    """How the byte-level encoding of GPT-2 writes the bytes of a character, one sign each."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    written: str = byte_level.pre_tokenize_str(character.decode())[0][0]
    return written


def _edit_tensors(folder: Path, seed: int, prefix: str) -> None:
    """Gives norms and biases, which `make_checkpoint` sets to 1, values that can be told apart; takes off `prefix`."""
    generator = torch.Generator().manual_seed(seed)
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        for name, tensor in sorted(tensors.items()):
            if tensor.ndim == 1:
                noise = 0.1 * torch.randn(tensor.shape, generator=generator)
                tensors[name] = noise if name.endswith("bias") else 1 + noise
        tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        save_file(tensors, file, metadata={"format": "pt"})
