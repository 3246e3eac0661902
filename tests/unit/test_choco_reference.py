"""The reference of messages of 8 bits: rounding by hand, and that error feedback keeps the mean."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conformance.choco_reference import Choco, int8, quantise
from tests.conformance.gossip_reference import dpsgd, sgp
from tests.unit.test_gossip_reference import HALVES, SIZES, resting, scattered, uniform


def test_int8_rounds_half_to_even_and_scales_each_chunk_of_2048():
    values = np.zeros(4099)
    values[:6] = [127.0, 0.5, 1.5, 2.5, -0.5, -3.5]
    values[4096:] = [0.0, -127 / 4, 1.5 / 4]
    codes, scales = quantise(values)
    assert codes.dtype == np.int8
    assert codes[:6].tolist() == [127, 0, 2, 2, 0, -4]
    assert codes[4096:].tolist() == [0, -127, 2]
    assert scales[[0, 2047, 2048, 4095, 4096]].tolist() == [1.0, 1.0, 0.0, 0.0, 0.25]
    decoded = int8(values)
    assert (abs(decoded - values) <= scales / 2).all()
    assert decoded[4096:].tolist() == [0.0, -127 / 4, 0.5]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["ring", "exponential", "star"])
def test_choco_keeps_the_mean_and_agrees(name, size):
    problem, matrices = scattered(size, 40), uniform(name, size)
    outcome = sgp(problem, matrices, 300, encode=Choco())
    np.testing.assert_allclose(outcome.drained(), problem.start.mean(axis=0), atol=1e-12)
    np.testing.assert_allclose(outcome.z, np.tile(problem.start.mean(axis=0), (size, 1)), atol=1e-4)
    single = sgp(problem, matrices, 300, encode=lambda x, *edge: int8(x))  # the same without feedback
    assert size == 1 or abs(single.z - outcome.z).max() > 1e-3


def test_choco_by_hand():
    start = [[127.0, 0.75], [0.0, 0.0]]
    outcome = dpsgd(resting(start), HALVES, 1, encode=Choco())
    assert outcome.z.tolist() == [[63.5, 0.75 - 0.5], [63.5, 0.5]]  # 0.75 is sent as 1
    outcome = dpsgd(resting(start), [np.eye(2), *HALVES], 2, encode=Choco())
    assert outcome.z.tolist() == [[63.5, 0.25], [63.5, 0.5]]  # nothing is sent where there is no edge


def test_recorded_messages_are_replayed_if_they_can_be_roundings():
    problem, matrices, plain, sent = scattered(3, 5), uniform("ring", 3), Choco(), {}

    def recording(x, *edge):
        before = plain.copies.get(edge[:2], 0.0)
        sent[edge] = plain(x, *edge) - before
        return before + sent[edge]

    expected = sgp(problem, matrices, 5, encode=recording).z
    np.testing.assert_allclose(sgp(problem, matrices, 5, encode=Choco(sent)).z, expected, atol=1e-12)
    last = sent.pop((1, 0, 5))
    nudged = sgp(problem, matrices, 5, encode=Choco(sent | {(1, 0, 5): last + 5e-6})).z
    assert abs(nudged - expected).max() > 1e-7
    for wrong in ({(1, 0, 5): last + 0.1}, {(1, 0, 5): last * np.nan}, {}):
        with pytest.raises(ValueError, match="message of step 5 to rank 1 was not recorded, or is no rounding"):
            sgp(problem, matrices, 5, encode=Choco(sent | wrong))
