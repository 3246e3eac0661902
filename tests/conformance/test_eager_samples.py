"""Rounds weighted by samples, in either binding: those of one large batch, exact counts, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_async.algorithms.eager.gradient_format import EXACT, SAMPLE_DIGITS, Tail, Tally, count_slots
from hvd_async.errors import ReplicaStateError
from hvd_async.testing import Cluster
from tests.conformance.drive import scripted_engine
from tests.conformance.eager_ranks import KERAS, NAN, TINY, TORCH, UNIT, Binding, Embedding, all_modes, both
from tests.conformance.reference import weighted
from tests.conftest import examples

SAMPLES = (1, 0, 7)


def trained(binding: Binding, samples: Any, **options: Any) -> list[list[float]]:
    """Each rank's weights after 6 rounds of all ranks, of gradients (rank + 1) and 2 (rank + 1) in two parameters."""

    def run(rank: int) -> list[float]:
        one = binding.vectors([2, 1], UNIT, quorum="all", weighting="samples", **options)
        for step in range(6):
            one.samples = samples(rank, step)
            one.take(rank + 1.0, NAN if one.samples == 0 else 2.0 * (rank + 1))
        one.opt.drain()
        return one.weights().tolist()

    return Cluster(3).run(run)


@all_modes
@pytest.mark.parametrize(
    "options", [{}, {"bucket_cap_mb": TINY}, {"gradient_predivide_factor": 4.0}, {"op": "Sum"}], ids=str
)
def test_all_ranks_equal_one_large_batch(binding, options):
    given = {**options, "op": binding.hvd.Sum} if "op" in options else options
    by_step = [[n + step * (n > 0) for n in SAMPLES] for step in range(6)]
    gradients = [np.array([r, r, 2 * r]) for r in (1.0, 2.0, 3.0)]
    expected = -sum(weighted(gradients, samples)[:-1] / (1 if "op" in options else 3) for samples in by_step)
    for weights in trained(binding, lambda rank, step: by_step[step][rank], **given):
        np.testing.assert_allclose(weights, expected, rtol=1e-6)


@both
@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_many_samples_do_not_overflow_and_count_exactly(binding, kind):
    options = {"compression": getattr(binding.hvd.Compression, kind)}
    for weights in trained(binding, lambda rank, step: 3**rank * 1000 + rank, **options):
        expected = 6 * np.average([1.0, 2.0, 3.0], weights=[1000, 3001, 9002])
        np.testing.assert_allclose(weights, [-expected, -expected, -2 * expected], rtol=1e-2)


@both
def test_a_round_without_samples_moves_nothing(binding):
    assert trained(binding, lambda rank, step: 0) == [[0.0, 0.0, 0.0]] * 3


@both
def test_what_cannot_be_is_refused(binding):
    with scripted_engine(2):
        weighted, plain = (binding.vectors([1], UNIT, **o) for o in ({"weighting": "samples"}, {}))
    with pytest.raises(ValueError, match="pass weighting='samples'"):
        plain.opt.record_samples(3)
    for wrong in (-1, 1.5, True, 2**32, "3"):
        with pytest.raises(ValueError, match=r"record_samples\(\) must get an integer from 0"):
            weighted.opt.record_samples(wrong)

    def forgets(rank: int) -> str:
        one = binding.vectors([1], UNIT, weighting="samples")
        with pytest.raises(ReplicaStateError, match="record_samples") as reported:
            one.take(1.0)
        one.samples = 2
        one.take(1.0)
        one.opt.drain()
        assert one.weights().tolist() == [-1.0]
        return str(reported.value)

    assert Cluster(1).run(forgets)


@settings(max_examples=examples(200))
@given(st.data())
def test_tails_are_exact_in_the_wires_dtype(data):
    """However many gradients each rank may have pending, and in whatever order their sums are added up."""
    dtype = data.draw(st.sampled_from(["float16", "bfloat16"]))
    late = data.draw(st.integers(0, EXACT[dtype] - 2))
    ranks = data.draw(st.integers(1, 12))
    slots = count_slots(ranks, late, dtype)
    numbers = st.one_of(st.just(2**SAMPLE_DIGITS - 1), st.integers(0, 2**SAMPLE_DIGITS - 1))
    total, expected = torch.zeros(len(Tail(slots, 0, True)), dtype=getattr(torch, dtype)), [0, 0]
    for rank in data.draw(st.permutations(range(ranks))):
        samples, gradients = data.draw(numbers), data.draw(st.sampled_from([late + 2, 1, 0]))
        pending = torch.tensor(Tail(slots, rank % slots, True).of(samples)) * gradients
        total = total + pending.to(total.dtype)
        expected = [expected[0] + gradients, expected[1] + gradients * samples]
    assert Tail(slots, 0, True).read(total.tolist(), 1.0) == Tally(*expected)


# -- several passes -------------------------------------------------------------------------------------------

PASSES = (((4, 2), (1, 8)), ((30, 5), (0, 3)), ((7, 7), (0, 0)))
"""Samples by rank, step and pass."""


def passed(binding: Binding, average: bool = False) -> tuple[list[list[float]], float]:
    """Each rank's weights after two steps of two passes each, and the large batch's; pass p of rank r has gradient
    r + p + 1, or none where it is empty."""
    options: dict[str, Any] = {"average_aggregated_gradients": True} if average else {}

    def run(rank: int) -> list[float]:
        one = binding.vectors([2], UNIT, quorum="all", weighting="samples", backward_passes_per_step=2, **options)
        for step in PASSES[rank]:
            if binding is TORCH:
                one.opt.zero_grad()
            for number, samples in enumerate(step):
                one.samples = samples
                if binding is not TORCH:
                    one.take(rank + number + 1.0 if samples else NAN)
                    continue
                one.opt.record_samples(samples)
                if samples:
                    (one.parameters[0] * (rank + number + 1.0)).sum().backward()
            if binding is TORCH:
                one.opt.step()
        one.opt.drain()
        return one.weights().tolist()

    expected = 0.0
    for step in range(2):
        counts = [PASSES[rank][step] for rank in range(3)]
        gradients = [
            [(rank + number + 1.0) * (n > 0) for number, n in enumerate(own)] for rank, own in enumerate(counts)
        ]
        if average:
            expected -= np.average(np.ravel(gradients), weights=np.ravel(counts))
        else:
            expected -= np.average([sum(own) for own in gradients], weights=[sum(own) for own in counts])
    return Cluster(3).run(run), expected


@all_modes
def test_a_steps_samples_are_those_of_its_passes(binding):
    """The sum of the passes is weighted by all their samples; a pass may be empty."""
    ends, expected = passed(binding)
    np.testing.assert_allclose(ends, [[expected] * 2] * 3, rtol=1e-6)


def test_averaged_passes_are_one_large_batch():
    ends, expected = passed(KERAS, average=True)
    np.testing.assert_allclose(ends, [[expected] * 2] * 3, rtol=1e-6)


@both
def test_a_pass_whose_samples_are_not_recorded_is_reported(binding):
    def run(rank: int) -> None:
        one = binding.vectors([1], UNIT, weighting="samples", backward_passes_per_step=2)
        one.opt._async.worker_now()
        one.samples = 4
        if binding is TORCH:
            one.opt.zero_grad()
            one.opt.record_samples(4)
            one.parameters[0].sum().backward()
            with pytest.raises(ReplicaStateError, match=r"samples of 1 of 2 backward pass\(es\) are recorded"):
                one.parameters[0].sum().backward()
        else:
            one.take(1.0)
            one.samples = None
            with pytest.raises(ReplicaStateError, match=r"were not recorded.*before apply\(\)"):
                one.take(1.0)
        assert one.opt.stats().gradients_produced == 0

    Cluster(1).run(run)


def test_samples_recorded_when_gradients_have_left_are_reported():
    def run(rank: int) -> list[float]:
        one = TORCH.vectors([1], UNIT, weighting="samples")
        one.opt._async.worker_now()
        one.samples = 4
        one.backward([[1.0]])
        with pytest.raises(ReplicaStateError, match=r"record_samples\(\) after backward\(\).*before each"):
            one.opt.record_samples(3)
        one.opt.step()
        one.opt.drain()
        return one.weights().tolist()

    assert Cluster(1).run(run) == [[-1.0]]


# -- models, on batches of different sizes ---------------------------------------------------------------------


@both
@pytest.mark.parametrize("quorum", ["all", "solo"])
def test_sparse_gradients_are_weighted(binding, quorum):
    """Rows of a table, of which each rank sees others: one round each, weighted by 3 and 1, or conserved."""
    words, samples = ((0, 2, 2), (2, 5, 0)), (3, 1)

    def run(rank: int) -> list[float]:
        one = Embedding(binding, quorum=quorum, weighting="samples")
        one.samples = samples[rank]
        one.take(words[rank])
        one.opt.drain()
        return one.rows()

    one, other = (np.bincount(own, minlength=9) for own in words)
    together, apart = 100 - (3 * one + other) / 4, 100 - (one + other) / 2
    for rows in Cluster(2).run(run):
        fits = [np.allclose(rows, expected, rtol=1e-6) for expected in (together, apart)]
        assert fits[0] or (quorum == "solo" and fits[1])
