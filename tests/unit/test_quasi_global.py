"""Quasi-global momentum's equations: by hand, the laws they keep, where they come to rest, rates that change."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_async.algorithms.gossip.config import ALGORITHMS, SMOOTHING
from hvd_async.algorithms.gossip.plan import make_plan
from hvd_async.algorithms.gossip.quasi_global import Correction, Smoothing

CORRECTED = [each for each in ALGORITHMS.values() if "quasi_global" in each.options]


def train(gradients, matrices, beta, smoothing, rates=None):
    """Return weights and momenta, shape (steps, ranks), of gradients (steps, ranks) that do not depend on weights. One
    correction of as many elements does for all ranks."""
    steps, ranks = gradients.shape
    rates = [0.1] * steps if rates is None else rates
    x, held, correction = np.zeros(ranks), np.zeros(ranks), Correction(smoothing)
    path = []
    for step, (g, rate) in enumerate(zip(gradients, rates, strict=True)):
        m = beta * held + g
        half = x - rate * m
        x = matrices[step % len(matrices)] @ half
        held = m + correction.after_step(half.copy(), x, [(ranks, rate)])
        path.append((x.copy(), held.copy()))
    return tuple(map(np.array, zip(*path, strict=True)))


def test_ranks_that_see_other_data_come_to_rest_at_nearly_the_same_momentum():
    gradients = np.tile([1.0, -1.0, 3.0], (400, 1))
    _, held = train(gradients, [np.full((3, 3), 1 / 3)], 0.9, Smoothing(1.0, 0.9))
    next_to = 0.9 * held[-1] + gradients[-1]
    np.testing.assert_allclose(next_to - next_to.mean(), gradients[-1] - 1.0, atol=1e-6)
    assert next_to.mean() == pytest.approx(1.0 / (1 - 0.9), rel=1e-6)


@pytest.mark.parametrize("algorithm", [each.name for each in CORRECTED if not each.pairs])
@pytest.mark.parametrize(
    ("name", "size"), [("own", 2), ("own", 8), ("own", 32), ("ring", 4), ("ring", 32), ("base", 6)]
)
def test_momenta_do_not_run_apart_on_sparse_graphs(algorithm, name, size):
    """Where gradients differ for ever, they are never as far apart as each rank's own momentum."""
    plan = make_plan(size, algorithm, None if name == "own" else name)
    gradients = np.tile(np.random.default_rng(size).normal(size=size), (2000, 1))
    _, held = train(gradients, plan.matrices, 0.9, SMOOTHING)
    apart = np.abs(held - held.mean(axis=1, keepdims=True)).max(axis=1)
    alone = np.abs(gradients[0] - gradients[0].mean()).max() / (1 - 0.9)
    assert apart[-200:].max() <= 0.5 * alone
    assert apart[-200:].max() <= 1.1 * apart[-800:-200].max()


def test_tiny_rates_do_not_make_momentum_of_rounding():
    weights = np.random.default_rng(1).normal(size=1000).astype(np.float32)
    rounded = np.nextafter(weights, np.float32(np.inf))
    correction = Correction(Smoothing(1.0, 0.9))
    assert not correction.after_step(weights.copy(), rounded, [(1000, 1e-8)]).any()
    moved = correction.after_step(weights.copy(), weights - np.float32(1e-3), [(1000, 1e-2)])
    np.testing.assert_allclose(moved, 0.01, rtol=2e-3)


def test_a_steep_fall_of_the_rate_does_not_make_a_huge_momentum():
    """A warm-up from 1e-8 after a rate of 0.1: the ranks are still apart by the old one."""
    gradients = np.tile([1.0, -1.0], (60, 1))
    slow = [np.array([[0.75, 0.25], [0.25, 0.75]])]
    rates = [0.1] * 30 + [1e-8] + [0.1 * k / 20 for k in range(1, 21)] + [0.1] * 9
    _, held = train(gradients, slow, 0.9, Smoothing(1.0, 0.9), rates)
    assert np.abs(held).max() <= 10.0


@pytest.mark.parametrize("algorithm", [each.name for each in ALGORITHMS.values() if "quasi_global" not in each.options])
def test_algorithms_without_it_refuse_it(algorithm):
    with pytest.raises(ValueError, match=f"quasi_global: under {algorithm} .*sgp, dpsgd or adpsgd"):
        make_plan(4, algorithm, quasi_global=True)


@pytest.mark.parametrize("algorithm", [each.name for each in CORRECTED])
def test_hosts_refuse_it(algorithm):
    assert make_plan(4, algorithm, quasi_global=True).config.quasi_global
    with pytest.raises(ValueError, match="quasi_global: with hierarchical"):
        make_plan(4, algorithm, quasi_global=True, local_size=2)
