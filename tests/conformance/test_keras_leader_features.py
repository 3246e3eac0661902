"""Keras' own features where ranks follow a leader: accumulation, local variables, moving averages, constraints."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_async.tensorflow.keras as hvd
from hvd_async.errors import ReplicaStateError
from hvd_async.testing import Cluster
from tests.conformance.keras_ranks import Scalar
from tests.conformance.leader_cases import ELASTIC
from tests.conformance.leader_drive import Seen, wait_for_pulls
from tests.conformance.leader_ranks import SGD, KerasGraphRank, KerasRank
from tests.conformance.leader_reference import NEVER_OLD, Following, replay, several

both_modes = pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
both_algorithms = pytest.mark.parametrize("algorithm", ["lsgd", "easgd"])
sgd = keras.optimizers.SGD
NEVER = {"global_period": 1000, "group": 1}
"""No pulls: ranks train by themselves, until a drain."""


def scalar(optimizer: Any, graph: bool = False, start: float = 0.0, **options: Any) -> Scalar:
    """A rank that follows a leader."""
    return Scalar(hvd.LeaderOptimizer(optimizer, **options), graph, start)


def elastic(optimizer: Any, graph: bool = False, start: float = 0.0, **options: Any) -> Scalar:
    """A rank that follows a center, which moves half way to each pull's mean."""
    options = {"global_period": 1, "alpha": 0.5, "beta": 0.5} | options
    return scalar(optimizer, graph, start, algorithm="easgd", **options)


# -- what a step is -------------------------------------------------------------------------------------------


def test_double_precision_is_pulled_in_double_precision():
    """Rank 1 leads: with strength 1/2, rank 0 is in the middle between both at its next step."""
    third = 1.0 / 3.0

    def train(rank: int) -> list[float]:
        one, two = keras.Variable(0.0), keras.Variable(0.0, dtype="float64")
        opt = hvd.LeaderOptimizer(sgd(1.0), group=2, local_period=1, global_period=1, local_pull=0.0, global_pull=0.5)
        opt.build([one, two])
        opt._async.worker_now()
        step = tf.function(opt.apply)
        for number in range(2):
            opt.record_loss(2.0 - rank)
            step([tf.constant(1.0 + rank) * (1 - number), tf.constant(third * (1 + rank) * (1 - number), tf.float64)])
            wait_for_pulls(opt._async.worker_now(), number + 1)
        opt.cut()
        return [float(one), float(two.numpy())]

    (one, two), other = Cluster(2).run(train)
    assert other == [-2.0, -2 * third]
    assert one == -1.5
    assert two == pytest.approx(-1.5 * third, rel=1e-15)


def test_several_steps_in_one_graph_are_pulled_in_order():
    """``steps_per_execution`` does so; the gradients depend on nothing that would order them."""
    following = Following("lsgd", several(2, 2), 1, 3, loss_window=NEVER_OLD)
    following = dataclasses.replace(following, told=lambda z, rank, step: float((step * 7 + rank * 3) % 5))
    problem = dataclasses.replace(KerasRank.least_squares(2), gradient=lambda z, rank, step: np.full(6, 1.0 + rank))

    class Several(KerasGraphRank):
        def _take(self, loss: Any, mean: Any, *gradients: tf.Tensor) -> None:
            for one in tf.unstack(loss):
                super()._take(one, mean, *gradients)

    def train(rank: int) -> tuple[Seen, Any, Any]:
        one = Several(problem, rank, following)
        seen = Seen(one)
        for first in range(0, 20, 4):
            one.take(np.full(6, 1.0 + rank), [following.told(np.empty(0), rank, first + step) for step in range(1, 5)])
        own, mean = one.weights(), one.opt.stats().mean_loss
        return seen.drain(one), own, mean

    seen, held, means = zip(*Cluster(2, jitter=0.001).run(train), strict=True)
    outcome = replay(problem, following, [own.log for own in seen])
    for rank in range(2):
        np.testing.assert_allclose(held[rank], outcome.path[rank][-1], rtol=0, atol=1e-5)
        np.testing.assert_allclose(seen[rank].drained, outcome.drained[0], rtol=0, atol=1e-5)
        assert len(outcome.path[rank]) == seen[rank].stats.steps == 20
        assert means[rank] == outcome.means[rank][-1]


@pytest.mark.parametrize(("graph", "average"), [(False, True), (True, False)], ids=["eager-mean", "graph-sum"])
def test_backward_passes_are_added_up_into_a_step(graph, average):
    """A pull's period counts steps; losses of all passes count."""

    def train(rank: int) -> list[Any]:
        passes = {"backward_passes_per_step": 2, "average_aggregated_gradients": average}
        one = scalar(sgd(1.0), graph, **NEVER, **passes)
        path = [one.step(gradient + 2 * rank, gradient + rank) for gradient in (1.0, 2.0, 4.0, 8.0)]
        mean = one.opt.stats().mean_loss
        path.append(one.step(16.0, 99.0))
        one.opt.drain()
        return [*path, one.opt.stats().steps, int(one.opt.iterations), mean, float(one.weight)]

    with pytest.warns(UserWarning, match=r"1 backward pass\(es\) short of a step of 2"):
        outcomes = Cluster(2).run(train)
    for rank, outcome in enumerate(outcomes):
        first, second = (-3.0 - 4 * rank, -15.0 - 8 * rank) if not average else (-1.5 - 2 * rank, -7.5 - 4 * rank)
        leaders = -7.5 if average else -15.0
        assert outcome == [0.0, first, first, second, second, 2, 2, 3.75 + rank, leaders]


@both_modes
def test_keras_own_accumulation_is_a_step_when_the_weights_move(graph):
    def train(rank: int) -> list[Any]:
        one, path = elastic(sgd(1.0, gradient_accumulation_steps=2), graph), []
        worker = one.opt._async.worker_now()
        for number, gradient in enumerate((1.0, 2.0, 4.0, 8.0), 1):
            path.append(one.step(gradient + 2 * rank))
            wait_for_pulls(worker, number // 2)
        one.opt.cut()
        return [*path, one.opt.stats().steps]

    # after the first step -1.5 and -3.5; halfway to the center at 0, which then is at half the mean, -1.25
    assert Cluster(2).run(train) == [[0.0, -1.5, -1.5, -6.75, 2], [0.0, -3.5, -3.5, -9.75, 2]]


@pytest.mark.parametrize("passes", [1, 2])
def test_sparse_gradients_stay_on_their_rank(passes):
    def train(rank: int) -> list[float]:
        table = keras.Variable(np.zeros((4, 1), np.float32))
        opt = hvd.LeaderOptimizer(sgd(1.0), **NEVER, backward_passes_per_step=passes)
        opt.build([table])

        @tf.function
        def step() -> None:
            slices = tf.IndexedSlices(tf.ones((2, 1)), tf.constant([rank, 3]), tf.constant([4, 1]))
            opt.apply([slices], [table])

        for _ in range(passes):
            opt.record_loss(2.0 - rank)
            step()
        own = table.numpy()[:, 0].tolist()
        opt.drain()
        return [*own, *table.numpy()[:, 0].tolist()]

    moved, leaders = -1.0 * passes, [0, -1.0 * passes, 0, -1.0 * passes]
    assert Cluster(2).run(train) == [[moved, 0.0, 0.0, moved, *leaders], [*leaders, *leaders]]


@pytest.mark.parametrize(
    ("graph", "algorithm", "scale"), [(True, "lsgd", True), (True, "easgd", False), (False, "easgd", True)]
)
def test_local_variables_are_not_pulled(graph, algorithm, scale):
    def train(rank: int) -> list[Any]:
        shared, own = keras.Variable(0.0, name="shared"), keras.Variable(float(rank), name="own")
        options = {"group": 1} if algorithm == "lsgd" else {"algorithm": "easgd", "beta": 0.5}
        opt = hvd.LeaderOptimizer(sgd(1.0, use_ema=True), global_period=1, scale_local_gradients=scale, **options)
        opt.register_local_var(own)
        opt.build([shared, own])
        opt._async.worker_now()

        def take(*gradients: tf.Tensor) -> None:
            opt.apply(gradients, [shared, own])

        step = tf.function(take) if graph else take
        opt.record_loss(1.0 + rank)
        step(tf.constant(1.0 + rank), tf.constant(2.0))
        wait_for_pulls(opt._async.worker_now(), 1)
        opt.drain()
        with pytest.raises(ReplicaStateError, match="before the first step"):
            opt.register_local_var(shared)
        averages = [float(average.numpy()) for average in opt._model_variables_moving_average]
        return [float(shared), float(own), *averages, opt.consensus_distance()]

    moved, left = 1.0 if scale else 2.0, -1.0 if algorithm == "lsgd" else -0.75  # rank 0's; half of the mean
    averaged = -1.0 if algorithm == "lsgd" else -1.5
    assert Cluster(2).run(train) == [[left, rank - moved, averaged, rank - moved, 0.0] for rank in range(2)]


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_a_variable_without_gradient_is_pulled_too():
    def train(rank: int) -> list[float]:
        used, other = keras.Variable(1.0, name="used"), keras.Variable(1.0, name="other")
        opt = hvd.LeaderOptimizer(sgd(1.0), **NEVER)
        opt.build([used, other])
        opt.record_loss(2.0 - rank)
        opt.apply([tf.constant(1.0), tf.constant(1.0) if rank == 0 else None], [used, other])
        own = float(other)
        opt.drain()
        return [own, float(used), float(other)]

    assert Cluster(2).run(train) == [[0.0, 0.0, 1.0], [1.0, 0.0, 1.0]]


@both_modes
def test_learning_rates_of_a_rank_are_its_own_only_within_a_step(graph):
    """Schedules and callbacks see, and set, those that all ranks have; so does a checkpoint."""

    def train(rank: int) -> list[float]:
        one = scalar(sgd(0.5), graph, group=1, lr_spread="power")
        opt, seen = one.opt, []
        for _ in range(3):
            seen.append(one.step(1.0, 1.0))
            opt.learning_rate.assign(opt.learning_rate * 0.5)  # as callbacks do
        opt.learning_rate = float(opt.learning_rate) * 2  # as Keras' ReduceLROnPlateau does
        opt.drain()
        rates = [opt.get_state()["learning_rate"], opt.get_config()["learning_rate"], float(opt.learning_rate)]
        return [*seen, *map(float, rates)]

    own = [-0.5, -0.75, -0.875]
    assert Cluster(2).run(train) == [[at * 2**rank for at in own] + [0.125] * 3 for rank in range(2)]


@pytest.mark.parametrize("binding", [KerasRank, KerasGraphRank])
def test_a_step_that_is_broken_off_ends_this_ranks_training(binding):
    class Breaking(keras.optimizers.SGD):
        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            tf.debugging.assert_less(gradient, 5.0)
            super().update_step(gradient, variable, learning_rate)

    def train(rank: int) -> None:
        one = binding(binding.least_squares(1, SGD), 0, ELASTIC, make=lambda variables: Breaking(0.1)).train(1)
        with pytest.raises(tf.errors.InvalidArgumentError):
            one.take(np.full(6, 7.0), 1.0)
        for call in (one.opt.drain, one.step, one.opt.cut):
            with pytest.raises((ReplicaStateError, tf.errors.OpError), match=r"(?s)broken off.*restart from a check"):
                call()

    Cluster(1).run(train)


# -- what Keras does to weights and gradients -----------------------------------------------------------------


@both_modes
def test_moving_averages_after_a_drain_are_the_leaders_or_the_mean(graph):
    def train(rank: int, make: Any, **options: Any) -> list[float]:
        one = make(sgd(1.0, use_ema=True, ema_momentum=0.5), graph, **options)
        (average,) = one.opt._model_variables_moving_average
        for gradient in (1.0, 2.0):
            one.step(gradient * (1 + rank), 2.0 - rank)
        own = float(average.numpy())
        one.opt.drain()
        agreed, left = float(average.numpy()), float(one.weight)
        steps, rounds = one.opt.stats().steps, one.opt.rounds
        one.opt.finalize_variable_values([one.weight])
        assert (one.opt.stats().steps, one.opt.rounds) == (steps, rounds)
        with one.opt.consensus():
            assert float(one.weight) == agreed
        after = one.step(1.0, 1.0)  # and training goes on from there
        one.opt.drain()
        return [own, agreed, left, float(one.opt.stats().steps), after]

    leaders = Cluster(2).run(lambda rank: train(rank, scalar, **NEVER))
    # averages: first -1, then (-1 - 3) / 2, twice that on rank 1, which leads
    assert leaders == [[-2.0, -4.0, -6.0, 3.0, -5.0], [-4.0, -4.0, -6.0, 3.0, -5.0]]
    centred = Cluster(2).run(lambda rank: train(rank, elastic, global_period=1000))
    assert centred == [[-2.0, -3.0, 0.0, 3.0, -4.0], [-4.0, -3.0, 0.0, 3.0, -4.0]]


@both_algorithms
def test_moving_averages_that_a_slower_rank_puts_in_place_later_are_where_all_go_on_from(algorithm):
    """Nobody is pulled while ranks are at different weights, and the center is the same everywhere."""
    ahead = threading.Event()

    class Late(sgd):
        def finalize_variable_values(self, var_list: Any) -> None:
            if ahead.is_set():
                time.sleep(0.3)  # the other rank would be pulled by then if anybody were
            ahead.set()
            super().finalize_variable_values(var_list)

    def train(rank: int) -> list[float]:
        options = {"group": 1, "global_pull": 0.5} if algorithm == "lsgd" else {"algorithm": "easgd", "beta": 0.5}
        one = scalar(Late(1.0, use_ema=True, ema_momentum=0.5), global_period=1, **options)
        one.opt._async.worker_now()
        for _ in range(3):
            one.step(1.0 + rank, 1.0)
        one.opt.finalize_variable_values([one.weight])
        for _ in range(4):
            one.step(1.0 + rank, 1.0)
        one.opt.drain()
        return [float(one.weight), one.opt.stats().steps]

    one, other = Cluster(2).run(train)
    assert one == other
    assert one[1] == 7


def test_moving_averages_that_overwrite_the_model_constraints_and_clipping():
    def train(rank: int) -> list[float]:
        one = scalar(sgd(1.0, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2), True, **NEVER)
        path = [one.step(1.0 + rank, 1.0) for _ in range(3)]
        bound = scalar(sgd(1.0), True, start=1.0, **NEVER)
        bound.weight.constraint = lambda value: tf.clip_by_value(value, -2.0, 2.0)
        path += [bound.step(-5.0, 1.0) for _ in range(2)]
        assert bound.weight.constraint(tf.constant(3.0)) == 2.0
        return [*path, scalar(sgd(1.0, clipnorm=0.5), True, **NEVER).step(-3.0 - rank, 1.0)]

    assert Cluster(2).run(train) == [[-1.0 * f, -1.5 * f, -2.5 * f, 2.0, 2.0, 0.5] for f in (1, 2)]


def test_two_optimizers_in_one_process():
    """Each with its leader: the one's is rank 0, the other's rank 1."""

    def train(rank: int) -> list[float]:
        first, second = scalar(sgd(1.0), True, **NEVER), scalar(sgd(1.0), **NEVER)
        for number in range(3 + rank):
            first.step(1.0 + rank, 1.0 + rank)
            if number % 2:
                second.step(1.0 + rank, 1.0 - rank)
        first.opt.drain()
        return [float(first.weight), float(second.weight)]

    assert Cluster(2).run(train) == [[-3.0, -4.0]] * 2
