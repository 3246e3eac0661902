"""Rates that change, step hooks and constraints where ranks have weights of their own.

That hooks, constraints and schedules of all kinds keep what they promise is in ``test_crossings``; here are numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
import torch

import hvd_async.tensorflow.keras as hvd_keras
import hvd_async.torch as hvd_torch
from hvd_async.testing import Cluster
from tests.conformance.cases import Case
from tests.conformance.exact_diffusion_reference import exact_diffusion
from tests.conformance.gossip_ranks import EXACT, ON, RING, STAR, alike, by_options, check, expected, graph, run
from tests.conformance.gossip_reference import Problem
from tests.conformance.keras_ranks import Scalar
from tests.conformance.reference import Array
from tests.conformance.weight_ranks import KerasGraphRank, KerasRank, TorchRank, both

SIZE, ELEMENTS = 4, 6
CURVATURE = np.random.default_rng(3).uniform(0.2, 1.5, size=(SIZE, ELEMENTS))
CENTRE = np.random.default_rng(5).normal(size=(SIZE, ELEMENTS)) * 3.0
BEST = (CURVATURE * CENTRE).sum(axis=0) / CURVATURE.sum(axis=0)
"""Each rank's curvatures and minima, and the minimum of the mean."""
RATES = [0.0, 0.0, *np.linspace(0.02, 0.2, 5), *[0.2] * 4, *[0.02] * 4, 0.0, 0.0, *[0.1] * 4]
"""A warm-up from 0, a fall, a rate of 0, and a rise from it."""
DOUBLE = {"dtype": torch.float64}


def quadratic(z: Array, rank: int, step: int) -> Array:
    """A rank's gradient."""
    return np.asarray(CURVATURE[rank] * (z - CENTRE[rank]))


def plain(momentum: float = 0.0, nesterov: bool = False) -> Case:
    """Gradient descent."""
    return Case("plain", "sgd", 0.1, momentum, nesterov)


def problem_of(rates: Sequence[float], case: Case, framework: str = "torch") -> Problem:
    """Quadratics, from 1, at these rates."""
    return Problem(np.ones((SIZE, ELEMENTS)), quadratic, case, framework, rate=lambda step: rates[step - 1])


def diffused(problem: Problem, rates: Sequence[float], every: int = 1) -> Array:
    """Exact diffusion in float64, shape (ranks, steps, elements): a step takes r / R of the correction, r the rate of
    its update, R the largest so far. Keras' velocity keeps the rates of earlier steps: r is their average with weights
    (1 - momentum) momentum^age."""
    momentum, largest, r, shares = problem.case.momentum, 0.0, rates[0], list[float]()
    for rate in rates:
        r = momentum * r + (1.0 - momentum) * rate
        of_update = momentum * r + (1.0 - momentum) * rate if problem.case.nesterov else r
        largest = max(largest, of_update)
        shares.append(of_update / largest if largest else 0.0)
    (weights,) = graph("ring", SIZE)
    wbar = (weights + np.eye(SIZE)) / 2
    return np.array(exact_diffusion(problem, wbar, [len(rates)] * SIZE, every=every, shares=shares).path)


# -- rates ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("binding", "every", "momentum", "nesterov"),
    [
        (TorchRank, 1, 0.0, False),
        (TorchRank, 3, 0.0, False),
        (KerasRank, 1, 0.0, False),
        (KerasGraphRank, 3, 0.0, False),
        (KerasGraphRank, 1, 0.8, False),
        (KerasRank, 1, 0.8, True),
    ],
)
def test_exact_diffusion_equals_the_reference_while_the_rate_changes(binding, every, momentum, nesterov):
    problem = problem_of(RATES, plain(momentum, nesterov), binding.framework)
    double = DOUBLE if binding is TorchRank else {}
    seen = run(binding, problem, len(RATES), **EXACT, **double, gossip_every=every)
    within = 1e-9 if binding is TorchRank else 2e-5
    np.testing.assert_allclose([own.path for own in seen], diffused(problem, RATES, every), rtol=0, atol=within)


def test_torchs_groups_each_have_their_own_rate():
    second = [0.1] * 8 + [0.0] * 6 + [0.1] * (len(RATES) - 14)
    problem = problem_of(RATES, plain())

    def work(rank: int) -> list[Array]:
        make = lambda ps: torch.optim.SGD([{"params": [p]} for p in ps], lr=0.1)  # noqa: E731
        one = TorchRank(problem, rank, make=make, **DOUBLE, **EXACT)
        for rate in second:
            one.opt.param_groups[1]["lr"] = rate
            one.train(1)
        return one.path

    found = np.array(Cluster(SIZE).run(work))
    np.testing.assert_allclose(found[..., :2], diffused(problem, RATES)[..., :2], rtol=0, atol=1e-9)
    other = problem_of(second, plain())
    np.testing.assert_allclose(found[..., 2:], diffused(other, second)[..., 2:], rtol=0, atol=1e-9)


def test_ranks_whose_rates_fall_at_different_steps_still_find_the_minimum():
    """A ReduceLROnPlateau on each rank does that: the correction of an edge is the same at both ends."""

    def work(rank: int) -> Array:
        rates = [0.3 if step < 60 + 15 * rank else 0.1 for step in range(400)]
        return TorchRank(problem_of(rates, plain()), rank, **DOUBLE, **EXACT).train(400).path[-1]

    np.testing.assert_allclose(Cluster(SIZE).run(work), np.tile(BEST, (SIZE, 1)), rtol=0, atol=1e-6)


@pytest.mark.parametrize("binding", [TorchRank, KerasGraphRank])
def test_quasi_global_momentum_follows_the_rate(binding):
    """The correction is in units of gradients, also where the momentum is a velocity: Keras'."""
    rates, options = [0.1] * 8 + [0.01] * 6 + [0.0] * 2 + [0.05] * 6, {"algorithm": "sgp", "topology": "ring", **ON}
    problem = problem_of(rates, plain(0.8), binding.framework)
    seen = run(binding, problem, len(rates), **options)
    check(expected(problem, seen, options), seen, 2e-5)


def test_parameters_that_have_no_momentum_yet_have_all_ranks_after_a_drain():
    def work(rank: int) -> list[float]:
        one = TorchRank(TorchRank.least_squares(2), rank, **RING, **ON)
        for _ in range(3):
            for index, parameter in enumerate(one.parameters):
                parameter.grad = None if (rank, index) == (0, 1) else torch.ones_like(parameter)
            one.opt.step()
        assert len(one.opt.state) == 1 + rank
        one.opt.drain()
        return one.moments().first.tolist()

    assert np.abs(alike(work, 2)).min() > 0


# -- hooks and constraints ----------------------------------------------------------------------------------------


def test_a_pre_hook_may_replace_the_closure_and_a_derived_class_runs_hooks_once():
    class Derived(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # (torch hooks the base's step too, from now on)

    def work(rank: int) -> Any:
        weight = torch.nn.Parameter(torch.ones(1))
        opt = hvd_torch.GossipOptimizer(Derived([weight], lr=0.5), **STAR)
        calls: list[str] = []

        def closure() -> float:
            weight.grad = torch.ones(1)
            return 7.0

        opt.register_step_pre_hook(lambda own, args, kwargs: ((own, closure), {}))
        opt.register_step_post_hook(lambda *_: calls.append("post"))
        found = [opt.step(), opt.step()]
        opt.drain()
        return found, calls, weight.item()

    for found, calls, end in Cluster(3).run(work):
        assert (found, calls) == ([7.0, 7.0], ["post"] * 2)
        assert end < 0.5


def test_an_error_in_an_update_leaves_the_models_weights():
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if self.param_groups[0]["fails"]:
                raise ZeroDivisionError("boom")
            return super().step(closure)

    def work(rank: int) -> Any:
        make = lambda ps: Failing([{"params": ps, "fails": False}], lr=0.3)  # noqa: E731
        one = TorchRank(TorchRank.least_squares(3), rank, make=make, **STAR).train(3)
        one.opt.cut()
        assert one.opt.stats().push_sum_weight != 1.0
        one.opt.param_groups[0]["fails"] = True
        with pytest.raises(ZeroDivisionError):
            one.train(1)
        np.testing.assert_allclose(one.weights(), one.path[-1], rtol=1e-6)
        one.opt.discard()

    Cluster(3).run(work)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_a_constraint_is_applied_once_a_step(graph):
    """One that halves, rather than projects, on ranks that agree: as in plain Keras."""

    def run(opt: Any) -> list[float]:
        one = Scalar(opt, graph, 8.0)
        one.weight.constraint = lambda value: value * 0.5
        return [one.step(1.0) for _ in range(3)]

    own = run(keras.optimizers.SGD(1.0))
    for path in Cluster(2).run(lambda rank: run(hvd_keras.GossipOptimizer(keras.optimizers.SGD(1.0), **RING))):
        assert path == own


@by_options(STAR, RING, {"algorithm": "adpsgd"}, {"algorithm": "local", "average_every": 2})
@both
def test_nan_from_a_hook_or_a_constraint_is_raised_and_reaches_no_other_rank(options, binding):
    """In the last step before a drain."""
    seen, steps = {}, 6

    def work(rank: int) -> None:
        one = binding(binding.least_squares(2), rank, **options)
        seen[rank], left = one.weights, [steps]

        def poison(value: Any) -> Any:
            left[0] -= 1
            return value * (float("nan") if rank == 0 and left[0] == 0 else 1.0)

        if binding is TorchRank:
            first = one.parameters[0]
            one.opt.register_step_post_hook(lambda *_: first.data.copy_(poison(first.data)))
        else:
            one.parameters[0].constraint = poison
        one.train(steps).opt.drain()

    with pytest.raises(FloatingPointError, match="NaN or infinite"):
        Cluster(2).run(work)
    assert np.isfinite(seen[1]()).all()
