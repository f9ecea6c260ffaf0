"""From a request to a running generation: tokens, checks, a session, prefill, then the loop."""

import logging
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from threading import Lock, Semaphore

import torch
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from corolla.checkpoint.folder import CheckpointFolder
from corolla.errors import CheckpointError, CorollaError, InvalidValueError, OverloadedError
from corolla.generate.loop import GenerateLoop, LoopLimits
from corolla.generate.replay import replay
from corolla.generate.request import DEFAULT_MAX_TOKENS, GenerationRequest
from corolla.generate.route_loops import RouteLoops
from corolla.generate.sampling import Prediction, TokenChooser
from corolla.generate.sequence import Output, Sequence
from corolla.generate.text import TextStream
from corolla.kv.adapters import AdapterTable
from corolla.kv.session import OpenRequest, Session
from corolla.kv.steps import Row, SessionSteps
from corolla.kv.table import CacheFullError, SessionTable, UnknownSessionError
from corolla.kv.token_log import TokenLog
from corolla.model.ends import Embedding, Head
from corolla.model.shape import ModelShape
from corolla.remote.runner import RouteRow
from corolla.remote.swarm import Need, Swarm
from corolla.remote.trip import SpanError
from corolla.serving.blocks import BlocksService, Step
from corolla.serving.grouping import BlocksRequest
from corolla.serving.span_loop import Blocks, RunRanges

logger = logging.getLogger(__name__)

KEEP_BROKEN_OFF = 25.0
"""Seconds for which the session of a generation that was broken off is kept."""
PREFILL_CHUNK = 512
"""Positions of a long prompt that one call of the ranges computes."""
MAX_WAITING = 64
"""Generations that may wait for room at the same time; more are refused at once."""
MAX_PREFILLS = 8
"""Generations whose long prompts may be computed at the same time."""
MAX_ROUTED = 64
"""Generations that may look for servers, at first or after one failed, at the same time."""
MAX_SETBACKS = 8
"""Failures of servers without a new token between them, after which a generation is given up."""


@dataclass(frozen=True)
class EngineLimits:
    """Parameters of the `generate` model: prompts of more than `max_short_tokens` go through the ranges."""

    max_short_tokens: int
    batch_channel_capacity: int = 1


class GenerateEngine:
    """Generates text on the merged chain of this process; long prompts are computed in the range processes.

    With a swarm, each generation takes a route through the servers of the model, of which this process may be one. When
    a server fails, its generations leave the loop, are repaired by threads, and go on in the loop of their new route.
    """

    def __init__(
        self,
        checkpoint: CheckpointFolder,
        embedding: Embedding,
        head: Head,
        blocks: Blocks | None,
        table: SessionTable,
        log: TokenLog,
        run_ranges: RunRanges,
        limits: EngineLimits,
        swarm: Swarm | None = None,
    ) -> None:
        """`blocks` are None where the process hosts none, which takes a swarm."""
        self._tokenizer = _load_tokenizer(checkpoint)
        self._defaults = _load_defaults(checkpoint)
        self._longest = min(ModelShape.of(checkpoint.config).context_length, table.layout.slots)
        self._embedding = embedding
        self._head = head
        self._blocks = blocks
        self._swarm = swarm
        self._pins = blocks.current.steps if blocks else SessionSteps(table, range(0))
        self._table = table
        self._log = log
        self._running: set[str] = set()
        self._guard = Lock()
        self._run_ranges = run_ranges
        self._max_short_tokens = limits.max_short_tokens
        self._places = Semaphore(MAX_WAITING)
        self._stopping = False
        self._waiting = ThreadPoolExecutor(MAX_WAITING, thread_name_prefix="waiting")
        self._prefills = ThreadPoolExecutor(MAX_PREFILLS, thread_name_prefix="prefill")
        self._loop = self._make_loop(limits)

    def _make_loop(self, limits: EngineLimits) -> GenerateLoop | RouteLoops:
        most, capacity = limits.max_short_tokens, limits.batch_channel_capacity
        if self._swarm is not None:
            self._routed = ThreadPoolExecutor(MAX_ROUTED, thread_name_prefix="route")
            return RouteLoops(self._step_routed, self._release, LoopLimits(most, most, capacity), self._rescue)
        most_prompt_tokens = min(most, max(1, self._chain.most_rows))
        return GenerateLoop(self._step, self._release, LoopLimits(most, most_prompt_tokens, capacity))

    @property
    def _chain(self) -> BlocksService:
        assert self._blocks is not None, "without blocks of its own, an engine has a swarm"
        return self._blocks.current

    def start(self, request: GenerationRequest, output: Output) -> None:
        """Checks a request and starts it; its text goes to `output`.

        Raises InvalidValueError, NotFoundError for a session that does not exist any more, and OverloadedError
        when too many generations wait for room already.
        """
        if request.session_id is None:
            prompt_ids = self._tokenizer(request.text_input).input_ids
            room = self._longest - len(prompt_ids)
            self._admit(self._sequence(request, output, prompt_ids, room))
        else:
            self._prefills.submit(self._resume, *self._find_broken_off(request, output, request.session_id))

    def stop(self) -> None:
        """Ends all generations with an error."""
        self._waiting.shutdown(wait=False, cancel_futures=True)
        self._prefills.shutdown(wait=False, cancel_futures=True)
        self._stopping = True
        if self._swarm is not None:
            self._swarm.close()
        self._loop.stop()
        if self._swarm is not None:
            self._routed.shutdown(wait=False)

    def _sequence(self, request: GenerationRequest, output: Output, prompt_ids: list[int], room: int) -> Sequence:
        return Sequence(
            request=request,
            prompt_ids=prompt_ids,
            max_tokens=_max_tokens(request, len(prompt_ids), room),
            chooser=TokenChooser(request, self._defaults, self._tokenizer, prompt_ids),
            text=TextStream(self._tokenizer, prompt_ids, request.stop_words),
            output=output,
        )

    def _admit(self, sequence: Sequence) -> None:
        """Starts a generation that fits at once; another one waits for room without holding up others."""
        max_length = len(sequence.prompt_ids) + sequence.max_tokens
        request = sequence.request
        wanted = OpenRequest(
            max_length,
            timeout=0.0,
            priority=request.priority,
            idle_timeout=KEEP_BROKEN_OFF,
            adapter=request.adapter,
        )
        try:
            session = self._table.open(wanted)
        except CacheFullError as error:
            if not self._places.acquire(blocking=False):
                raise OverloadedError(f"{MAX_WAITING} generations wait for room already; retry later") from error
            self._waiting.submit(self._wait_for_room, sequence, replace(wanted, timeout=request.timeout))
        else:
            self._begin(sequence, session)

    def _wait_for_room(self, sequence: Sequence, wanted: OpenRequest) -> None:
        with self._failing(sequence):
            try:
                session = self._table.open(wanted, partial(_is_cancelled, sequence))
            finally:
                self._places.release()
            self._begin(sequence, session)

    def _begin(self, sequence: Sequence, session: Session) -> None:
        self._log.begin(session, sequence.prompt_ids)
        self._attach(sequence, session)
        if self._swarm is None:
            self._join(sequence)
        else:
            self._routed.submit(self._find_route, self._swarm, sequence)

    def _find_route(self, swarm: Swarm, sequence: Sequence) -> None:
        with self._failing(sequence):
            sequence.sessions = swarm.attach(_need(sequence), sequence.request.timeout)
            self._join(sequence)

    def _rescue(self, sequence: Sequence, error: SpanError) -> None:
        """Takes a generation whose server failed out of its loop."""
        with self._failing(sequence):
            if self._stopping:
                raise RuntimeError("the server is stopping")
            self._routed.submit(self._repair, sequence, error)

    def _repair(self, sequence: Sequence, error: SpanError) -> None:
        with self._failing(sequence):
            self._replace_span(sequence, error)
            self._join(sequence)

    def _replace_span(self, sequence: Sequence, error: SpanError) -> None:
        assert self._swarm is not None
        assert sequence.sessions is not None
        if sequence.setbacks.count_at(sequence.cached) > MAX_SETBACKS:
            raise error.error
        sequence.sessions = self._swarm.repair(sequence.sessions, _need(sequence), sequence.cached, error)

    def _join(self, sequence: Sequence) -> None:
        """Into the loop, long prompts by way of the ranges."""
        if self._needs_prefill(sequence):
            self._prefills.submit(self._prefill, sequence)
        else:
            self._loop.join(sequence)

    def _find_broken_off(
        self, request: GenerationRequest, output: Output, session_id: str
    ) -> tuple[Sequence, Session, list[int]]:
        session = self._table.find(session_id)
        token_ids, prompt_length = self._log.read(session)
        if not prompt_length:
            raise InvalidValueError("session_id", session_id, "a session that `generate` opened")
        adapter = AdapterTable(self._table.database).name(session.adapter)
        if request.adapter not in (None, adapter):
            raise InvalidValueError("adapter", request.adapter, f"{adapter!r}, with which the session was opened")
        request = replace(request, adapter=adapter)
        room = session.max_length - prompt_length
        return self._sequence(request, output, token_ids[:prompt_length], room), session, token_ids[prompt_length:]

    def _resume(self, sequence: Sequence, session: Session, new_token_ids: list[int]) -> None:
        with self._failing(sequence):
            text, finished = replay(sequence, new_token_ids, self._tokenizer, self._head.vocabulary)
            self._attach(sequence, session)
            if self._swarm is None:
                sequence.cached = min(self._pins.length(session.id), len(sequence.token_ids) - 1)
            sequence.output.send(text, finished)
            if finished is not None:
                self._release(sequence)
            elif self._swarm is not None:
                self._find_route(self._swarm, sequence)
            else:
                self._join(sequence)

    def _attach(self, sequence: Sequence, session: Session) -> None:
        with self._guard:
            if session.id in self._running:
                raise InvalidValueError("session_id", session.id, "a generation that was broken off, not a running one")
            self._running.add(session.id)
        sequence.session_id = session.id
        sequence.log = partial(self._log.append, session)
        sequence.resources.enter_context(self._pins.held(session.id))
        sequence.output.begin(session.id)

    @contextmanager
    def _failing(self, sequence: Sequence) -> Iterator[None]:
        """An error ends the sequence and reaches its client."""
        try:
            yield
        except Exception as error:
            sequence.output.fail(error)
            self._release(sequence)

    def _needs_prefill(self, sequence: Sequence) -> bool:
        return len(sequence.pending) > self._max_short_tokens

    def _prefill(self, sequence: Sequence) -> None:
        """All of a long prompt but its last token, through the ranges, so that the loop goes on meanwhile."""
        with self._failing(sequence):
            end = len(sequence.token_ids) - 1
            while sequence.cached < end and not sequence.output.cancelled:
                chunk = sequence.token_ids[sequence.cached : min(sequence.cached + PREFILL_CHUNK, end)]
                hidden_states = self._embedding(torch.tensor([chunk]))
                if self._swarm is None:
                    self._run_ranges(hidden_states, sequence.session_id, sequence.cached)
                else:
                    self._run_routed(self._swarm, sequence, hidden_states)
                sequence.cached += len(chunk)
            self._loop.join(sequence)

    def _run_routed(self, swarm: Swarm, sequence: Sequence, hidden_states: torch.Tensor) -> None:
        """A part of a prompt [1, T, H] through the route of a sequence, which may change on the way."""
        while True:
            assert sequence.sessions is not None
            row = RouteRow(hidden_states[0], sequence.sessions, sequence.cached)
            (result,) = swarm.run([row], partial(_is_cancelled, sequence))
            if isinstance(result, torch.Tensor):
                return
            if not isinstance(result, SpanError):
                raise result
            self._replace_span(sequence, result)

    def _step(self, sequences: list[Sequence]) -> list[Prediction | Exception]:
        if all(len(sequence.pending) == 1 for sequence in sequences):
            with suppress(CorollaError):  # of one row: it gets its error when the rows run as requests of their own
                return list(self._decode(sequences))
        pending = [sequence.pending for sequence in sequences]
        hidden_states = self._embedding(torch.tensor([list(chain.from_iterable(pending))]))
        results = self._chain.run(
            [
                BlocksRequest(part, [sequence.session_id], [sequence.cached])
                for part, sequence in zip(hidden_states.split(list(map(len, pending)), 1), sequences, strict=True)
            ]
        )
        return self._predict([result[0] if isinstance(result, torch.Tensor) else result for result in results])

    def _step_routed(self, sequences: list[Sequence]) -> list[Prediction | Exception]:
        """Of one route."""
        assert self._swarm is not None
        pending = [sequence.pending for sequence in sequences]
        hidden_states = self._embedding(torch.tensor(list(chain.from_iterable(pending)))).split(list(map(len, pending)))
        rows = [
            RouteRow(part, sequence.sessions, sequence.cached)
            for part, sequence in zip(hidden_states, sequences, strict=True)
            if sequence.sessions is not None
        ]
        return self._predict(self._swarm.run(rows, lambda: all(list(map(_is_cancelled, sequences)))))

    def _predict(self, results: Iterable[torch.Tensor | CorollaError]) -> list[Prediction | Exception]:
        """What follows the hidden states [T, H] of each row; errors stay what they are."""
        results = list(results)
        last = [result[-1:] for result in results if isinstance(result, torch.Tensor)]
        predictions = iter(Prediction.of_rows(*self._head.best(torch.stack(last))) if last else ())
        return [next(predictions) if isinstance(result, torch.Tensor) else result for result in results]

    def _decode(self, sequences: list[Sequence]) -> list[Prediction]:
        """One token of each, as one step: the way of nearly all steps."""
        hidden_states = self._embedding(torch.tensor([sequence.pending for sequence in sequences]))
        rows = [Row(sequence.session_id, sequence.cached) for sequence in sequences]
        (output,) = self._chain.step([Step(hidden_states, rows)])
        return Prediction.of_rows(*self._head.best(output))

    def _release(self, sequence: Sequence) -> None:
        sequence.resources.close()
        if self._swarm is not None and sequence.sessions is not None:
            self._swarm.release(sequence.sessions.spans)
        if not sequence.session_id:
            return
        self._running.discard(sequence.session_id)
        try:
            self._table.close(sequence.session_id)
        except UnknownSessionError:
            logger.info("the session of a generation was closed by somebody else")


def _need(sequence: Sequence) -> Need:
    return Need(
        max_length=len(sequence.prompt_ids) + sequence.max_tokens,
        adapter=sequence.request.adapter or "",
        own_id=sequence.session_id,
        is_cancelled=partial(_is_cancelled, sequence),
    )


def _is_cancelled(sequence: Sequence) -> bool:
    sequence.output.poll()
    return sequence.output.cancelled


def _max_tokens(request: GenerationRequest, prompt_length: int, room: int) -> int:
    if prompt_length < 1 or room < 1:
        raise InvalidValueError(
            "text_input", f"a prompt of {prompt_length} tokens", f"1 to {prompt_length + room - 1} tokens"
        )
    if request.max_tokens is None:
        return min(DEFAULT_MAX_TOKENS, room)
    if request.max_tokens > room:
        raise InvalidValueError(
            "max_tokens", request.max_tokens, f"1 to {room}, the room after the prompt of {prompt_length} tokens"
        )
    return request.max_tokens


def _load_tokenizer(checkpoint: CheckpointFolder) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(checkpoint.path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{checkpoint.path}: no usable tokenizer ({error}); add tokenizer.json") from error


def _load_defaults(checkpoint: CheckpointFolder) -> GenerationConfig:
    if (checkpoint.path / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(checkpoint.path)
    return GenerationConfig.from_model_config(checkpoint.config)
