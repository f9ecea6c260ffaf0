"""A server in bfloat16 is as close to float32 as transformers in bfloat16 is.

bfloat16 has 8 bits, so two orders of the same sums give different logits. The measure is float32: the largest error
of the server's logits is no larger than that of transformers' own, and text is compared where the best token leads.
"""

from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from checkpoints import SERVED, random_prompt, text_of
from conftest import Remote, serve
from reference import Reference
from wire import texts

LEAD = 0.15


@pytest.fixture(scope="module")
def bfloat16(tmp_path_factory: pytest.TempPathFactory, suite_cache: Path) -> Iterator[Remote]:
    folder = tmp_path_factory.mktemp("bfloat16")
    with serve(SERVED, folder, suite_cache, "bfloat16", attn_cache_tokens=1024, max_batch_size=4) as remote:
        yield remote


def test_logits_steps_and_text(bfloat16: Remote) -> None:
    """One test, as one server is enough."""
    input_ids = np.array([random_prompt(40, seed) for seed in range(3)], np.int64)
    exact = Reference(bfloat16.checkpoint).logits(torch.from_numpy(input_ids)).numpy()
    allowed = np.abs(bfloat16.reference.logits(torch.from_numpy(input_ids)).numpy() - exact).max()
    for wire in (bfloat16.http, bfloat16.grpc):
        embedded = wire.infer("embed", input_ids=input_ids)["hidden_states"]
        assert embedded.dtype == ml_dtypes.bfloat16
        logits = wire.infer("pipeline", input_ids=input_ids)["logits"]
        assert logits.dtype == np.float32
        np.testing.assert_allclose(logits, exact, rtol=0, atol=allowed)
        for model in ("chain", "ranges"):
            hidden_states = wire.infer(model, hidden_states=embedded)["output_hidden_states"]
            logits = wire.infer("head", hidden_states=hidden_states)["logits"]
            np.testing.assert_allclose(logits, exact, rtol=0, atol=allowed)

    session_id = bfloat16.sessions.open(40)
    outputs = [
        bfloat16.grpc.infer(
            model,
            hidden_states=embedded[:1, start:stop],
            session_id=texts(session_id)[None],
            start_position=np.array([[start]], np.int32),
        )["output_hidden_states"]
        for model, start, stop in [("chain", 0, 17), ("ranges", 17, 18), ("chain", 18, 30), ("ranges", 30, 40)]
    ]
    logits = bfloat16.grpc.infer("head", hidden_states=np.concatenate(outputs, axis=1))["logits"]
    np.testing.assert_allclose(logits, exact[:1], rtol=0, atol=allowed)
    bfloat16.sessions.close(session_id)

    prompt = random_prompt(16, seed=16)
    new_ids = bfloat16.reference.generate(prompt, max_new_tokens=8)
    answer = bfloat16.http.generate({"text_input": text_of(prompt), "max_tokens": 8, "exclude_input_in_output": True})
    assert bfloat16.reference.lead(prompt, new_ids) > LEAD
    assert answer["text_output"] == bfloat16.reference.text(prompt, new_ids)
