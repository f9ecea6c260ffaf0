"""The generate engine on its chain and ranges, in this process: tokens are those of transformers' `generate`."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoints import END_OF_TEXT_ID, GROUPED, ids_of, random_prompt, text_of
from conftest import Served
from corolla.errors import InvalidValueError
from corolla.generate import engine as engine_module
from corolla.generate.engine import GenerateEngine
from corolla.generate.request import GenerationRequest
from corolla.kv.table import CacheFullError, UnknownSessionError
from local_server import CollectingOutput, LocalServer, make_plan
from waiting import wait_until

PROMPT_LENGTHS = (1, 7, 16, 17, 18, 60, 200)
"""The served plans have max_short_tokens 16: prompts up to 16 run in the chain, longer ones in the ranges."""


@pytest.fixture
def engine(grouped: Served) -> Iterator[GenerateEngine]:
    """Of the checkpoint with grouped attention; the test leaves no session behind."""
    running = grouped.server.engine()
    yield running
    running.stop()
    wait_until(lambda: grouped.server.table.status().open_sessions == 0)


def without_end(tokens: list[int]) -> list[int]:
    """An end token is counted, but is no text."""
    return tokens[:-1] if tokens[-1] == END_OF_TEXT_ID else tokens


def greedy(served: Served, prompt_ids: list[int], max_new_tokens: int = 64) -> list[int]:
    """What transformers' `generate` says, less the end token."""
    return without_end(served.reference.generate(prompt_ids, max_new_tokens=max_new_tokens))


def start(engine: GenerateEngine, prompt_ids: list[int], **options: object) -> CollectingOutput:
    """A greedy generation of 64 tokens, unless `options` say otherwise."""
    settings = {"max_tokens": 64, "temperature": 0.0, "echo": False} | options
    output = CollectingOutput()
    engine.start(GenerationRequest(text_of(prompt_ids), **settings), output)  # type: ignore[arg-type]
    return output


def test_concurrent_generations_give_the_greedy_tokens_of_transformers(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "PREFILL_CHUNK", 24)
    prompts = [random_prompt(length, seed=length) for length in PROMPT_LENGTHS]
    engine = served.server.engine()
    outputs = [start(engine, prompt) for prompt in prompts]
    generated = [ids_of(output.text()) for output in outputs]
    engine.stop()
    expected = [served.reference.generate(prompt) for prompt in prompts]
    assert generated == [without_end(tokens) for tokens in expected]
    assert [output.finished.num_output_tokens for output in outputs if output.finished] == [len(e) for e in expected]
    for prompt, tokens in zip(prompts, expected, strict=True):
        assert served.reference.lead(prompt, tokens) > 1e-4, "tokens this close could differ by rounding alone"
    wait_until(lambda: served.server.table.status().open_sessions == 0)


def test_generations_that_join_later_do_not_disturb_running_ones(grouped: Served, engine: GenerateEngine) -> None:
    first = start(engine, random_prompt(5, seed=1))
    others = []
    for length in (1, 12, 30):
        seen = len(first.pieces)
        wait_until(lambda seen=seen: len(first.pieces) > seen or first.has_ended)  # type: ignore[misc]
        others.append((length, start(engine, random_prompt(length, seed=length))))
    assert ids_of(first.text()) == greedy(grouped, random_prompt(5, seed=1))
    for length, output in others:
        assert ids_of(output.text()) == greedy(grouped, random_prompt(length, seed=length))


def test_pieces_come_one_token_at_a_time_and_the_last_tells_the_end(engine: GenerateEngine) -> None:
    output = start(engine, random_prompt(9, seed=9), max_tokens=6)
    output.text()
    assert [len(ids_of(piece)) for piece in output.pieces] == [1] * 6
    assert output.finished is not None
    assert (output.finished.reason, output.finished.num_input_tokens, output.finished.num_output_tokens) == (
        "length", 9, 6,
    )  # fmt: skip


def test_echo_puts_the_text_as_it_was_given_in_front(grouped: Served, engine: GenerateEngine) -> None:
    prompt = random_prompt(3, seed=3)
    output = start(engine, prompt, max_tokens=4, echo=True)
    text = output.text()
    assert text.startswith(text_of(prompt))
    assert ids_of(text[len(text_of(prompt)) :]) == greedy(grouped, prompt, 4)


def test_max_tokens_defaults_to_sixteen_or_the_rest_of_the_context(engine: GenerateEngine) -> None:
    context = GROUPED.model_config().max_position_embeddings
    short, long = random_prompt(3, seed=3), random_prompt(context - 5, seed=5)
    for prompt, expected in ((short, 16), (long, 5)):
        output = start(engine, prompt, max_tokens=None)
        assert len(ids_of(output.text())) == expected


def test_stop_word_over_several_tokens_ends_the_text_before_it(grouped: Served, engine: GenerateEngine) -> None:
    prompt = random_prompt(6, seed=6)
    tokens = grouped.reference.generate(prompt)
    stop_word = f"{str(tokens[4])[-1]} t{tokens[5]}"
    output = start(engine, prompt, stop_words=(stop_word,))
    assert output.text() == f" {text_of(tokens[:5])}".removesuffix(stop_word[0])
    assert output.finished is not None
    assert (output.finished.reason, output.finished.num_output_tokens) == ("stop", 6)


def test_end_tokens_of_the_generation_config_end_the_text(grouped: Served, tmp_path: Path) -> None:
    prompt = random_prompt(6, seed=6)
    ends = [256, grouped.reference.generate(prompt)[9]]
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(grouped.checkpoint, checkpoint)
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    engine = LocalServer(make_plan(checkpoint, GROUPED.ranges, attn_cache_tokens=256), tmp_path).engine()
    output, endless = start(engine, prompt), start(engine, prompt, ignore_eos=True)
    expected = grouped.reference.generate(prompt, eos_token_id=ends)
    assert ids_of(output.text()) == expected[:-1]
    assert output.finished is not None
    assert (output.finished.reason, output.finished.num_output_tokens) == ("stop", len(expected))
    assert ids_of(endless.text()) == greedy(grouped, prompt)
    engine.stop()


def test_more_generations_than_fit_wait_for_room_and_are_right(grouped: Served, tmp_path: Path) -> None:
    server = LocalServer(make_plan(grouped.checkpoint, GROUPED.ranges, attn_cache_tokens=96), tmp_path)
    engine = server.engine()
    prompts = [random_prompt(length, seed=length) for length in (5, 20, 7, 11)]
    outputs = [start(engine, prompt, max_tokens=40) for prompt in prompts]
    for prompt, output in zip(prompts, outputs, strict=True):
        assert ids_of(output.text()) == greedy(grouped, prompt, 40)
    engine.stop()


def test_generation_without_room_fails_in_time_and_says_how_much_there_is(grouped: Served, tmp_path: Path) -> None:
    server = LocalServer(make_plan(grouped.checkpoint, GROUPED.ranges, attn_cache_tokens=64), tmp_path)
    engine = server.engine()
    held = server.open(32)
    with pytest.raises(CacheFullError, match="32 of 64 tokens are free"):
        start(engine, random_prompt(5, seed=5), max_tokens=40, timeout=0.05).text()
    server.table.close(held)
    assert len(ids_of(start(engine, random_prompt(5, seed=5), max_tokens=40).text())) == 40
    engine.stop()


@pytest.mark.parametrize(
    ("length", "options", "message"),
    [
        (512, {}, "text_input: 'a prompt of 512 tokens' is not allowed; allowed: 1 to 511 tokens"),
        (10, {"max_tokens": 503}, "max_tokens: 503 is not allowed; allowed: 1 to 502"),
    ],
)
def test_what_exceeds_the_context_is_refused_at_once(
    engine: GenerateEngine, length: int, options: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidValueError, match=message):
        start(engine, random_prompt(length, seed=0), **options)


def test_prompt_without_a_token_is_refused_at_once(grouped: Served, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(grouped.checkpoint, checkpoint)
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"] = {"type": "Whitespace"}
    (checkpoint / "tokenizer.json").write_text(json.dumps(tokenizer))
    engine = LocalServer(make_plan(checkpoint, GROUPED.ranges, attn_cache_tokens=64), tmp_path).engine()
    with pytest.raises(InvalidValueError, match=r"text_input: .* 1 to 63 tokens"):
        engine.start(GenerationRequest(" "), CollectingOutput())
    engine.stop()


def test_cancelled_generation_frees_its_session_and_the_others_go_on(grouped: Served, engine: GenerateEngine) -> None:
    gone = start(engine, random_prompt(5, seed=5), max_tokens=400)
    stays = start(engine, random_prompt(8, seed=8))
    wait_until(lambda: len(gone.pieces) > 2)
    gone.cancelled = True
    assert ids_of(stays.text()) == greedy(grouped, random_prompt(8, seed=8))
    wait_until(lambda: grouped.server.table.status().open_sessions == 0)
    assert not gone.has_ended


def test_failing_prefill_fails_its_generation_only(grouped: Served) -> None:
    server = grouped.server
    engine = server.engine()

    def fail(*_: object) -> None:
        raise RuntimeError("a range is gone")

    engine._run_ranges = fail
    short, long = start(engine, random_prompt(5, seed=5)), start(engine, random_prompt(40, seed=40))
    with pytest.raises(RuntimeError, match="a range is gone"):
        long.text()
    assert ids_of(short.text()) == greedy(grouped, random_prompt(5, seed=5))
    engine.stop()
    wait_until(lambda: server.table.status().open_sessions == 0)


def test_session_closed_by_somebody_else_fails_its_generation_only(grouped: Served, engine: GenerateEngine) -> None:
    stays = start(engine, random_prompt(8, seed=8), max_tokens=200)
    wait_until(lambda: len(stays.pieces) > 0)
    robbed = start(engine, random_prompt(5, seed=5), max_tokens=400)
    wait_until(lambda: len(robbed.pieces) > 2)
    grouped.server.table.close(grouped.server.table.sessions()[-1].id)
    with pytest.raises(UnknownSessionError):
        robbed.text()
    assert ids_of(stays.text()) == greedy(grouped, random_prompt(8, seed=8), 200)


def test_logits_that_cannot_be_sampled_fail_their_generation_only(grouped: Served, engine: GenerateEngine) -> None:
    """A temperature this low turns the logits into infinities."""
    stays = start(engine, random_prompt(8, seed=8), max_tokens=200)
    wait_until(lambda: len(stays.pieces) > 0)
    broken = start(engine, random_prompt(5, seed=5), temperature=1e-42)
    with pytest.raises(Exception, match=r"."):
        broken.text(timeout=10)
    assert ids_of(stays.text()) == greedy(grouped, random_prompt(8, seed=8), 200)


def test_stopping_engine_ends_running_generations_with_an_error(grouped: Served) -> None:
    engine = grouped.server.engine()
    output = start(engine, random_prompt(5, seed=5), max_tokens=400)
    wait_until(lambda: len(output.pieces) > 2)
    engine.stop()
    with pytest.raises(RuntimeError, match="the server is stopping"):
        output.text(timeout=5)
    wait_until(lambda: grouped.server.table.status().open_sessions == 0)


def test_sampled_tokens_are_those_of_transformers_with_the_same_seed(grouped: Served, engine: GenerateEngine) -> None:
    outputs = [start(engine, random_prompt(length, seed=length), temperature=0.7, top_k=40, top_p=0.9, random_seed=11)
               for length in (4, 30)]  # fmt: skip
    for length, output in zip((4, 30), outputs, strict=True):
        expected = grouped.reference.generate(
            random_prompt(length, seed=length), seed=11, temperature=0.7, top_k=40, top_p=0.9
        )
        assert ids_of(output.text()) == expected
