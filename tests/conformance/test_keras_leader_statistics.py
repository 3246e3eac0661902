"""Keras: batch-norm statistics are averaged by pulls, and fit what stands for all ranks that follow."""

from __future__ import annotations

import threading
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_async.tensorflow.keras as hvd
from hvd_async.algorithms.leader.worker import LeaderWorker
from hvd_async.testing import Cluster
from tests.conformance.leader_drive import TIMEOUT, wait_for_pulls

both_modes = pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
both_algorithms = pytest.mark.parametrize("algorithm", ["lsgd", "easgd"])
sgd = keras.optimizers.SGD
NAN = float("nan")


def options(algorithm: str, period: int) -> dict[str, Any]:
    """No pulls of groups."""
    return {"algorithm": algorithm, "global_period": period} | ({"group": 1} if algorithm == "lsgd" else {})


class Normed:
    """A rank with batch norm over two features; its statistics are given.

    Args:
        rank: its weights move by as much in a step, and it leads in lsgd if it is the last.
        settings: of ``LeaderOptimizer``.
    """

    def __init__(self, rank: int, graph: bool = False, optimizer: Any = None, **settings: Any) -> None:
        self.rank = rank
        layers = [keras.Input((2,)), keras.layers.BatchNormalization(name="norm"), keras.layers.Dropout(0.5)]
        self.model = keras.Sequential([*layers, keras.layers.Dense(1, name="dense")])
        self.model.set_weights([np.ones(v.shape, v.dtype) for v in self.model.weights])
        self.mean, self.variance = (getattr(self.model.layers[0], f"moving_{name}") for name in ("mean", "variance"))
        self.variance.assign([10.0, 10.0])
        self.opt = hvd.LeaderOptimizer(sgd(1.0) if optimizer is None else optimizer, **{"model": self.model} | settings)
        self.opt.build(self.model.trainable_variables)
        self._apply = tf.function(self._take) if graph else self._take

    def _take(self, mean: tf.Tensor) -> None:
        self.mean.assign(mean)  # as a forward pass does
        self.variance.assign(10.0 * mean)
        variables = self.model.trainable_variables
        self.opt.apply([tf.fill(v.shape, float(self.rank)) for v in variables], variables)

    def step(self, mean: float) -> list[float]:
        """The mean that is held afterwards; the variance is ten times as much."""
        self.opt.record_loss(-self.rank)
        self._apply(tf.fill([2], np.float32(mean)))
        return self.held()

    def held(self) -> list[float]:
        """The statistics' mean, twice."""
        np.testing.assert_allclose(self.variance.numpy(), 10.0 * self.mean.numpy(), rtol=1e-6)
        return [float(value) for value in self.mean.numpy()]

    def worker(self) -> LeaderWorker:
        """The optimizer's."""
        worker: LeaderWorker = self.opt._async.worker_now()
        return worker


# -- pulls ----------------------------------------------------------------------------------------------------


@both_modes
@both_algorithms
def test_statistics_are_averaged_at_pulls(algorithm, graph):
    """Those that the ranks had when the pull was sent; the next step of each goes on with them. Others are its own."""

    def train(rank: int) -> list[list[float]]:
        one, path = Normed(rank, graph, **options(algorithm, 2)), []
        worker = one.worker()
        for step, mean in enumerate((1.0, 2.0, 3.0, 4.0, 5.0), 1):
            path.append(one.step(mean * 10**rank))
            wait_for_pulls(worker, step // 2)
        return path

    for rank, path in enumerate(Cluster(3).run(train)):
        # (with what a rank has learned since, but not beyond its own)
        third, fifth = (2.0 * 37 + 100.0, 4.0 * 37 + 100.0) if rank == 2 else (2.0 * 37, 4.0 * 37)
        expected = [1.0 * 10**rank, 2.0 * 10**rank, third, 4.0 * 10**rank, fifth]
        np.testing.assert_allclose(path, [[mean, mean] for mean in expected], rtol=1e-6)


@both_modes
@both_algorithms
def test_statistics_that_are_not_finite_are_left_out(algorithm, graph):
    """Of a rank whose batch held NaN; where no rank's are finite each keeps its own."""

    def train(rank: int) -> list[list[float]]:
        one, path = Normed(rank, graph, **options(algorithm, 1)), []
        worker = one.worker()
        for step, means in enumerate([(1.0, NAN, 4.0), (2.0, 3.0, NAN), (NAN, NAN, NAN), (7.0, 8.0, 9.0)], 1):
            path.append(one.step(means[rank]))
            wait_for_pulls(worker, step)
        one.opt.cut()
        return path

    for rank, path in enumerate(Cluster(3).run(train)):
        # in the second step all go on with (1 + 4) / 2, which is what they send then too
        expected = [(1.0, NAN, 4.0)[rank], 2.5, 2.5, (7.0, 8.0, 9.0)[rank]]
        np.testing.assert_allclose(path, [[mean, mean] for mean in expected], rtol=1e-6)


@both_modes
@both_algorithms
@pytest.mark.parametrize("given", ["by a callback", "to the optimizer"])
def test_a_rank_that_has_not_stepped_when_a_pull_comes_holds_nobody(algorithm, graph, given):
    """Its statistics travel from the meeting on, as the others' do."""
    met = threading.Barrier(2)

    def train(rank: int) -> list[float]:
        model = {} if given == "to the optimizer" else {"model": None}
        one = Normed(rank, graph, **options(algorithm, 1), **model)
        if model:
            callback = hvd.callbacks.GossipEpochCallback()
            one.model.compile(optimizer=one.opt, jit_compile=False)
            callback.set_model(one.model)
            callback.on_train_begin()
        worker = one.worker()
        met.wait(TIMEOUT)
        if rank == 0:
            for _ in range(2):
                one.step(5.0)
        wait_for_pulls(worker, 1)
        return one.step(1.0 if rank else 5.0)  # (it learns nothing new)

    for held in Cluster(2).run(train, timeout=40):
        assert held == [3.0, 3.0]  # of 5, and of 1 at the start


@both_modes
def test_ranks_of_which_one_has_no_batch_agree_after_a_drain(graph):
    def train(rank: int) -> tuple[list[float], list[Any]]:
        one = Normed(rank, graph, **options("lsgd", 1))
        for mean in (1.0, 2.0, 6.0)[: 3 * rank]:
            one.step(mean)
        one.opt.drain()
        return one.held(), [weight.numpy().tolist() for weight in one.model.trainable_variables]

    one, other = Cluster(2).run(train)
    assert one == other


# -- what stands for all ranks --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "buffers", "expected"),
    [
        ("lsgd", "average", [2.0, 2.0, 2.0]),
        ("easgd", "average", [2.0, 2.0, 2.0]),
        ("lsgd", "local", [3.0, 3.0, 3.0]),
        ("easgd", "local", [1.0, 2.0, 3.0]),
    ],
)
def test_in_consensus_and_after_a_drain_statistics_fit_the_weights(algorithm, buffers, expected):
    """Averaged or, with a leader, its own; after consensus() each rank has its own again."""

    def train(rank: int) -> list[float]:
        one = Normed(rank, **options(algorithm, 100), buffers=buffers)
        one.step(1.0 + rank)
        with one.opt.consensus():
            seen = [one.held()[0]]
        seen.append(one.held()[0])
        one.opt.drain()
        return [*seen, one.held()[0]]

    inside, after, drained = zip(*Cluster(3).run(train), strict=True)
    assert list(after) == [1.0, 2.0, 3.0]
    assert list(inside) == list(drained) == expected


@both_algorithms
def test_local_statistics_are_not_averaged_by_pulls(algorithm):
    def train(rank: int) -> list[list[float]]:
        one, path = Normed(rank, **options(algorithm, 1), buffers="local"), []
        worker = one.worker()
        for step in (1, 2, 3):
            path.append(one.step(step + 10.0 * rank))
            wait_for_pulls(worker, step)
        return path

    assert Cluster(2).run(train) == [[[s + 10.0 * rank] * 2 for s in (1, 2, 3)] for rank in range(2)]


@both_algorithms
def test_pulls_after_an_end_average_what_is_held_by_then(algorithm):
    """A rank that has not stepped since gives what the end has left it; what was on its way before a cut comes."""
    together = threading.Barrier(2)

    def train(rank: int) -> list[float]:
        one, seen = Normed(rank, **options(algorithm, 1)), []
        for number, end in enumerate((one.opt.drain, one.opt.cut), 1):
            worker = one.worker()
            together.wait(TIMEOUT)
            if rank == 0:
                for _ in range(2):
                    one.step(10.0 * number)
            wait_for_pulls(worker, number)
            together.wait(TIMEOUT)
            end()
            seen.append(one.held()[0])
        return [*seen, one.step(5.5 if rank else 20.0)[0]]

    # of 10 and 1, twice; then of 20 and 5.5
    assert Cluster(2).run(train) == [[5.5, 20.0, 12.75], [5.5, 5.5, 12.75]]


@both_modes
def test_statistics_travel_on_where_keras_puts_moving_averages_in_place(graph):
    """At the end of ``fit()``, with ``use_ema``."""

    def train(rank: int) -> list[float]:
        one = Normed(rank, graph, sgd(0.1, use_ema=True), **options("easgd", 1))
        one.step(1.0 + rank)
        one.opt.finalize_variable_values(one.model.trainable_variables)
        before = one.opt.stats().pulls
        one.step(5.0 + 2 * rank)
        wait_for_pulls(one.worker(), before + 1)
        return one.step(5.0 + 2 * rank)

    assert Cluster(2).run(train) == [[6.0, 6.0]] * 2


def test_weights_of_frozen_layers_are_no_statistics():
    """They would travel with every pull, though they never move."""

    def train(rank: int) -> int:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.BatchNormalization(),
                                  keras.layers.Dense(1)])  # fmt: skip
        model.layers[0].trainable = False
        opt = hvd.LeaderOptimizer(sgd(0.1), model=model, group=1)
        opt.build(model.trainable_variables)
        opt.drain()
        elements: int = opt._async.replica.averaged.elements
        return elements

    assert Cluster(1).run(train) == [16]
