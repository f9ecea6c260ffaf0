"""What quantization costs in quality: perplexity of a text, and how often another token is the most likely one."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoTokenizer

from corolla.bench.tables import markdown
from corolla.checkpoint.disk_cache import DiskCache
from corolla.checkpoint.folder import CheckpointFolder
from corolla.checkpoint.parts import block_part
from corolla.checkpoint.prepared import PreparedParts
from corolla.errors import InvalidValueError
from corolla.model.batch_sizes import COMPILED, EAGER
from corolla.model.block_range import BlockRange
from corolla.model.ends import Embedding, Head
from corolla.model.shape import ModelShape
from corolla.quantization import INT8, NF4, NONE

KINDS = ((NONE, COMPILED), (INT8, COMPILED), (INT8, EAGER), (NF4, COMPILED), (NF4, EAGER))
"""Quantization and decoder, whose kernels run: ours with the compiled one, those of bitsandbytes with the eager one."""


@dataclass(frozen=True)
class Quality:
    """`perplexity` of the text; the `best` token at each of its positions; `size` of the blocks in bytes."""

    quant: str
    decoder: str
    perplexity: float
    best: torch.Tensor
    size: int


def measure_quality(folder: CheckpointFolder, dtype: torch.dtype, texts: Sequence[str], window: int) -> list[Quality]:
    """Each token of all texts but the first of every window of `window` tokens is predicted from those before it."""
    windows = _windows(folder.path, texts, window, ModelShape.of(folder.config).context_length)
    return [_measure(folder, dtype, *kind, windows) for kind in tqdm(KINDS, desc="quantizations")]


def _windows(checkpoint: Path, texts: Sequence[str], window: int, context: int) -> list[torch.Tensor]:
    """Token ids [1, T] with 2 <= T <= `window`, none of two texts."""
    if not 2 <= window <= context:
        raise InvalidValueError("window", window, f"2 to {context}")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokens = [torch.tensor(tokenizer(text).input_ids) for text in texts]
    windows = [part[None] for ids in tokens for part in ids.split(window) if len(part) > 1]
    if not windows:
        raise InvalidValueError("text", " ".join(texts), "a text of two tokens or more")
    return windows


def _measure(
    folder: CheckpointFolder, dtype: torch.dtype, quant: str, decoder: str, windows: Sequence[torch.Tensor]
) -> Quality:
    parts = PreparedParts(folder, dtype, DiskCache.default(), packed=decoder == COMPILED, quant=quant)
    blocks = BlockRange(parts, range(folder.config.num_hidden_layers))
    embedding, head = Embedding(parts), Head(parts)
    losses, best = [], []
    for ids in windows:
        logits = head(blocks.forward(embedding(ids[:, :-1])))[0]
        losses.append(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none"))
        best.append(logits.argmax(-1))
    size = sum(tensor.nbytes for index in blocks.blocks for tensor in parts.load(block_part(index)).values())
    return Quality(quant, decoder, float(torch.cat(losses).double().mean().exp()), torch.cat(best), size)


def table(results: Sequence[Quality]) -> str:
    """The results as Markdown, each beside the first."""
    base = results[0]
    changes = [100 * (r.perplexity / base.perplexity - 1) for r in results]
    same = [100 * float((r.best == base.best).double().mean()) for r in results]
    kernels = {COMPILED: "Corolla", EAGER: "bitsandbytes"}
    return markdown(
        ["weights", "kernels", "perplexity", "change", "same best token", "blocks, MiB", "of their size"],
        (
            [
                r.quant, kernels[r.decoder], f"{r.perplexity:.3f}", f"{change:+.2f} %",
                f"{equal:.1f} %", f"{r.size / 2**20:.2f}", f"{r.size / base.size:.2f}",
            ]
            for r, change, equal in zip(results, changes, same, strict=True)
        ),
    )  # fmt: skip
