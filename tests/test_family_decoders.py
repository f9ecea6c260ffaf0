"""Compiled decoders of each kind of attention and of experts compute what transformers computes.

One program each, for any number of rows. Tolerance as in test_exactness: 1e-4 absolute on logits, float32.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from checkpoints import BLOOM, MIXTRAL_WINDOW, QWEN2_MIXED, Case, random_prompt
from corolla.checkpoint.disk_cache import DiskCache
from corolla.checkpoint.folder import CheckpointFolder
from corolla.checkpoint.lora import prepare_adapter
from corolla.checkpoint.prepared import PreparedParts
from corolla.kv.arena import host_arena
from corolla.kv.layout import KVLayout
from corolla.model.attention import PagedRows
from corolla.model.block_range import BlockRange
from corolla.model.decoders import CompiledChain
from corolla.model.ends import Embedding, Head
from corolla.model.lora import RowAdapters
from lora_adapters import AdaptedReference, write_adapter
from reference import Reference

ABSOLUTE = 1e-4
COMPILED = (MIXTRAL_WINDOW, BLOOM, QWEN2_MIXED)
"""Experts, windows in all blocks and in one of them, linear biases."""
PAGES = 16


class CompiledModel:
    """A whole model on packed weights."""

    def __init__(self, case: Case, folder: Path, cache: Path) -> None:
        case.write(folder / "checkpoint")
        checkpoint = CheckpointFolder(folder / "checkpoint")
        parts = PreparedParts(checkpoint, torch.float32, DiskCache(cache, None), packed=True)
        layout = KVLayout.of(checkpoint.config, "float32", attn_cache_tokens=16 * PAGES, page_size=16)
        self.blocks = BlockRange(parts, range(case.blocks))
        self.chain = CompiledChain(parts, self.blocks, host_arena(folder / "run", layout, range(case.blocks)), sizes=())
        self.embedding, self.head = Embedding(parts), Head(parts)
        self.reference = Reference(folder / "checkpoint")
        self.checkpoint, self.cache = checkpoint, parts.cache

    @torch.inference_mode()
    def step(
        self, input_ids: list[int], pages: torch.Tensor, positions: list[int], adapters: RowAdapters = ()
    ) -> torch.Tensor:
        """Logits [N, V] of one token per row."""
        rows = PagedRows(pages, torch.tensor(positions))
        cosines, sines = self.blocks.rotary(rows.positions[:, None])
        hidden_states = self.embedding(torch.tensor(input_ids)[:, None])
        if adapters:
            output = self.chain.step_adapted(hidden_states, cosines, sines, rows, adapters)
        else:
            output = self.chain(hidden_states, cosines, sines, rows)
        return self.head(output)[:, 0]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, suite_cache: Path) -> dict[str, CompiledModel]:
    """Compiled two at a time."""

    def make(case: Case) -> CompiledModel:
        return CompiledModel(case, tmp_path_factory.mktemp(case.name), suite_cache)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip((case.name for case in COMPILED), pool.map(make, COMPILED), strict=True))


@pytest.mark.parametrize("case", COMPILED, ids=lambda case: case.name)
def test_prompts_and_steps_of_two_sessions_equal_the_whole(models: dict[str, CompiledModel], case: Case) -> None:
    model = models[case.name]
    lengths, steps = (100, 70), 6
    prompts = [random_prompt(length + steps, seed=length) for length in lengths]
    pages = torch.randperm(PAGES, generator=torch.Generator().manual_seed(1)).int().view(2, -1)
    row_pages = pages.repeat_interleave(torch.tensor(lengths), 0)
    inputs = [token for prompt, length in zip(prompts, lengths, strict=True) for token in prompt[:length]]
    first = model.step(inputs, row_pages, [p for length in lengths for p in range(length)]).split(lengths)
    later = [
        model.step([prompt[length + i] for prompt, length in zip(prompts, lengths, strict=True)], pages,
                   [length + i for length in lengths])
        for i in range(steps)
    ]  # fmt: skip
    for session, prompt in enumerate(prompts):
        got = torch.cat([first[session], *(logits[session, None] for logits in later)])
        expected = model.reference.logits(torch.tensor([prompt]))[0]
        torch.testing.assert_close(got, expected, rtol=0, atol=ABSOLUTE)


@pytest.mark.parametrize("ready", [False, True], ids=["modules", "compiled"])
def test_rows_with_adapters_equal_peft(models: dict[str, CompiledModel], tmp_path: Path, ready: bool) -> None:
    """Until the program for them is compiled, the modules of packed weights do the same."""
    model = models[BLOOM.name]
    targets = ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]
    path = write_adapter(model.checkpoint.path, tmp_path, 1, r=5, target_modules=targets)
    prepared = prepare_adapter(path, model.checkpoint.config, model.cache)
    own = prepared.adapter(model.blocks.blocks, torch.device("cpu"))
    if ready:
        model.chain.compile_adapted()
    prompt = random_prompt(20, seed=20)
    pages = torch.arange(4).int().view(2, -1)
    got = torch.stack([model.step([token] * 2, pages, [i] * 2, [None, own]) for i, token in enumerate(prompt)])
    references = (model.reference, AdaptedReference(model.checkpoint.path, path))
    expected = torch.stack([reference.logits(torch.tensor([prompt]))[0] for reference in references], 1)
    assert (expected[:, 0] - expected[:, 1]).abs().max() > 0.1, "the adapter must matter"
    torch.testing.assert_close(got, expected, rtol=0, atol=ABSOLUTE)
