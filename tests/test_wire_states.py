"""Hidden states on the wire: exact in their own dtype, bounded errors otherwise, wrong sizes refused by name."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from corolla.errors import InvalidValueError
from corolla.wire.messages import Hop, hops_from_json, hops_to_json
from corolla.wire.states import BLOCK, ENCODINGS, WireStates, decode, encode, encoded_bytes

SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 63, 64, 65, 128, 200]))
NUMBERS = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)


@settings(max_examples=80, deadline=None)
@given(SHAPES.flatmap(lambda shape: arrays.arrays(np.float32, shape, elements=NUMBERS)))
def test_int8_is_off_by_at_most_half_a_step_of_its_block(values: np.ndarray) -> None:
    decoded = decode(encode(torch.from_numpy(values), "int8"), torch.float32).numpy()
    for start in range(0, values.shape[2], BLOCK):
        block, found = (x[:, :, start : start + BLOCK].astype(np.float64) for x in (values, decoded))
        largest = np.abs(block).max(-1, keepdims=True)
        # absmax / 254 and the rounding of float32; below 127 times its smallest normal number everything is 0
        assert (np.abs(block - found) <= largest * (1 / 254 + 2**-22) + 127 * np.finfo(np.float32).tiny).all()


@settings(max_examples=30, deadline=None)
@given(SHAPES, st.sampled_from(["float32", "bfloat16", "float16"]), st.integers(0, 99))
def test_a_dtype_on_the_wire_is_that_dtype(shape: tuple[int, int, int], encoding: str, seed: int) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    decoded = decode(encode(values, encoding), torch.float32)
    assert torch.equal(decoded, values.to(getattr(torch, encoding)).float())


def test_a_block_that_is_not_finite_comes_back_as_nan_alone() -> None:
    values = torch.ones(1, 1, 3 * BLOCK)
    values[0, 0, 1], values[0, 0, 2 * BLOCK] = float("inf"), float("nan")
    decoded = decode(encode(values, "int8"), torch.float32)
    assert decoded.isnan().view(3, BLOCK).all(1).tolist() == [True, False, True]
    assert torch.equal(decoded[0, 0, BLOCK : 2 * BLOCK], torch.ones(BLOCK))


def test_int8_takes_little_more_than_a_byte_per_number() -> None:
    sizes = [encoded_bytes((2, 3, 128), encoding) for encoding in ENCODINGS]
    assert sizes == [2 * 3 * 128 * 4, 2 * 3 * 128 * 2, 2 * 3 * 128 * 2, 2 * 3 * (128 + 2 * 4)]


@pytest.mark.parametrize(
    ("data", "encoding", "shape", "message"),
    [
        (np.zeros(8, np.uint8), "float64", (1, 1, 1), "encoding: 'float64' .* float32, bfloat16, float16, int8"),
        (np.zeros(7, np.uint8), "float32", (1, 1, 2), "hidden_states: 'uint8 .7.' .* 8 bytes, as float32 of the shape"),
        (np.zeros(2, np.float32), "float32", (1, 1, 2), "hidden_states: 'float32 .2.' "),
        (np.zeros(2, np.uint8), "int8", (1, 1, 2), "hidden_states: 'uint8 .2.' .* 6 bytes, as int8"),
        (np.zeros(0, np.uint8), "float32", (1, 0, 2), "shape: .1, 0, 2. is not allowed; allowed: three numbers"),
        (np.zeros(8, np.uint8), "float32", (1, 2), "shape: .1, 2. "),
        (np.zeros(8, np.uint8), "float32", (-1, -1, 2), "shape: .-1, -1, 2. "),
    ],
)
def test_what_does_not_fit_together_is_refused(
    data: np.ndarray, encoding: str, shape: tuple[int, int, int], message: str
) -> None:
    with pytest.raises(InvalidValueError, match=f"^{message}"):
        WireStates(data, encoding, shape)


def test_hops_come_back_from_json() -> None:
    hops = (Hop("a:1", range(2, 4), ("x", "y")), Hop("[::1]:2", range(4, 5), ("z",)))
    assert hops_from_json(hops_to_json(hops)) == hops
    for text in ("", "1", "{}", "[1]", '[{"address": "a"}]', hops_to_json(hops).replace("2, 4", "4, 2")):
        with pytest.raises(InvalidValueError, match=r"^next: .* a JSON list of"):
            hops_from_json(text)
