"""Vectors as bytes: what each codec keeps and loses, and rows that can be read in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hvd_async.algorithms.gossip.message_format import (
    ALIGNMENT,
    CACHED,
    CHUNK,
    HEADER,
    LEVELS,
    NumpyMessageFormat,
    dequantize,
    encoded_bytes,
    from_bf16,
    quantize,
    row_bytes,
    to_bf16,
    vector_with_room,
)
from hvd_async.runtime.memory import ReusedBlocks
from hvd_async.runtime.process_sets import RankGroup
from tests.conftest import examples

CODECS = ["none", "fp16", "bf16", "int8"]
SIZES = [0, 1, 2, 3, 7, 8, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 5]
KINDS = [np.float32, np.float64]
FINITE = hnp.arrays(np.float32, st.integers(1, 40), elements=st.floats(-(2.0**99), 2.0**99, width=32))
BITS = hnp.arrays(np.uint32, st.integers(1, 40))
AWKWARD = np.array(
    [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 3.4e38, -3.4e38, 1.00390625, 1.01171875, 65504, 65520],
    np.float32,
)
"""Zeros, infinities, subnormal and large ones, ties in bfloat16, the largest of float16 and what it makes infinite."""


@pytest.fixture(scope="module")
def bfloat16() -> Any:
    """Another one's, which comes with TensorFlow."""
    return pytest.importorskip("ml_dtypes").bfloat16


def vector(elements, kind=np.float32, seed=0):
    return np.random.default_rng([elements, seed]).normal(size=elements).astype(kind)


# -- half precision -------------------------------------------------------------------------------------------


@settings(max_examples=examples(60))
@example(AWKWARD.view(np.uint32))
@example(np.array([0x7F800001, 0xFFFFFFFF], np.uint32))  # NaNs: rounding their bits would give none
@given(BITS)
def test_bf16_is_the_nearest_with_ties_to_even(bfloat16, bits):
    values = bits.view(np.float32)
    with np.errstate(invalid="ignore"):
        ours, theirs = from_bf16(to_bf16(values)), values.astype(bfloat16).astype(np.float32)
    np.testing.assert_array_equal(ours, theirs)
    assert (np.signbit(ours) == np.signbit(theirs))[~np.isnan(values)].all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("codec", ["fp16", "bf16"])
def test_half_precision_is_that_of_numpy_except_for_what_is_too_large(bfloat16, codec, kind):
    post, half = NumpyMessageFormat(len(AWKWARD), kind, codec, 1), {"fp16": np.float16, "bf16": bfloat16}[codec]
    largest = float(pytest.importorskip("ml_dtypes").finfo(half).max)
    data, expected = post.encode(AWKWARD.astype(kind)), AWKWARD.clip(-largest, largest).astype(half).astype(kind)
    assert np.isfinite(expected[~np.isnan(AWKWARD)]).all()
    assert data.dtype == np.uint8
    assert len(data) == post.nbytes == 2 * len(AWKWARD)
    decoded = post.decode(data)
    assert decoded.dtype == kind
    np.testing.assert_array_equal(decoded, expected)


# -- 8 bits ---------------------------------------------------------------------------------------------------


@settings(max_examples=examples(60))
@given(FINITE)
def test_int8_is_off_by_at_most_half_a_level(values):
    decoded, scale = dequantize(quantize(values), len(values)), np.abs(values).max() / np.float32(LEVELS)
    assert (np.abs(decoded - values) <= scale * 0.5001 + 1e-38).all()
    np.testing.assert_array_equal(dequantize(quantize(-values), len(values)), -decoded)


def test_int8_by_hand():
    values = np.zeros(CHUNK + 3, np.float32)
    values[:6] = [127.0, 0.5, 1.5, 2.5, -0.5, -3.5]
    values[CHUNK:] = [0.0, -127 / 4, 1.5 / 4]
    data = quantize(values)
    assert len(data) == encoded_bytes(len(values), 4, "int8") == 2 * (CHUNK + 4)
    assert data[:8].view(np.float32).tolist() == [1.0, 0.25]
    assert data[8:].view(np.int8)[:6].tolist() == [127, 0, 2, 2, 0, -4]
    assert dequantize(data, len(values))[CHUNK:].tolist() == [0.0, -127 / 4, 0.5]


def test_int8_of_zeros_and_of_values_that_are_not_finite():
    with np.errstate(all="raise"):
        assert dequantize(quantize(np.zeros(5, np.float32)), 5).tolist() == [0.0] * 5
    values = np.ones(2 * CHUNK, np.float32)
    values[3] = np.nan
    with np.errstate(invalid="ignore"):
        decoded = dequantize(quantize(values), len(values))
    assert np.isnan(decoded[3])
    np.testing.assert_array_equal(decoded[CHUNK:], 1.0)  # the other chunk is whole


# -- messages -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("elements", SIZES)
@pytest.mark.parametrize("codec", CODECS)
def test_messages_come_out_of_a_packet_as_they_went_in(codec, elements, kind):
    """Rows are read in place, one after another in a buffer aligned like NumPy's; a packet without any is as large."""
    post = NumpyMessageFormat(elements, kind, codec, messages=3)
    assert post.nbytes == encoded_bytes(elements, np.dtype(kind).itemsize, codec)
    sent = [(post.encode(vector(elements, kind, seed)), HEADER.pack(seed, 0.5 * seed)) for seed in (1, 2)]
    rows = post.pack(sent)
    assert rows.shape == (3, row_bytes(post.nbytes))
    assert rows.dtype == np.uint8
    assert post.pack([]).shape == rows.shape
    assert post.pack([]) is post.pack([])
    for row, (data, header) in zip(rows, sent, strict=False):
        assert row.ctypes.data % ALIGNMENT == 0
        got, head = post.unpack(row)
        assert head == header
        np.testing.assert_array_equal(got, data)
        decoded, expected = post.decode(got), post.decode(data)
        assert decoded.dtype == kind
        assert decoded.shape == (elements,)
        np.testing.assert_array_equal(decoded, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("elements", SIZES)
@pytest.mark.parametrize("codec", CODECS)
def test_parts_of_a_host_travel_as_they_are_in_several_rows(codec, elements, kind):
    """At once to the 2 other ranks of a host, whatever is behind the last one's end."""
    post, values = NumpyMessageFormat(elements, kind, codec, 1, parts=3, plain=2), vector(elements, kind)
    for part in post.split(values):
        data, step = post.as_bytes(part), max(1, post.nbytes)
        pieces = [data[at : at + step] for at in range(0, max(1, len(data)), step)]
        assert 2 * len(pieces) == post.rows
        rows = post.pack([(piece, HEADER.pack(1, 1.0)) for piece in pieces] * 2)
        received = post.concatenate([post.unpack(row)[0] for row in rows[: len(pieces)]])
        assert post.from_bytes(received).tobytes() == part.tobytes()


@pytest.mark.parametrize("codec", CODECS)
def test_an_exchange_has_rows_for_what_may_go_and_no_more(codec):
    """Of parts that are all encoded, as many as are sent at once, however many there are of a vector."""
    assert NumpyMessageFormat(8 * CHUNK, np.float32, codec, 3, parts=8).rows == 3
    plain = {"none": 1, "fp16": 2, "bf16": 2, "int8": 4}[codec]
    assert NumpyMessageFormat(8 * CHUNK, np.float32, codec, 3, parts=8, plain=7).rows == 7 * plain


def test_a_lossless_message_is_the_vector_itself():
    post, one = NumpyMessageFormat(9, np.float64, "none", 1), vector(9, np.float64)
    assert post.lossless
    assert np.shares_memory(post.encode(one), one)
    np.testing.assert_array_equal(post.decode(post.encode(one)), one)
    one[2:] = [np.nan, np.inf, -0.0, 5e-324, 1e308, -1e308, 0.1]
    assert post.decode(post.encode(one)).tobytes() == one.tobytes()


def test_a_vector_with_gaps_can_be_sent():
    one = vector(20, np.float32)[::2]
    for codec in CODECS:
        post = NumpyMessageFormat(10, np.float32, codec, 1)
        np.testing.assert_array_equal(post.decode(post.encode(one)), post.decode(post.encode(one.copy())))


def test_who_shares_the_optimizer():
    everyone, some = (
        NumpyMessageFormat(10, np.float32, "none", 4, of) for of in (None, RankGroup((1, 3), (1, 3), 1, 5, 2))
    )
    assert (everyone.process_set, everyone.members, everyone.process_set_id) == (None, (), 0)
    assert (some.process_set, some.members, some.process_set_id) == ((1, 3), (1, 3), 5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("elements", [1, 2, CACHED - 1, CACHED, 2 * CACHED + 5])
def test_long_vectors_are_worked_on_in_runs_with_the_same_bits(elements, kind):
    memory = ReusedBlocks(most=4)
    post = NumpyMessageFormat(elements, kind, "none", 1, memory=memory)
    x, y = vector(elements, kind, 1), vector(elements, kind, 2)
    assert post.times(x, 0.3).tobytes() == (x * kind(0.3)).tobytes()
    assert post.times(x[:1], 0.3).tobytes() == (x[:1] * kind(0.3)).tobytes()
    for a in (1.0, -1.0, -0.7):
        expected, before = x + y * kind(a), y.tobytes()
        assert post.add(x.copy(), y, a).tobytes() == expected.tobytes()
        assert y.tobytes() == before
    for codec in ("fp16", "bf16"):
        half = NumpyMessageFormat(elements, kind, codec, 1, memory=memory)
        expected = to_bf16(x) if codec == "bf16" else x.astype(np.float16)
        assert half.encode(x).tobytes() == expected.tobytes()


# -- messages with room for their header ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("codec", ["none", "fp16", "bf16"])
def test_a_message_with_room_behind_it_is_packed_without_a_copy(codec, kind):
    memory = ReusedBlocks(most=4)
    post = NumpyMessageFormat(7, kind, codec, 1, memory=memory)
    one = vector_with_room(7, kind, memory)
    one[:] = vector(7, kind)
    data, header = post.encode(one), HEADER.pack(5, 0.25)
    expected = data.copy()
    packed = post.pack([(data, header)])
    assert packed.shape == (1, row_bytes(post.nbytes))
    assert np.shares_memory(packed, data)
    got, head = post.unpack(packed[0])
    assert head == header
    np.testing.assert_array_equal(got, expected)
    multiple = post.times(one, 0.5)
    assert np.shares_memory(post.pack([(post.encode(multiple), header)]), multiple) == (codec == "none")


def test_a_message_whose_neighbours_are_others_is_copied():
    """Parts of a vector, one of several messages, one amid a longer array, or in memory that cannot be written to."""
    memory, header = ReusedBlocks(most=4), HEADER.pack(5, 0.25)
    whole = vector_with_room(8, np.float32, memory)
    whole[:] = vector(8)
    parted = NumpyMessageFormat(8, np.float32, "none", 1, parts=2, memory=memory)
    several = NumpyMessageFormat(8, np.float32, "none", 2, memory=memory)
    single = NumpyMessageFormat(8, np.float32, "none", 1, memory=memory)
    longer = np.zeros(row_bytes(32) + 16, np.uint8)
    amid, behind = longer[:32], np.zeros(row_bytes(32), np.uint8)[HEADER.size :]
    fixed = np.zeros(row_bytes(32), np.uint8)
    fixed.flags.writeable = False
    for post, data in [
        (parted, parted.as_bytes(whole[:4])), (several, several.as_bytes(whole)), (single, amid), (single, behind[:32]),
        (single, fixed[:32]), (single, single.as_bytes(vector(8))),
    ]:  # fmt: skip
        packed = post.pack([(data, header)])
        assert not np.shares_memory(packed, data)
        got, head = post.unpack(packed[0])
        assert head == header
        np.testing.assert_array_equal(got, data)
