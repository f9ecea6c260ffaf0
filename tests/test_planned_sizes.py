"""Bytes are worked out from a config alone; prepared files and the arena have just these."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from checkpoints import CASES, FAMILIES, GROUPED, MIXTRAL, Case
from corolla.checkpoint.disk_cache import DiskCache
from corolla.checkpoint.folder import CheckpointFolder
from corolla.checkpoint.parts import EMBEDDING, HEAD, block_part
from corolla.checkpoint.prepared import PreparedParts
from corolla.kernels.compact_packing import is_compact
from corolla.kv.layout import KVLayout
from corolla.model.sharding import Shard
from corolla.planning.sizes import (
    NF4_STATE_BYTES,
    WeightForm,
    block_bytes,
    part_bytes,
    token_cache_bytes,
    token_cache_formula,
)
from corolla.quantization import INT8, NF4, NONE

NAMED = {case.name: case for case in (*CASES, *FAMILIES)}
FALCON_MULTI_QUERY = NAMED["falcon-multi-query"]


def file_bytes(file: Path) -> int:
    """Of the tensors in a safetensors file: all but its header."""
    with file.open("rb") as opened:
        return file.stat().st_size - 8 - int.from_bytes(opened.read(8), "little")


def prepared(folder: Path, form: WeightForm, part: str, cache: Path, rank: int = 0) -> int:
    """Bytes of a part in the disk cache."""
    disk = DiskCache(cache, None)
    shard = Shard(rank, form.shards)
    checkpoint = CheckpointFolder(folder)
    PreparedParts(checkpoint, form.dtype, disk, packed=form.packed, quant=form.quant, shard=shard).load(part)
    (entry,) = disk.entries()
    return file_bytes(entry.file)


@pytest.fixture(
    scope="module", params=[GROUPED, FALCON_MULTI_QUERY, MIXTRAL, NAMED["bloom"]], ids=lambda case: case.name
)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with grouped, multi-query and multi-head attention, experts, norms after the embedding, ties."""
    folder = tmp_path_factory.mktemp(request.param.name)
    request.param.write(folder)
    return folder


@pytest.mark.parametrize("quant", [NONE, INT8, NF4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_takes_what_is_planned(written: Path, tmp_path: Path, dtype: torch.dtype, quant: str) -> None:
    config = CheckpointFolder(written).config
    for packed in (True, False):
        form = WeightForm(dtype, quant, packed)
        found = prepared(written, form, block_part(1), tmp_path / str(packed))
        # bitsandbytes writes a description of each NF4 weight, whose length it alone knows
        spare = 8 * NF4_STATE_BYTES if quant == NF4 and not packed else 0
        assert found <= block_bytes(config, form) <= found + spare


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("part", [EMBEDDING, HEAD])
def test_the_ends_take_what_is_planned(written: Path, tmp_path: Path, part: str, packed: bool) -> None:
    form = WeightForm(torch.bfloat16, packed=packed)
    assert part_bytes(part, CheckpointFolder(written).config, form) == prepared(written, form, part, tmp_path)


def test_a_shard_takes_what_is_planned(tmp_path: Path) -> None:
    GROUPED.write(tmp_path / "checkpoint")
    config, form = GROUPED.model_config(), WeightForm(torch.bfloat16, shards=2)
    for rank in range(2):
        cache = tmp_path / str(rank)
        assert block_bytes(config, form, rank) == prepared(tmp_path / "checkpoint", form, block_part(0), cache, rank)


@pytest.mark.parametrize("case", [*CASES, *FAMILIES], ids=lambda case: case.name)
def test_blocks_are_alike(case: Case) -> None:
    """What is planned for one block goes for all."""
    from corolla.model.family import family_of

    config = case.model_config()
    with torch.device("meta"):
        blocks = [family_of(config).block(config, index).state_dict() for index in range(config.num_hidden_layers)]
    assert len({tuple((name, t.shape) for name, t in block.items()) for block in blocks}) == 1


@given(
    tokens=st.integers(1, 10**6), page_size=st.sampled_from([1, 16, 64]), dtype=st.sampled_from(["float32", "bfloat16"])
)
@settings(deadline=None)
def test_the_cache_of_tokens_is_that_of_the_arena(tokens: int, page_size: int, dtype: str) -> None:
    for case in (GROUPED, FALCON_MULTI_QUERY, NAMED["full-untied-dynamic-sharded"]):
        layout = KVLayout.of(case.model_config(), dtype, tokens, page_size)
        assert layout.slots * token_cache_bytes(case.model_config(), dtype) == layout.bytes_per_block


@pytest.mark.parametrize(
    ("name", "words", "size"),
    [
        ("full-untied-dynamic-sharded", "2 x 5 KV heads of 5 heads (multi-head attention) x 24 x 2 bytes", 480),
        ("grouped-untied-llama3-sharded", "2 x 2 KV heads of 8 heads (grouped-query attention) x 16 x 2 bytes", 128),
        ("falcon-multi-query", "2 x 1 KV heads of 6 heads (multi-query attention) x 16 x 2 bytes", 64),
    ],
)
def test_the_cache_of_a_token_is_explained(name: str, words: str, size: int) -> None:
    config = NAMED[name].model_config()
    assert (token_cache_formula(config, "bfloat16"), token_cache_bytes(config, "bfloat16")) == (words, size)


def test_a_large_model_is_planned_without_its_weights() -> None:
    """Llama 3 70B has 8 KV heads of 128 and blocks of 855.7 M parameters."""
    config = AutoConfig.for_model(
        "llama", hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_key_value_heads=8,
        num_hidden_layers=80, vocab_size=128256,
    )  # fmt: skip
    parameters = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192
    assert block_bytes(config, WeightForm(torch.bfloat16)) == 2 * parameters
    assert block_bytes(config, WeightForm(torch.float32, packed=True)) == 4 * parameters
    packed = block_bytes(config, WeightForm(torch.bfloat16, packed=True))
    if is_compact(torch.bfloat16):
        assert 1.5 * parameters < packed < 1.53 * parameters  # twelve bits each, and room for outliers
    else:
        assert packed == 2 * parameters
    assert token_cache_bytes(config, "bfloat16") == 2 * 8 * 128 * 2
