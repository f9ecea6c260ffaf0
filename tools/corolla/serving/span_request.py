"""From the inputs of the `span` model to a step, with every check that needs no session."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from corolla.errors import InvalidValueError
from corolla.wire.messages import Hop, SpanStep, hops_from_json
from corolla.wire.states import WireStates

DEFAULT_TIMEOUT = 10.0
MOST_TIMEOUT = 3600.0
LONGEST_ID = 128


@dataclass(frozen=True)
class SpanShape:
    """What the server hosts."""

    blocks: range
    hidden_size: int


def read_step(inputs: Mapping[str, Any], shape: SpanShape) -> SpanStep:
    """The step that the inputs ask for, with its blocks filled in. InvalidValueError.

    `inputs` by name: lists of str and int, `hidden_states` a uint8 array, single values as they are, None where absent.
    """
    session_ids = tuple(inputs["session_id"])
    rows = len(session_ids)
    if not rows or len(set(session_ids)) < rows:
        raise InvalidValueError("session_id", list(session_ids), "one or more, each session once")
    starts = tuple(inputs["start_position"])
    if len(starts) != rows or min(starts) < 0:
        raise InvalidValueError("start_position", list(starts), f"{rows} numbers, 0 or more, one per session_id")
    step_id = inputs["step_id"]
    if not 1 <= len(step_id) <= LONGEST_ID:
        raise InvalidValueError("step_id", step_id, f"1 to {LONGEST_ID} characters")
    blocks = _blocks(inputs["blocks"], shape.blocks)
    return SpanStep(
        session_ids,
        starts,
        step_id,
        _states(inputs, rows, shape.hidden_size),
        blocks,
        _hops(inputs["next"], rows, blocks.stop),
        _timeout(inputs["timeout"]),
    )


def _blocks(given: list[int] | None, hosted: range) -> range:
    if given is None:
        return hosted
    if len(given) != 2 or not hosted.start <= given[0] < given[1] <= hosted.stop:
        raise InvalidValueError("blocks", given, f"start and end inside {hosted.start}:{hosted.stop}")
    return range(*given)


def _states(inputs: Mapping[str, Any], rows: int, hidden_size: int) -> WireStates | None:
    data, encoding, shape = (inputs[name] for name in ("hidden_states", "encoding", "shape"))
    if data is None:
        for name, value in (("encoding", encoding), ("shape", shape)):
            if value is not None:
                raise InvalidValueError(name, value, "only together with hidden_states")
        return None
    if encoding is None or shape is None:
        missing = "encoding" if encoding is None else "shape"
        raise InvalidValueError(missing, None, "a value, together with hidden_states")
    if len(shape) != 3 or shape[0] != rows or shape[2] != hidden_size or shape[1] < 1:
        raise InvalidValueError("shape", shape, f"[{rows}, T, {hidden_size}], T 1 or more")
    return WireStates(data, encoding, tuple(shape))


def _hops(text: str | None, rows: int, end: int) -> tuple[Hop, ...]:
    hops = hops_from_json(text) if text else ()
    for hop in hops:
        if hop.blocks.start != end:
            raise InvalidValueError("next", f"blocks from {hop.blocks.start}", f"blocks from {end} on")
        if len(hop.session_ids) != rows or not hop.address:
            raise InvalidValueError("next", hop, f"an address and {rows} session_ids per hop")
        end = hop.blocks.stop
    return hops


def _timeout(given: float | None) -> float:
    if given is None:
        return DEFAULT_TIMEOUT
    if not 0 < given <= MOST_TIMEOUT:
        raise InvalidValueError("timeout", given, f"more than 0, up to {MOST_TIMEOUT:g} seconds")
    return given
