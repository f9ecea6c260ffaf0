"""From a request to a running generation: tokens, checks, a session, prefill, then the loop."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from corolla.checkpoint.folder import CheckpointFolder
from corolla.errors import CheckpointError, InvalidValueError
from corolla.generate.loop import GenerateLoop
from corolla.generate.request import DEFAULT_MAX_TOKENS, GenerationRequest
from corolla.generate.sampling import TokenChooser
from corolla.generate.sequence import Output, Sequence
from corolla.generate.text import TextStream
from corolla.kv.session import OpenRequest
from corolla.kv.table import SessionTable, UnknownSessionError
from corolla.model.ends import Embedding, Head
from corolla.serving.blocks import BlocksRequest, BlocksService

logger = logging.getLogger(__name__)

OPEN_TIMEOUT = 30.0
"""Seconds a generation waits for room in the cache before it is refused."""
PREFILL_CHUNK = 512
"""Positions of a long prompt that one call of the ranges computes."""
MAX_ADMISSIONS = 64
"""Generations that may wait for room, or for their long prompts, at the same time."""

RunRanges = Callable[[torch.Tensor, str, int], None]
"""Runs hidden states [1, T, H] of a session at a position through the range processes."""


class GenerateEngine:
    """Generates text on the merged chain of this process; long prompts are computed in the range processes."""

    def __init__(
        self,
        checkpoint: CheckpointFolder,
        embedding: Embedding,
        head: Head,
        blocks: BlocksService,
        table: SessionTable,
        run_ranges: RunRanges,
        max_short_tokens: int,
    ) -> None:
        self._tokenizer = _load_tokenizer(checkpoint)
        self._defaults = _load_defaults(checkpoint)
        self._context_length = blocks.blocks.context_length
        self._embedding = embedding
        self._head = head
        self._blocks = blocks
        self._table = table
        self._run_ranges = run_ranges
        self._max_short_tokens = max_short_tokens
        self._admissions = ThreadPoolExecutor(MAX_ADMISSIONS, thread_name_prefix="admission")
        self._loop = GenerateLoop(self._step, self._release, max_batch_size=max_short_tokens)

    def start(self, request: GenerationRequest, output: Output) -> None:
        """Checks a request and starts it; its text goes to `output`. Raises InvalidValueError."""
        prompt_ids = self._tokenizer(request.text_input).input_ids
        sequence = Sequence(
            request=request,
            prompt_ids=prompt_ids,
            max_tokens=self._max_tokens(request, len(prompt_ids)),
            chooser=TokenChooser(request, self._defaults, self._tokenizer, prompt_ids),
            text=TextStream(self._tokenizer, prompt_ids, request.stop_words),
            output=output,
        )
        self._admissions.submit(self._admit, sequence)

    def stop(self) -> None:
        """Ends all generations with an error."""
        self._admissions.shutdown(wait=False, cancel_futures=True)
        self._loop.stop()

    def _max_tokens(self, request: GenerationRequest, prompt_length: int) -> int:
        room = self._context_length - prompt_length
        if room < 1:
            raise InvalidValueError(
                "text_input", f"a prompt of {prompt_length} tokens", f"1 to {self._context_length - 1} tokens"
            )
        if request.max_tokens is None:
            return min(DEFAULT_MAX_TOKENS, room)
        if request.max_tokens > room:
            raise InvalidValueError(
                "max_tokens",
                request.max_tokens,
                f"1 to {room} (context of {self._context_length} less the prompt's {prompt_length} tokens)",
            )
        return request.max_tokens

    def _admit(self, sequence: Sequence) -> None:
        try:
            max_length = len(sequence.prompt_ids) + sequence.max_tokens
            sequence.session_id = self._table.open(OpenRequest(max_length, timeout=OPEN_TIMEOUT)).id
            if len(sequence.prompt_ids) > self._max_short_tokens:
                self._prefill(sequence)
        except Exception as error:
            sequence.output.fail(error)
            self._release(sequence)
        else:
            self._loop.join(sequence)

    def _prefill(self, sequence: Sequence) -> None:
        """All of the prompt but its last token, through the ranges, so that the loop goes on meanwhile."""
        end = len(sequence.prompt_ids) - 1
        while sequence.cached < end and not sequence.output.cancelled:
            chunk = sequence.prompt_ids[sequence.cached : min(sequence.cached + PREFILL_CHUNK, end)]
            self._run_ranges(self._embedding(torch.tensor([chunk])), sequence.session_id, sequence.cached)
            sequence.cached += len(chunk)

    def _step(self, sequences: list[Sequence]) -> list[torch.Tensor | Exception]:
        hidden_states = self._embedding(torch.tensor([sequence.pending for sequence in sequences]))
        results = self._blocks.run(
            [
                BlocksRequest(row[None], [sequence.session_id], [sequence.cached])
                for row, sequence in zip(hidden_states, sequences, strict=True)
            ]
        )
        done = [result[:, -1:] for result in results if isinstance(result, torch.Tensor)]
        logits = iter(self._head(torch.cat(done))[:, 0] if done else ())
        return [next(logits) if isinstance(result, torch.Tensor) else result for result in results]

    def _release(self, sequence: Sequence) -> None:
        if not sequence.session_id:
            return
        try:
            self._table.close(sequence.session_id)
        except UnknownSessionError:
            logger.info("session of a generation was closed by somebody else")


def _load_tokenizer(checkpoint: CheckpointFolder) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(checkpoint.path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{checkpoint.path}: no usable tokenizer ({error}); add tokenizer.json") from error


def _load_defaults(checkpoint: CheckpointFolder) -> GenerationConfig:
    if (checkpoint.path / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(checkpoint.path)
    return GenerationConfig.from_model_config(checkpoint.config)
