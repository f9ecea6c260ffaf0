"""A small Llama trained on this project's own documentation, for tests, examples and first steps."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import ceil, cos, pi
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from corolla.errors import CheckpointError

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
FINGERPRINT_FILE = "demo_fingerprint.txt"
_VERSION = 1  # raise it when a change of this module changes what is written


@dataclass(frozen=True)
class DemoRecipe:
    """Everything but the text that decides what the demo checkpoint becomes. Lengths and sizes are in tokens."""

    seed: int = 0
    vocab_size: int = 1024
    hidden_size: int = 192
    intermediate_size: int = 512
    num_blocks: int = 8
    num_heads: int = 6
    num_kv_heads: int = 2
    max_positions: int = 1024
    steps: int = 200
    step_tokens: int = 1024
    windows: tuple[int, ...] = (64, 256, 64, 1024)
    """Lengths of the windows that the text is cut into, one per pass over it, over and over."""
    piece_characters: int = 150
    """Mean length of the pieces the text is tokenized in, so that a prompt may end inside a word."""
    learning_rate: float = 0.024
    embedding_learning_rate: float = 0.12
    matrix_learning_rate: float = 0.02
    warmup_steps: int = 20

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_blocks,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            max_position_embeddings=self.max_positions,
            bos_token_id=END_OF_TEXT_ID,
            eos_token_id=END_OF_TEXT_ID,
            pad_token_id=END_OF_TEXT_ID,
            tie_word_embeddings=False,
            dtype="float32",
        )


def ensure_demo_checkpoint(
    corpus: Sequence[Path], out: Path, recipe: DemoRecipe = DemoRecipe(), progress: bool = True
) -> bool:
    """Train the demo checkpoint unless `out` already holds the one of this text and recipe.

    Of several callers at once, in any processes, one trains and the others wait for it.
    Returns True when this call trained. Raises `CheckpointError` as `train_demo_checkpoint` does.
    """
    texts = _read(corpus)
    with _lock(out):
        if _stored_fingerprint(out) == _fingerprint(texts, recipe):
            return False
        _replace_checkpoint(texts, out, recipe, progress)
        return True


def train_demo_checkpoint(
    corpus: Sequence[Path], out: Path, recipe: DemoRecipe = DemoRecipe(), progress: bool = True
) -> None:
    """Train a Llama and its tokenizer on the UTF-8 files `corpus` and write both to the folder `out`.

    The folder is in Hugging Face format, float32, in at least two safetensors shards. It appears whole or not
    at all; an older demo checkpoint in `out` is replaced. `progress` shows a bar with the loss on stderr.
    Raises `CheckpointError` when the corpus is empty or not UTF-8, or when `out` holds something else.
    """
    texts = _read(corpus)
    with _lock(out):
        _replace_checkpoint(texts, out, recipe, progress)


def _read(corpus: Sequence[Path]) -> list[str]:
    texts = []
    for path in corpus:
        try:
            texts.append(path.read_bytes().decode())
        except UnicodeDecodeError as error:
            raise CheckpointError(
                f"{path} is not UTF-8 text ({error}); the demo checkpoint learns from text files"
            ) from error
    if not any(texts):
        raise CheckpointError("no text to train the demo checkpoint on; name one or more files that are not empty")
    return texts


def _fingerprint(texts: Sequence[str], recipe: DemoRecipe) -> str:
    content = json.dumps({"version": _VERSION, "recipe": asdict(recipe), "texts": list(texts)}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def _stored_fingerprint(out: Path) -> str | None:
    file = out / FINGERPRINT_FILE
    return file.read_text().strip() if file.is_file() else None


def _lock(out: Path) -> FileLock:
    out.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(f"{out}.lock")


def _replace_checkpoint(texts: Sequence[str], out: Path, recipe: DemoRecipe, progress: bool) -> None:
    if out.exists() and _stored_fingerprint(out) is None and not (out.is_dir() and not any(out.iterdir())):
        raise CheckpointError(f"{out} exists and is no demo checkpoint; remove it or choose another folder")
    tokenizer = _train_tokenizer(texts, recipe.vocab_size)
    model = _train_model(texts, tokenizer, recipe, progress)

    with TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
        new, old = Path(scratch, "new"), Path(scratch, "old")
        weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
        model.save_pretrained(new, max_shard_size=ceil(weight_bytes * 0.6))
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            bos_token=END_OF_TEXT,
            eos_token=END_OF_TEXT,
            pad_token=END_OF_TEXT,
            model_max_length=recipe.max_positions,
        ).save_pretrained(new)
        (new / FINGERPRINT_FILE).write_text(_fingerprint(texts, recipe) + "\n")
        if out.exists():
            out.rename(old)
        new.rename(out)


def _train_tokenizer(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer of exactly `vocab_size` tokens; what the text does not fill is left unused."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    missing = vocab_size - tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([f"<|unused_{number}|>" for number in range(missing)])
    return tokenizer


def _train_model(texts: Sequence[str], tokenizer: Tokenizer, recipe: DemoRecipe, progress: bool) -> LlamaForCausalLM:
    generator = torch.Generator().manual_seed(recipe.seed)
    model = LlamaForCausalLM(recipe.config())
    _initialize(model, generator)
    optimizers = _optimizers(model, recipe)
    schedules = [LambdaLR(optimizer, lambda step: _learning_rate_factor(step, recipe)) for optimizer in optimizers]
    batches = _batches(texts, tokenizer, recipe, generator)
    with tqdm(total=recipe.steps, desc="demo checkpoint", unit="step", disable=not progress) as bar:
        for _ in range(recipe.steps):
            tokens = next(batches)
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
            bar.update()
    return model.eval()


def _initialize(model: LlamaForCausalLM, generator: torch.Generator) -> None:
    """Unit embeddings, matrices that keep the scale, and nothing yet from the blocks' outputs and the head."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_tokens" in name:
                parameter.normal_(0, 1, generator=generator)
            elif any(part in name for part in ("lm_head", "o_proj", "down_proj")):
                parameter.zero_()
            elif parameter.ndim == 2:
                parameter.normal_(0, parameter.shape[1] ** -0.5, generator=generator)


def _optimizers(model: LlamaForCausalLM, recipe: DemoRecipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, which learns such a small model by heart faster, AdamW for the rest."""
    parameters = dict(model.named_parameters())
    matrices = [name for name, parameter in parameters.items() if "layers" in name and parameter.ndim == 2]
    embeddings = [name for name in parameters if "embed_tokens" in name]
    rest = [parameter for name, parameter in parameters.items() if name not in (*matrices, *embeddings)]
    groups: list[dict[str, Any]] = [
        {"params": [parameters[name] for name in embeddings], "lr": recipe.embedding_learning_rate},
        {"params": rest},
    ]
    return [
        torch.optim.Muon([parameters[name] for name in matrices], lr=recipe.matrix_learning_rate, weight_decay=0.0),
        torch.optim.AdamW(
            groups,
            lr=recipe.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.0,
            fused=True,
        ),
    ]


def _learning_rate_factor(step: int, recipe: DemoRecipe) -> float:
    if step < recipe.warmup_steps:
        return (step + 1) / recipe.warmup_steps
    done = (step - recipe.warmup_steps) / (recipe.steps - recipe.warmup_steps)
    return 0.5 * (1 + cos(pi * done))


def _batches(
    texts: Sequence[str], tokenizer: Tokenizer, recipe: DemoRecipe, generator: torch.Generator
) -> Iterator[torch.Tensor]:
    """Endless batches of token ids [rows, window], pass after pass over the whole text from random offsets."""
    number = 0
    while True:
        window = recipe.windows[number % len(recipe.windows)]
        number += 1
        rows = max(1, recipe.step_tokens // window)
        stream = _tokenize(texts, tokenizer, recipe.piece_characters, generator)
        stream = stream.roll(int(torch.randint(len(stream), (), generator=generator)))
        stream = stream.repeat(ceil(rows * window / len(stream)))
        windows = stream[: len(stream) // window * window].view(-1, window)
        shuffled = windows[torch.randperm(len(windows), generator=generator)]
        yield from (batch for batch in shuffled.split(rows) if len(batch) == rows)


def _tokenize(
    texts: Sequence[str], tokenizer: Tokenizer, piece_characters: int, generator: torch.Generator
) -> torch.Tensor:
    """Token ids [tokens] of all texts in random order, each cut at random characters and closed by the end token."""
    ids: list[int] = []
    for index in torch.randperm(len(texts), generator=generator).tolist():
        text = texts[index]
        cuts = torch.randint(len(text) + 1, (len(text) // piece_characters,), generator=generator)
        bounds = [0, *sorted(cuts.tolist()), len(text)]
        for start, end in pairwise(bounds):
            ids += tokenizer.encode(text[start:end]).ids
        ids.append(END_OF_TEXT_ID)
    return torch.tensor(ids)
