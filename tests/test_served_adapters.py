"""Adapters on a real server: chosen per request and per row, loaded and unloaded while it runs."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from checkpoints import SERVED, random_prompt, text_of
from conftest import Remote, serve
from corolla.cli.main import cli
from corolla.client import CorollaClient
from corolla.errors import CorollaError
from lora_adapters import AdaptedReference, write_adapter
from reference import Reference
from wire import GrpcWire, RequestError, texts

CASE = replace(SERVED, ranges=(range(SERVED.blocks),))
CONFIGS: dict[str, dict[str, Any]] = {
    "a": {"r": 8, "lora_alpha": 8, "target_modules": "all-linear"},
    "b": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "c": {"r": 2, "lora_alpha": 8, "target_modules": ["o_proj", "up_proj"]},
}
PRELOADED = ("a", "b")


@dataclass(frozen=True)
class Adapted:
    """A server that was started with the adapters a and b; what `peft` makes of each, "" is none."""

    remote: Remote
    folder: Path
    references: dict[str, Reference]

    def expected(self, adapter: str, prompt: list[int], max_tokens: int) -> str:
        reference = self.references[adapter]
        new_ids = reference.generate(prompt, max_new_tokens=max_tokens)
        assert reference.lead(prompt, new_ids) > 1e-4, "tokens this close could differ by rounding alone"
        return reference.text(prompt, new_ids)

    def streamed(self, adapter: str, prompt: list[int], max_tokens: int) -> str:
        with CorollaClient(self.remote.server.grpc) as client:
            chunks = client.generate(text_of(prompt), max_tokens=max_tokens, adapter=adapter)
            return "".join(chunk.text for chunk in chunks)

    def command(self, *arguments: str) -> str:
        """The output of `corolla adapters`; its error is raised."""
        result = CliRunner().invoke(cli, ["adapters", *arguments, "--address", self.remote.server.grpc])
        if result.exception is not None:
            raise result.exception
        return result.output


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory, suite_cache: Path) -> Iterator[Adapted]:
    folder = tmp_path_factory.mktemp("adapted")
    CASE.write(folder / "checkpoint")
    paths = {
        name: write_adapter(folder / "checkpoint", folder / name, seed, **config)
        for seed, (name, config) in enumerate(CONFIGS.items())
    }
    preloaded = {name: paths[name] for name in PRELOADED}
    with serve(CASE, folder, suite_cache, "float32", 8 * 1024, adapters=preloaded) as remote:
        references = {name: AdaptedReference(folder / "checkpoint", path) for name, path in paths.items()}
        yield Adapted(remote, folder, {"": remote.reference, **references})


def test_streams_of_different_adapters_at_the_same_time(adapted: Adapted) -> None:
    """Prompts of 129 tokens are computed by the ranges."""
    cases = [(name, random_prompt(length, seed=length)) for length in (6, 129) for name in ("a", "b", "")]
    with ThreadPoolExecutor(len(cases)) as pool:
        generated = list(pool.map(lambda case: adapted.streamed(*case, 48), cases))
    for (name, prompt), text in zip(cases, generated, strict=True):
        assert text == adapted.expected(name, prompt, 48), (name, len(prompt))
    assert len(set(generated)) == len(cases)


def test_rows_of_a_batch_have_adapters_of_their_own(adapted: Adapted) -> None:
    rows = ["b", "", "a"]
    wire = GrpcWire(adapted.remote.server.grpc)
    input_ids = np.array([random_prompt(8, seed=8)] * len(rows), np.int64)
    names = texts(*rows)[:, None]
    expected = torch.cat([adapted.references[name].logits(torch.from_numpy(input_ids[:1])) for name in rows]).numpy()
    whole = wire.infer("pipeline", input_ids=input_ids, adapter=names)["logits"]
    np.testing.assert_allclose(whole, expected, rtol=0, atol=1e-4)

    hidden = wire.infer("embed", input_ids=input_ids)["hidden_states"]
    sessions = adapted.remote.sessions
    ids = [sessions.open(8, adapter=texts(name)) for name in rows]
    assert [sessions.stat(session_id)["adapter"] for session_id in ids] == rows
    outputs = [
        wire.infer(
            model,
            hidden_states=hidden[:, start:end],
            session_id=texts(*ids)[:, None],
            start_position=np.full((len(rows), 1), start, np.int32),
        )["output_hidden_states"]
        for model, start, end in [("chain", 0, 3), ("ranges", 3, 4), *(("chain", i, i + 1) for i in range(4, 8))]
    ]
    stepped = wire.infer("head", hidden_states=np.concatenate(outputs, 1))["logits"]
    np.testing.assert_allclose(stepped, expected, rtol=0, atol=1e-4)
    own, other = texts(ids[0])[:, None], texts("a")[:, None]
    with pytest.raises(RequestError, match=r"INVALID_ARGUMENT: adapter: 'a' is not allowed; allowed: 'b'"):
        wire.infer("chain", hidden_states=hidden[:1, :1], session_id=own, adapter=other)
    for session_id in ids:
        sessions.close(session_id)


def test_load_use_unload_at_run_time(adapted: Adapted) -> None:
    """A generation that has the adapter ends as if it were still there."""
    prompt, long = random_prompt(6, seed=1), random_prompt(129, seed=1)
    with pytest.raises(CorollaError, match="adapter: 'c' is not loaded on this server; loaded: a, b; load it with"):
        adapted.streamed("c", prompt, 4)
    assert '"name": "c"' in adapted.command("load", f"c={adapted.folder / 'c'}")
    assert adapted.streamed("c", long, 24) == adapted.expected("c", long, 24)
    with CorollaClient(adapted.remote.server.grpc) as client:
        chunks = client.generate(text_of(prompt), max_tokens=400, adapter="c")
        text = next(chunks).text
        assert '"name": "c"' not in adapted.command("unload", "c")
        text += "".join(chunk.text for chunk in chunks)
    assert text == adapted.expected("c", prompt, 400)
    with pytest.raises(CorollaError, match="adapter: 'c' is not loaded on this server; loaded: a, b; load it with"):
        adapted.streamed("c", prompt, 4)


def test_what_is_no_adapter_is_refused_and_changes_nothing(adapted: Adapted) -> None:
    before = adapted.command("list")
    for arguments, message in (
        (("load", f"c={adapted.folder / 'checkpoint'}"), "holds no adapter_config.json"),
        (("load", f"c={adapted.folder / 'nowhere'}"), "holds no adapter_config.json"),
        (("load", f"a={adapted.folder / 'c'}"), "a name that is not in use"),
        (("load", f"a b={adapted.folder / 'c'}"), "letters, digits"),
        (("unload", "c"), "'c' is not loaded"),
    ):
        with pytest.raises(CorollaError, match=message):
            adapted.command(*arguments)
    assert adapted.command("list") == before


def test_a_process_that_is_replaced_knows_the_adapters(adapted: Adapted) -> None:
    """Prompts of 129 tokens are computed by the ranges; `generate` waits for those that are being replaced."""
    adapted.command("load", f"c={adapted.folder / 'c'}")
    (pid,) = adapted.remote.server.stub_pids("blocks_00_05")
    os.kill(pid, signal.SIGKILL)
    prompt = random_prompt(129, seed=4)
    assert adapted.streamed("c", prompt, 4) == adapted.expected("c", prompt, 4)
    assert adapted.remote.server.stub_pids("blocks_00_05") != [pid]
    adapted.command("unload", "c")
