"""Gossip while the learning rate changes, a gradient is missing, or a parameter is frozen."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch

import hvd_async.tensorflow.keras as hvd_keras
import hvd_async.torch as hvd_torch
from hvd_async import mixing, topology
from hvd_async.algorithms.gossip.config import SMOOTHING
from hvd_async.testing import Cluster
from tests.conformance.keras_ranks import flat
from tests.conformance.reference import Array

SIZE, ELEMENTS = 4, 6
EXACT = {"algorithm": "exact-diffusion", "topology": "ring"}


class TorchRank:
    """Two parameters of three elements each, in float64, in groups of their own."""

    def __init__(self, lr: float, momentum: float, nesterov: bool, **options: Any) -> None:
        self.parts = [torch.nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(2)]
        groups = [{"params": [part]} for part in self.parts]
        sgd = torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov)
        self.opt = hvd_torch.GossipOptimizer(sgd, **options)

    def weights(self) -> Array:
        return np.concatenate([part.detach().numpy() for part in self.parts])

    def momenta(self) -> Array:
        return np.concatenate([self.opt.state[part]["momentum_buffer"].numpy() for part in self.parts])

    def set_rate(self, *rates: float) -> None:
        for group, rate in zip(self.opt.param_groups, rates * 2, strict=False):
            group["lr"] = rate

    def freeze(self, index: int, frozen: bool = True) -> None:
        self.parts[index].requires_grad_(not frozen)

    def step(self, gradient: Array, without: Sequence[int] = ()) -> Array:
        for index, part in enumerate(self.parts):
            given = torch.as_tensor(gradient[3 * index : 3 * index + 3].copy())
            part.grad = None if index in without else given
        self.opt.step()
        return self.weights()


class KerasRank:
    """The same in Keras."""

    graph = False

    def __init__(self, lr: float, momentum: float, nesterov: bool, **options: Any) -> None:
        self.parts = [keras.Variable(np.zeros(3), dtype="float64", name=f"x{index}") for index in range(2)]
        sgd = keras.optimizers.SGD(lr, momentum=momentum, nesterov=nesterov)
        self.opt = hvd_keras.GossipOptimizer(sgd, **options)
        self.opt.build(self.parts)
        self._steps: dict[tuple[int, ...], Any] = {}

    def weights(self) -> Array:
        return flat(self.parts)

    def momenta(self) -> Array:
        return flat(self.opt.momentums)

    def set_rate(self, rate: float) -> None:
        self.opt.learning_rate = rate

    def freeze(self, index: int, frozen: bool = True) -> None:
        self.parts[index].trainable = not frozen

    def step(self, gradient: Array, without: Sequence[int] = ()) -> Array:
        key = tuple(without)

        def take(given: tf.Tensor) -> None:
            parts = tf.split(given, 2)
            self.opt.apply([None if i in key else part for i, part in enumerate(parts)], self.parts)

        if key not in self._steps:
            self._steps[key] = tf.function(take) if self.graph else take
        self._steps[key](tf.constant(gradient))
        return self.weights()


class GraphRank(KerasRank):
    """The same in graphs."""

    graph = True


bindings = pytest.mark.parametrize("rank_of", [TorchRank, KerasRank, GraphRank])
ignores_missing = pytest.mark.filterwarnings("ignore:Gradients do not exist")


def quadratics(size: int = SIZE) -> tuple[Array, Array, Array]:
    """Return each rank's curvatures and minima, and the minimum of their mean."""
    curvature = np.random.default_rng(3).uniform(0.2, 1.5, size=(size, ELEMENTS))
    centre = np.random.default_rng(5).normal(size=(size, ELEMENTS)) * 3.0
    return curvature, centre, (curvature * centre).sum(axis=0) / curvature.sum(axis=0)


def run(
    rank_of: Any,
    rate: Callable[[int, int], float],
    steps: int,
    momentum: float = 0.0,
    nesterov: bool = False,
    **options: Any,
) -> Array:
    """Train quadratics; ``rate`` by rank and step, from 0. Return the weights, shape (ranks, steps, elements)."""
    curvature, centre, _ = quadratics()

    def work(rank: int) -> list[Array]:
        one, path, x = rank_of(0.1, momentum, nesterov, **options), [], np.zeros(ELEMENTS)
        for step in range(steps):
            one.set_rate(rate(rank, step))
            x = one.step(curvature[rank] * (x - centre[rank]))
            path.append(x)
        one.opt.drain()
        return path

    return np.array(Cluster(SIZE).run(work))


# -- exact diffusion --------------------------------------------------------------------------------------------

RATES = [0.0, 0.0, *np.linspace(0.02, 0.2, 10), *[0.2] * 8, *[0.02] * 8, 0.0, 0.0, 0.0, *[0.1] * 8]
"""A warm-up from 0, a fall, a rate of 0, and a rise from it."""


def expected(rates: Sequence[float], every: int, momentum: float = 0.0, nesterov: bool = False) -> Array:
    """Exact diffusion in float64: a step takes r / R of the correction, r the rate of its update, R the largest so far.
    Keras' velocity keeps the rates of earlier steps: r is their average with weights (1 - momentum) momentum^age."""
    curvature, centre, _ = quadratics()
    (weights,) = mixing.matrices(topology.named("ring", SIZE), "uniform")
    wbar = (weights + np.eye(SIZE)) / 2
    x, velocity, correction, path = (
        np.zeros((SIZE, ELEMENTS)),
        np.zeros((SIZE, ELEMENTS)),
        np.zeros((SIZE, ELEMENTS)),
        [],
    )
    largest, r = 0.0, rates[0]
    for step, rate in enumerate(rates, 1):
        r = momentum * r + (1.0 - momentum) * rate
        of_update = momentum * r + (1.0 - momentum) * rate if nesterov else r
        largest = max(largest, of_update)
        gradient = curvature * (x - centre)
        velocity = momentum * velocity - rate * gradient
        phi = x + (momentum * velocity - rate * gradient if nesterov else velocity)
        phi = phi + (of_update / largest if largest else 0.0) * correction / every
        x = wbar @ phi if step % every == 0 else phi
        if step % every == 0 and largest:
            correction = correction + wbar @ phi - phi
        path.append(x)
    return np.array(path).swapaxes(0, 1)


@pytest.mark.parametrize("every", [1, 3])
@bindings
def test_exact_diffusion_equals_the_reference_while_the_rate_changes(rank_of, every):
    found = run(rank_of, lambda rank, step: RATES[step], len(RATES), **EXACT, gossip_every=every)
    np.testing.assert_allclose(found, expected(RATES, every), rtol=0, atol=1e-6)


@pytest.mark.parametrize("nesterov", [False, True])
def test_exact_diffusion_with_keras_momentum_equals_the_reference(nesterov):
    found = run(GraphRank, lambda rank, step: RATES[step], len(RATES), 0.8, nesterov, **EXACT)
    np.testing.assert_allclose(found, expected(RATES, 1, 0.8, nesterov), rtol=0, atol=1e-6)


def test_a_keras_schedule_counts_with_the_step_that_it_is_of():
    """It goes by the optimizer's iterations, which the update increases."""
    curvature, centre, _ = quadratics()
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([9], [0.2, 0.02])

    def work(rank: int) -> list[Array]:
        one, path, x = GraphRank(schedule, 0.0, False, **EXACT), [], np.zeros(ELEMENTS)
        for _ in range(20):
            x = one.step(curvature[rank] * (x - centre[rank]))
            path.append(x)
        return path

    found = np.array(Cluster(SIZE).run(work))
    np.testing.assert_allclose(found, expected([0.2] * 10 + [0.02] * 10, 1), rtol=0, atol=1e-6)


def test_torchs_groups_each_have_their_own_rate():
    curvature, centre, _ = quadratics()
    second = [0.1] * 20 + [0.0] * 10 + [0.1] * (len(RATES) - 30)

    def work(rank: int) -> list[Array]:
        one, path, x = TorchRank(0.1, 0.0, False, **EXACT), [], np.zeros(ELEMENTS)
        for rates in zip(RATES, second, strict=True):
            one.set_rate(*rates)
            x = one.step(curvature[rank] * (x - centre[rank]))
            path.append(x)
        return path

    found = np.array(Cluster(SIZE).run(work))
    np.testing.assert_allclose(found[..., :3], expected(RATES, 1)[..., :3], rtol=0, atol=1e-9)
    np.testing.assert_allclose(found[..., 3:], expected(second, 1)[..., 3:], rtol=0, atol=1e-9)


@pytest.mark.parametrize("factor", [0.1, 0.01])
@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize(("rank_of", "nesterov"), [(TorchRank, False), (GraphRank, False), (GraphRank, True)])
def test_a_fall_of_the_rate_does_not_drive_ranks_apart(rank_of, nesterov, every, factor):
    """And a rise back to what it was does not, either."""
    _, _, best = quadratics()

    def rate(rank: int, step: int) -> float:
        return 0.05 * (factor if 200 <= step < 260 else 1.0)

    found = run(rank_of, rate, 320, 0.9, nesterov, **EXACT, gossip_every=every)
    far = np.linalg.norm(found - best, axis=2).max(axis=0)
    before, start = far[180:200].max(), np.linalg.norm(best)
    assert far[200:].max() <= max(1.5 * before, 0.02 * start)


def test_ranks_whose_rates_fall_at_different_steps_still_find_the_minimum():
    """A ReduceLROnPlateau on each rank does that: the correction of an edge is the same at both ends."""
    _, _, best = quadratics()
    found = run(TorchRank, lambda rank, step: 0.3 if step < 60 + 15 * rank else 0.1, 400, **EXACT)
    np.testing.assert_allclose(found[:, -1], np.tile(best, (SIZE, 1)), rtol=0, atol=1e-6)


@pytest.mark.parametrize("rank_of", [TorchRank, KerasRank])
def test_a_cut_keeps_the_rates(rank_of):
    """Bit by bit; the fall is before the cut."""
    curvature, centre, _ = quadratics()
    saved: list[Any] = [None] * SIZE

    def work(rank: int, resumes: bool) -> list[bytes]:
        one, path = rank_of(0.1, 0.5, False, **EXACT), []
        if resumes:
            state, weights = saved[rank]
            for part, own in zip(one.parts, np.split(weights, 2), strict=True):
                part.data.copy_(torch.as_tensor(own)) if rank_of is TorchRank else part.assign(own)
            one.opt.load_state_dict(state) if rank_of is TorchRank else one.opt.set_state(state)
        x = one.weights()
        for step in range(12 if resumes else 0, 20):
            one.set_rate(0.2 if step < 10 else 0.02)
            if step == 12 and not resumes:
                one.opt.cut()
                state = one.opt.state_dict() if rank_of is TorchRank else one.opt.get_state()
                saved[rank] = copy.deepcopy(state), one.weights()
            x = one.step(curvature[rank] * (x - centre[rank]))
            path.append(x.tobytes())
        return path

    whole = Cluster(SIZE).run(lambda rank: work(rank, False))
    assert [path[12:] for path in whole] == Cluster(SIZE).run(lambda rank: work(rank, True))


# -- quasi-global momentum ----------------------------------------------------------------------------------------

QUASI_GLOBAL = {"algorithm": "sgp", "topology": "complete", "quasi_global": True}


@bindings
def test_quasi_global_momentum_follows_the_rate(rank_of):
    """The correction is in units of gradients, also where the momentum is a velocity: Keras'."""
    curvature, centre, _ = quadratics()
    rates = [0.1] * 10 + [0.01] * 10 + [0.0] * 2 + [0.05] * 8
    options = QUASI_GLOBAL | {"topology": "ring"}
    found = run(rank_of, lambda rank, step: rates[step], len(rates), 0.8, **options)
    (weights,) = mixing.matrices(topology.named("ring", SIZE), "uniform")
    x, m, c = np.zeros((3, SIZE, ELEMENTS))
    held, path = 0.0, []
    for rate in rates:
        unit = 1.0 if rank_of is TorchRank else -rate
        m = 0.8 * m + unit * curvature * (x - centre)
        half = x - rate * m if rank_of is TorchRank else x + m
        x = weights @ half
        held = max(rate, SMOOTHING.memory * held)
        new = (1.0 - SMOOTHING.memory) * SMOOTHING.strength * (half - x) / held
        c = SMOOTHING.memory * c + new if rate else 0.0 * c
        m = m + unit * c
        path.append(x)
    np.testing.assert_allclose(found, np.array(path).swapaxes(0, 1), rtol=0, atol=1e-6)


@ignores_missing
@bindings
def test_the_correction_does_not_pile_up_where_a_gradient_is_missing(rank_of):
    """Rank 0 has a gradient for the second parameter in each 50th step only."""
    push = np.full(ELEMENTS, -20.0)

    def work(rank: int) -> tuple[list[Array], list[Array]]:
        one = rank_of(0.01, 0.9, False, **QUASI_GLOBAL)
        without, momenta = [], []
        for step in range(151):
            missing = rank == 0 and step % 50 != 0
            one.step(push, [1] if missing else [])
            (without if missing else momenta).append(one.momenta()[3:])
        one.opt.drain()
        return without, momenta

    unit = 1.0 if rank_of is TorchRank else 0.01
    without, momenta = Cluster(SIZE).run(work)[0]
    for start in (0, 49, 98):  # it stays as it is
        np.testing.assert_array_equal(without[start : start + 49], [without[start]] * 49)
    assert np.abs(momenta).max() <= 20.0 / (1 - 0.9) * unit


# -- frozen parameters ----------------------------------------------------------------------------------------------

OUTER = {"outer_momentum": 0.9, "average_every": 4}
DILOCO, SLOWMO = {"algorithm": "diloco", **OUTER}, {"algorithm": "slowmo", **OUTER}
NOLOCO = {"algorithm": "noloco", "outer_momentum": 0.9, "gossip_every": 2}


@ignores_missing
@pytest.mark.parametrize(
    "options",
    [DILOCO, DILOCO | {"fragments": 3, "max_staleness": 0}, DILOCO | {"compression": "int8"}, SLOWMO, NOLOCO, EXACT],
    ids=str,
)
@bindings
def test_what_is_frozen_at_a_drain_stays_and_what_is_unfrozen_later_goes_on(rank_of, options):
    if options.get("compression") and rank_of is not TorchRank:
        options = options | {"compression": hvd_keras.Compression.int8}
    elif options.get("compression"):
        options = options | {"compression": hvd_torch.Compression.int8}
    curvature, centre, best = quadratics()

    def work(rank: int) -> list[Array]:
        one, x, ends = rank_of(0.02, 0.0, False, **options), np.zeros(ELEMENTS), []
        for frozen in (False, True, True, False):
            one.freeze(1, frozen)
            for _ in range(14):
                x = one.step(curvature[rank] * (x - centre[rank]), [1] if frozen else [])
            one.opt.drain()
            x = one.weights()
            ends.append(x)
        return ends

    for first, second, third, last in Cluster(SIZE).run(work):
        np.testing.assert_allclose(second[3:], first[3:], rtol=0, atol=1e-12)
        np.testing.assert_allclose(third[3:], first[3:], rtol=0, atol=1e-12)
        assert np.abs(third[:3] - first[:3]).min() > 1e-3
        assert np.linalg.norm((last - best)[3:]) < np.linalg.norm((first - best)[3:])


@ignores_missing
@pytest.mark.parametrize("options", [EXACT, EXACT | {"gossip_every": 4}, NOLOCO], ids=str)
@bindings
def test_what_is_frozen_between_drains_is_only_mixed(rank_of, options):
    """Each rank's stays within what the ranks had, and their mean where it was."""
    curvature, centre, _ = quadratics()

    def work(rank: int) -> tuple[Array, list[Array]]:
        one, x = rank_of(0.05, 0.0, False, **options), np.zeros(ELEMENTS)
        for _ in range(12):
            x = one.step(curvature[rank] * (x - centre[rank]))
        one.freeze(1)
        return x, [one.step(np.ones(ELEMENTS), [1]) for _ in range(16)]

    outcomes = Cluster(SIZE).run(work)
    start = np.array([x for x, _ in outcomes])[:, 3:]
    path = np.array([own for _, own in outcomes])[..., 3:]
    slack = 0.0 if options is not NOLOCO else 0.05 * np.ptp(start)  # (its slow weights are behind what ranks have)
    assert (path <= start.max(axis=0) + slack + 1e-9).all()
    assert (path >= start.min(axis=0) - slack - 1e-9).all()
    np.testing.assert_allclose(path.mean(axis=0)[-1], start.mean(axis=0), rtol=0, atol=slack + 1e-6)
