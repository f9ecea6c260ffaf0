"""The batch sizes for which decoders are compiled."""

import logging
from collections.abc import Sequence

from corolla.errors import InvalidValueError

logger = logging.getLogger(__name__)

DEFAULT = (16, 8, 4, 1)
COMPILED, EAGER = "compiled", "eager"
DECODERS = (COMPILED, EAGER)


def check_decoder(decoder: str, tensor_parallel: int) -> None:
    """InvalidValueError for an unknown kind of decoder, or one that cannot run in so many shards."""
    if decoder not in DECODERS:
        raise InvalidValueError("decoder", decoder, ", ".join(DECODERS))
    if tensor_parallel > 1 and decoder != EAGER:
        raise InvalidValueError(
            "decoder", decoder, f"{EAGER} where tensor_parallel, {tensor_parallel} here, is above 1"
        )


def parse_batch_sizes(text: str, max_batch_size: int) -> tuple[int, ...]:
    """The sizes of a list such as "8,4,1", descending; `max_batch_size` is added if it is missing.

    InvalidValueError for anything but whole numbers from 1 to `max_batch_size`.
    """
    sizes = set()
    for part in text.split(","):
        if not (part.strip().isdecimal() and 1 <= int(part) <= max_batch_size):
            allowed = f"whole numbers from 1 to max_batch_size {max_batch_size}, such as {max_batch_size},1"
            raise InvalidValueError("decoder_batch_sizes", text, allowed)
        sizes.add(int(part))
    if max_batch_size not in sizes:
        logger.warning("decoder_batch_sizes %s: added max_batch_size %d", text, max_batch_size)
        sizes.add(max_batch_size)
    return tuple(sorted(sizes, reverse=True))


def default_batch_sizes(max_batch_size: int) -> tuple[int, ...]:
    """DEFAULT up to `max_batch_size`, which is one of them."""
    return tuple(sorted({max_batch_size, *(size for size in DEFAULT if size < max_batch_size)}, reverse=True))


def preferred_batch_sizes(sizes: Sequence[int]) -> list[int]:
    """What Triton's dynamic batcher should aim at, ascending: a preferred size of 1 would stop it batching."""
    return sorted(size for size in sizes if size > 1)


def size_for(rows: int, sizes: Sequence[int]) -> int:
    """The smallest of `sizes` that holds `rows`."""
    return min(size for size in sizes if size >= rows)


def joined(sizes: Sequence[int]) -> str:
    """As written in config.pbtxt."""
    return ",".join(map(str, sizes))
