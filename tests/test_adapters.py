"""Rows with adapters compute what `peft` computes, each with its own, in whole forwards, steps and generations.

Tolerance as in test_exactness: 1e-4 absolute on logits, float32.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import FALCON_GROUPED, GROUPED, Case, ids_of, random_prompt
from conftest import Served, serve_locally
from corolla.checkpoint.folder import CheckpointFolder
from corolla.checkpoint.lora import CONFIG, WEIGHTS, AdapterFolder
from corolla.errors import AdapterError, InvalidValueError, NotFoundError
from corolla.kv.adapters import AdapterTable, NewAdapter, UnknownAdapterError
from corolla.kv.layout import KVLayout
from corolla.kv.session import OpenRequest
from corolla.kv.table import SessionTable
from corolla.serving.blocks import BlocksRequest
from local_server import CollectingOutput
from lora_adapters import AdaptedReference, write_adapter
from reference import Reference
from test_engine import start, without_end

ABSOLUTE = 1e-4
ROWS = ("a", "", "b", "a")
CONFIGS: dict[str, dict[str, dict[str, Any]]] = {
    GROUPED.name: {
        "a": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
        "b": {
            "r": 6, "lora_alpha": 4, "use_rslora": True, "target_modules": ["q_proj", "v_proj", "down_proj"],
            "rank_pattern": {"q_proj": 3}, "alpha_pattern": {"layers.1.self_attn.v_proj": 9},
            "layers_to_transform": [1, 2],
        },
    },
    FALCON_GROUPED.name: {
        "a": {"r": 4, "lora_alpha": 8, "target_modules": ["query_key_value", "dense", "dense_h_to_4h"]},
        "b": {"r": 2, "lora_alpha": 4, "target_modules": ["query_key_value"]},
    },
}  # fmt: skip


@dataclass(frozen=True)
class Adapted:
    """A server with the adapters a and b, and what `peft` makes of each; "" is none."""

    served: Served
    references: dict[str, Reference]

    def logits(self, prompts: list[list[int]]) -> torch.Tensor:
        """Of one prompt per row of ROWS."""
        rows = zip(ROWS, prompts, strict=True)
        return torch.cat([self.references[name].logits(torch.tensor([prompt])) for name, prompt in rows])


@pytest.fixture(scope="module", params=[GROUPED, FALCON_GROUPED], ids=lambda case: case.name)
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, suite_cache: Path) -> Adapted:
    case: Case = request.param
    folder = tmp_path_factory.mktemp(case.name)
    case.write(folder / "checkpoint")
    adapters = {
        name: write_adapter(folder / "checkpoint", folder / name, seed, **config)
        for seed, (name, config) in enumerate(CONFIGS[case.name].items())
    }
    served = serve_locally(case, folder, suite_cache, adapters=adapters)
    references = {name: AdaptedReference(folder / "checkpoint", path) for name, path in adapters.items()}
    return Adapted(served, {"": served.reference, **references})


def prompts_of(length: int) -> list[list[int]]:
    """One per row, the same for all, so that only adapters tell rows apart."""
    return [random_prompt(length, seed=length)] * len(ROWS)


def test_whole_rows_of_different_adapters(adapted: Adapted) -> None:
    server, prompts = adapted.served.server, prompts_of(30)
    expected = adapted.logits(prompts)
    assert (expected[0] - expected[1]).abs().max() > 0.1, "the adapter must matter"
    hidden = server.embedding(torch.tensor(prompts))
    for run in (server.run_chain, server.run_ranges):
        got = server.head(run(hidden, None, None, None, list(ROWS)))
        torch.testing.assert_close(got, expected, rtol=0, atol=ABSOLUTE)


def test_sessions_of_different_adapters_step_together(adapted: Adapted) -> None:
    """The prompt in the ranges, the rest in the chain, row by row in requests of their own."""
    server, prompts = adapted.served.server, prompts_of(30)
    hidden = server.embedding(torch.tensor(prompts))
    ids = [server.open(30, name) for name in ROWS]
    outputs = [server.run_ranges(hidden[:, :20], ids, [0] * len(ids))]
    for position in range(20, 30):
        step = hidden[:, position : position + 1]
        requests = [BlocksRequest(row[None], [i], [position]) for row, i in zip(step, ids, strict=True)]
        outputs.append(torch.cat(server.chain.run(requests)))  # type: ignore[arg-type]
    got = server.head(torch.cat(outputs, dim=1))
    torch.testing.assert_close(got, adapted.logits(prompts), rtol=0, atol=ABSOLUTE)
    for session_id in ids:
        server.table.close(session_id)


def test_generations_of_different_adapters_at_once(adapted: Adapted) -> None:
    engine = adapted.served.server.engine()
    cases = [(name, random_prompt(length, seed=3)) for name in ("a", "b", "") for length in (5, 40)]
    outputs: list[CollectingOutput] = [start(engine, prompt, adapter=name, max_tokens=24) for name, prompt in cases]
    texts = [output.text() for output in outputs]
    engine.stop()
    for (name, prompt), text in zip(cases, texts, strict=True):
        reference = adapted.references[name]
        expected = reference.generate(prompt, max_new_tokens=24)
        assert reference.lead(prompt, expected) > 1e-4, "tokens this close could differ by rounding alone"
        assert ids_of(text) == without_end(expected), (name, prompt)


def test_what_does_not_fit_the_session_is_refused(adapted: Adapted) -> None:
    server = adapted.served.server
    hidden = server.embedding(torch.tensor([[5], [6]]))
    ids = [server.open(2, "a"), server.open(2, "b")]
    try:
        with pytest.raises(InvalidValueError, match="adapter: 'b' is not allowed; allowed: 'a', with which"):
            server.run_chain(hidden[:1], ids[:1], [0], None, ["b"])
        with pytest.raises(InvalidValueError, match="hypo_ids: 0 is not allowed; allowed: a row whose session"):
            server.run_chain(hidden, ids, [0, 0], [0, 0])
        server.run_chain(hidden, ids, [0, 0], None, ["a", "b"])
    finally:
        for session_id in ids:
            server.table.close(session_id)


def test_an_unknown_adapter_fails_alone_and_the_error_names_the_known_ones(adapted: Adapted) -> None:
    server = adapted.served.server
    hidden = server.embedding(torch.tensor([[5]]))
    good, bad = server.chain.run([BlocksRequest(hidden, adapters=["a"]), BlocksRequest(hidden, adapters=["c"])])
    assert isinstance(good, torch.Tensor)
    assert isinstance(bad, UnknownAdapterError)
    with pytest.raises(UnknownAdapterError, match="'c' is not loaded on this server; loaded: a, b; load it with"):
        server.open(2, "c")


def test_a_session_keeps_its_adapter_after_it_was_unloaded_and_replaced(adapted: Adapted) -> None:
    server, prompt = adapted.served.server, random_prompt(4, 1)
    folder = adapted.served.checkpoint.parent
    hidden = server.embedding(torch.tensor([prompt]))
    server.adapters.load("c", str(folder / "a"))
    session = server.open(4, "c")
    server.adapters.unload("c")
    with pytest.raises(UnknownAdapterError):
        server.open(2, "c")
    server.adapters.load("c", str(folder / "b"))
    outputs = [server.run_chain(hidden[:, i : i + 1], [session], [i]) for i in range(4)]
    logits = server.head(torch.cat(outputs, dim=1))
    torch.testing.assert_close(logits, adapted.references["a"].logits(torch.tensor([prompt])), rtol=0, atol=ABSOLUTE)
    whole = server.head(server.run_chain(hidden, None, None, None, ["c"]))
    torch.testing.assert_close(whole, adapted.references["b"].logits(torch.tensor([prompt])), rtol=0, atol=ABSOLUTE)
    server.table.close(session)
    server.adapters.unload("c")


@pytest.fixture
def table(tmp_path: Path) -> SessionTable:
    """Room for 4 sessions."""
    config = GROUPED.model_config()
    return SessionTable(tmp_path, KVLayout.of(config, "float32", attn_cache_tokens=64, page_size=16), 512)


def test_an_unloaded_adapter_is_forgotten_once_no_session_has_it(table: SessionTable) -> None:
    adapters = AdapterTable(table.database)
    adapters.load_first([NewAdapter("a", "/a", "key", 4)])
    session = table.open(OpenRequest(8, adapter="a"))
    assert [(entry.name, entry.rank, entry.sessions) for entry in adapters.loaded()] == [("a", 4, 1)]
    with pytest.raises(InvalidValueError, match="a name that is not in use"):
        adapters.load(NewAdapter("a", "/b", "other", 4))
    adapters.unload("a")
    assert adapters.loaded() == []
    assert adapters.find(session.adapter).key == "key"
    table.close(session.id)
    adapters.load(NewAdapter("b", "/b", "other", 4))
    with pytest.raises(NotFoundError):
        adapters.find(session.adapter)
    adapters.load_first([NewAdapter("a", "/a", "key", 4)])
    assert [entry.name for entry in adapters.loaded()] == ["b"], "what was unloaded does not come back by itself"


Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], object]
EMBEDDING = "base_model.model.model.embed_tokens.lora_embedding_A"
REFUSED: list[tuple[str, Change]] = [
    (r"use_dora True is not supported", lambda config, _: config.update(use_dora=True)),
    (r"bias 'all' is not supported; allowed: 'none'", lambda config, _: config.update(bias="all")),
    (r"modules_to_save \['lm_head'\] is not supported", lambda config, _: config.update(modules_to_save=["lm_head"])),
    (r"init_lora_weights 'pissa' is not", lambda config, _: config.update(init_lora_weights="pissa")),
    (r"peft_type 'IA3'", lambda config, _: config.update(peft_type="IA3")),
    (r"no config of a LoRA adapter", lambda config, _: config.pop("r")),
    (r"has rank 4, but adapter_config.json says 5", lambda config, _: config.update(r=5)),
    (r"embed_tokens.*only linear layers of blocks", lambda _, tensors: tensors.update({EMBEDDING: torch.zeros(4, 9)})),
    (r"wants lora_A \[rank, 128\] and lora_B", lambda _, tensors: tensors.pop(min(tensors))),
    (r"block 9: the checkpoint has 4", lambda _, tensors: rename(tensors, "layers.0.", "layers.9.")),
    (r"self_attn.z_proj: no linear layer of a block", lambda _, tensors: rename(tensors, "q_proj", "z_proj")),
]


def rename(tensors: dict[str, torch.Tensor], old: str, new: str) -> None:
    for name in [name for name in tensors if old in name]:
        tensors[name.replace(old, new)] = tensors.pop(name)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint and an adapter for it."""
    folder = tmp_path_factory.mktemp("plain")
    GROUPED.write(folder / "checkpoint")
    write_adapter(folder / "checkpoint", folder / "adapter", 1, r=4, target_modules=["q_proj"])
    return folder


@pytest.mark.parametrize(("message", "change"), REFUSED, ids=[message for message, _ in REFUSED])
def test_what_cannot_be_computed_is_refused_with_a_clear_word(
    plain: Path, tmp_path: Path, message: str, change: Change
) -> None:
    shutil.copytree(plain / "adapter", tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / CONFIG).read_text())
    tensors = load_file(tmp_path / "adapter" / WEIGHTS)
    change(config, tensors)
    (tmp_path / "adapter" / CONFIG).write_text(json.dumps(config))
    save_file(tensors, tmp_path / "adapter" / WEIGHTS)
    with pytest.raises(AdapterError, match=message):
        AdapterFolder(tmp_path / "adapter", CheckpointFolder(plain / "checkpoint").config).prepared()


def test_a_folder_without_adapter_is_refused(plain: Path) -> None:
    with pytest.raises(AdapterError, match=r"holds no adapter_config.json; give a folder that `peft` wrote"):
        AdapterFolder(plain / "checkpoint", CheckpointFolder(plain / "checkpoint").config)
