"""Going on with generations whose process died: a second engine on the same run directory."""

import gc
from collections.abc import Iterator
from dataclasses import replace

import pytest

from conftest import Served
from corolla.errors import InvalidValueError, NotFoundError
from corolla.generate.engine import GenerateEngine
from corolla.generate.request import GenerationRequest
from local_server import CollectingOutput

MAX_TOKENS = 40


class DyingOutput(CollectingOutput):
    """Breaks the generation off after some pieces, as a dying process does: nothing is released."""

    def __init__(self, pieces: int) -> None:
        super().__init__()
        self._left = pieces

    def send(self, text, finished) -> None:
        super().send(text, finished)
        self._left -= 1
        if not self._left:
            self._ended.set()
            raise SystemExit  # ends the loop's thread on the spot


@pytest.fixture
def engine(grouped: Served) -> Iterator[GenerateEngine]:
    engine = grouped.server.engine()
    yield engine
    engine.stop()
    gc.collect()  # engines that died in this process hold the pins of their sessions, which a dead process would not


def request(served: Served, tokens: int = 6, **options) -> GenerationRequest:
    prompt = " ".join(f"t{index}" for index in range(tokens))
    return GenerationRequest(
        text_input=prompt, max_tokens=MAX_TOKENS, echo=False, stream=True, ignore_eos=True, **options
    )


def run(engine: GenerateEngine, wanted: GenerationRequest) -> str:
    output = CollectingOutput()
    engine.start(wanted, output)
    return output.text()


def break_off(served: Served, wanted: GenerationRequest, pieces: int) -> CollectingOutput:
    output = DyingOutput(pieces)
    served.server.engine().start(wanted, output)
    output.text()
    return output


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("tokens", [6, 40], ids=["short", "prefilled in the ranges"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "random_seed": 5}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("heard", ["all", "nothing"])
def test_broken_off_generation_goes_on_to_the_same_text(
    grouped: Served, engine: GenerateEngine, tokens: int, sampling: dict, heard: str
) -> None:
    wanted = request(grouped, tokens, **sampling)
    undisturbed = run(engine, wanted)
    broken = break_off(grouped, wanted, pieces=12)
    received = broken.text() if heard == "all" else ""
    resumed = run(engine, request_with(wanted, wanted.text_input + received, broken.session_id))
    assert received + resumed == undisturbed


def request_with(wanted: GenerationRequest, text: str, session_id: str) -> GenerationRequest:
    return replace(wanted, text_input=text, session_id=session_id)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_text_that_is_not_the_sessions_is_refused_and_the_session_kept(grouped: Served, engine: GenerateEngine) -> None:
    wanted = request(grouped)
    broken = break_off(grouped, wanted, pieces=5)
    with pytest.raises(InvalidValueError, match="text_input"):
        run(engine, request_with(wanted, "t1 t1 t1", broken.session_id))
    assert run(engine, request_with(wanted, wanted.text_input, broken.session_id)) == run(engine, wanted)


def test_unknown_and_foreign_sessions_are_refused(grouped: Served, engine: GenerateEngine) -> None:
    with pytest.raises(NotFoundError, match="not open"):
        run(engine, request(grouped, session_id="0" * 32))
    raw = grouped.server.open(64)
    with pytest.raises(InvalidValueError, match="session that `generate` opened"):
        run(engine, request(grouped, session_id=raw))
    grouped.server.table.close(raw)
