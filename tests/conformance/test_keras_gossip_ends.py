"""Keras gossip: consensus, switches, epochs, what breaks a rank."""

from __future__ import annotations

import threading
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_async.tensorflow.keras as hvd
from hvd_async import mixing, topology
from hvd_async.errors import ReplicaMismatchError, WaitTimeoutError
from hvd_async.runtime.lifecycle import local_engine
from hvd_async.testing import Cluster
from tests.conformance import gossip_reference as reference
from tests.conformance.cases import CASES
from tests.conformance.keras_gossip_ranks import GossipTrainer, least_squares
from tests.conformance.keras_ranks import LOSS, batch, conv_model, flat, plain, ranks

SGD, MOMENTUM, ADAM = CASES[0], CASES[1], CASES[6]
both_modes = pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])


def apart(weights: list[Any]) -> float:
    """Root mean square distance from the mean."""
    stacked = np.stack(weights)
    return float(np.sqrt(np.mean(np.sum((stacked - stacked.mean(axis=0)) ** 2, axis=1))))


# -- consensus ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["sgp", "osgp", "dpsgd", "adpsgd"])
def test_in_consensus_the_model_is_the_average_and_afterwards_its_own(algorithm):
    problem = least_squares(3, MOMENTUM)
    graph = "star" if algorithm.endswith("sgp") else "ring"

    def train(rank: int) -> Any:
        trainer = GossipTrainer(problem, rank, algorithm=algorithm, topology=graph)
        trainer.train(4 + rank)
        distance = trainer.opt.consensus_distance()
        own, weight = trainer.weights(), trainer.opt.stats().push_sum_weight
        with trainer.opt.consensus():
            together = trainer.weights()
        after = trainer.weights()
        trainer.train(2)
        trainer.opt.drain()
        return own, weight, together, after, distance, trainer.weights()

    outcomes = Cluster(3).run(train)
    own, pushed = np.stack([one[0] for one in outcomes]), np.array([one[1] for one in outcomes])
    for rank, (_, _, together, after, distance, drained) in enumerate(outcomes):
        np.testing.assert_allclose(together, pushed @ own / 3, atol=1e-6)
        assert together.tobytes() == outcomes[0][2].tobytes()
        assert after.tobytes() == own[rank].tobytes()
        assert distance == pytest.approx(apart(list(own)), rel=1e-5)
        assert distance > 0.01
        assert drained.tobytes() == outcomes[0][5].tobytes()
    assert pushed.sum() == pytest.approx(3)


@pytest.mark.parametrize(
    ("policy", "inside", "drained"),
    [("average", [2, 2, 2], [2, 2, 2]), ("root", [1, 1, 1], [1, 1, 1]), ("local", [1, 2, 3], [1, 2, 3])],
)
def test_batch_norm_statistics_in_consensus_and_after_a_drain(policy, inside, drained):
    def train(rank: int) -> list[float]:
        model = keras.Sequential([keras.Input((2,)), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)])
        mean = model.layers[0].moving_mean
        mean.assign([1.0 + rank] * 2)
        opt = hvd.GossipOptimizer(keras.optimizers.SGD(0.1), model=model, buffers=policy)
        opt.build(model.trainable_variables)
        seen = []
        with opt.consensus():
            seen.append(float(mean[0]))
        seen.append(float(mean[0]))
        opt.apply([tf.ones(2), tf.ones(2)], model.trainable_variables)
        opt.drain()
        return [*seen, float(mean[0])]

    outcomes = Cluster(3).run(train)
    assert [list(one) for one in zip(*outcomes, strict=True)] == [inside, [1, 2, 3], drained]


# -- switches and epochs --------------------------------------------------------------------------------------


@both_modes
def test_a_switch_goes_on_from_the_average_with_the_same_optimizer_state(graph):
    problem = least_squares(4, ADAM)

    def train(rank: int) -> Any:
        trainer = GossipTrainer(problem, rank, graph, topology="ring")
        trainer.train(5)
        trainer.opt.switch(algorithm="dpsgd")
        between = trainer.weights()
        trainer.train(5)
        trainer.opt.drain()
        return between, trainer.weights(), trainer.opt.stats().steps

    first = reference.sgp(problem, mixing.matrices(topology.ring(4), "uniform"), 5)
    after = problem.after(first)
    second = reference.dpsgd(after, mixing.matrices(topology.bipartite_exponential(4), "uniform"), 5)
    for between, weights, steps in Cluster(4).run(train):
        np.testing.assert_allclose(between, first.drained(), atol=1e-5)
        np.testing.assert_allclose(weights, second.drained(), atol=1e-5)
        assert steps == 10


def test_epochs_change_peers_and_algorithm():
    problem = least_squares(4, SGD)

    def train(rank: int) -> Any:
        trainer = GossipTrainer(problem, rank, graph=True, peers={0: 1, 2: 2}, schedule={1: "allreduce", 2: "sgp"})
        for epoch in range(4):
            trainer.opt.set_epoch(epoch)
            trainer.train(3)
        trainer.opt.drain()
        return trainer.weights(), trainer.opt.stats()

    first = problem.after(reference.sgp(problem, mixing.matrices(topology.exponential(4), "uniform"), 3))
    second = first.after(reference.allreduce(first, 3))
    third = reference.sgp(second, mixing.matrices(topology.exponential(4, 2), "uniform"), 6)
    for weights, stats in Cluster(4).run(train):
        np.testing.assert_allclose(weights, third.drained(), atol=1e-5)
        assert (stats.steps, stats.messages_sent, stats.averagings) == (12, 3 + 2 * 6, 3)


def test_settings_that_cannot_be_change_nothing():
    problem = least_squares(3, SGD)

    def train(rank: int) -> Any:
        trainer = GossipTrainer(problem, rank, topology="ring")
        trainer.train(1)
        with pytest.raises(ValueError, match="take mixing='metropolis'"):
            trainer.opt.switch(algorithm="dpsgd", topology="star")
        with pytest.raises(ValueError, match=r"does not know quorum"):
            trainer.opt.switch(quorum="solo")
        with pytest.raises(ValueError, match="take 0 or more"):
            trainer.opt.set_epoch(-1)
        trainer.train(1)
        return trainer.opt._async.plan.topology.name, trainer.opt.stats().steps

    assert len(set(Cluster(3).run(train))) == 1


# -- what must fit together, and what breaks ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "options", "hint"),
    [
        (lambda rank: plain(ADAM if rank else SGD), {}, "optimizer SGD"),
        (lambda rank: plain(SGD), {"topology": ["ring", "complete"]}, "same arguments on every rank"),
        (lambda rank: plain(SGD), {"backward_passes_per_step": [1, 2]}, "1 backward passes"),
        (lambda rank: keras.optimizers.SGD(0.1, use_ema=bool(rank)), {}, "moving averages False"),
    ],
    ids=["class", "topology", "passes", "averages"],
)
def test_ranks_that_do_not_fit_are_refused_at_the_first_step(make, options, hint):
    def train(rank: int) -> None:
        own = {name: values[rank] for name, values in options.items()}
        trainer = GossipTrainer(least_squares(3, SGD), rank, make=lambda: make(rank), **own)
        trainer.train(2)

    for outcome in Cluster(2).outcomes(train):
        assert isinstance(outcome, ReplicaMismatchError)
        assert hint in str(outcome)


@both_modes
def test_different_weights_name_the_variable_and_can_be_mended(graph):
    problem = least_squares(2, SGD)

    def train(rank: int) -> bytes:
        trainer = GossipTrainer(problem, rank, graph)
        trainer.variables[1].assign([float(rank)] * 2)
        with pytest.raises(Exception, match=r"x1 \(2,\) float32") as caught:
            trainer.train(1)
        assert "hvd.broadcast_variables(model.variables, root_rank=0)" in str(caught.value)
        trainer.restart()
        trainer.train(3)
        trainer.opt.drain()
        return trainer.weights().tobytes()

    assert len(set(Cluster(2).run(train))) == 1


def test_hyperparameters_and_state_are_each_ranks_own():
    def train(rank: int) -> list[float]:
        weight = keras.Variable(0.0)
        opt = hvd.GossipOptimizer(keras.optimizers.SGD(0.5 * (rank + 1), momentum=0.5 * rank))
        for _ in range(2):
            opt.apply([tf.constant(1.0)], [weight])
        opt.drain()
        return [float(weight), float(opt.learning_rate), int(opt.iterations)]

    # a step of -1/2 and one of -1 are averaged, then one of -1/2 and one of -1 - 1/2
    assert Cluster(2).run(train) == [[-1.75, 0.5, 2], [-1.75, 1.0, 2]]


@both_modes
def test_weights_that_are_not_finite_are_not_sent(graph):
    def train(rank: int) -> None:
        trainer = GossipTrainer(least_squares(2, SGD), rank, graph)
        trainer.train(1)
        trainer._apply(*(tf.fill(v.shape, np.float32(np.nan if rank else 1.0)) for v in trainer.variables))
        trainer.opt.drain()

    outcomes = Cluster(2).outcomes(train)
    assert "NaN or infinite (x2 (2, 2) float32" in str(outcomes[1])
    assert isinstance(outcomes[0], Exception)


@both_modes
def test_a_step_that_is_broken_off_ends_this_ranks_training(graph):
    class Breaking(keras.optimizers.SGD):
        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            tf.debugging.assert_less(gradient, 5.0)
            super().update_step(gradient, variable, learning_rate)

    def train(rank: int) -> None:
        weight = keras.Variable(0.0)
        opt = hvd.GossipOptimizer(Breaking(0.1))
        opt.build([weight])

        def step(gradient: tf.Tensor) -> None:
            opt.apply([gradient], [weight])

        apply = tf.function(step) if graph else step
        apply(tf.constant(1.0))
        with pytest.raises(tf.errors.InvalidArgumentError):
            apply(tf.constant(7.0))
        for call in (opt.drain, lambda: apply(tf.constant(1.0)), opt.cut):
            with pytest.raises(Exception, match=r"(?s)broken off.*restart from a checkpoint"):
                call()

    assert Cluster(1).run(train) == [None]


def test_a_rank_with_no_batch_only_drains():
    def train(rank: int) -> Any:
        model = conv_model()
        opt = hvd.GossipOptimizer(keras.optimizers.SGD(0.1), model=model)
        if rank == 0:
            model.compile(optimizer=opt, loss=LOSS, run_eagerly=True, jit_compile=False)
            model.fit(*batch(0, 0), verbose=0)
        opt.drain()
        return flat(model.trainable_variables).tobytes()

    one, other = Cluster(2).run(train)
    assert one == other


@both_modes
def test_no_step_between_a_broken_drain_and_its_repetition(graph):
    stalled = threading.Event()

    def train(rank: int) -> Any:
        engine: Any = local_engine()
        trainer = GossipTrainer(least_squares(2, SGD), rank, graph, algorithm="osgp")
        trainer.train(2)
        if rank == 0:
            engine.timeout = 0.05
            with pytest.raises(WaitTimeoutError):
                trainer.opt.drain()
            engine.timeout = float("inf")
            held = trainer.weights().tobytes()
            with pytest.raises(Exception, match="broken off: call it again before the next step"):
                trainer.train(1)
            assert trainer.weights().tobytes() == held
            stalled.set()
        assert stalled.wait(30)
        trainer.opt.drain()
        return trainer.weights().tobytes()

    one, other = Cluster(2).run(train)
    assert one == other


def test_a_process_set_gossips_and_other_ranks_step_by_themselves():
    problem = least_squares(3, SGD)

    def train(rank: int) -> Any:
        graph = topology.ring(2)
        trainer = GossipTrainer(problem, rank, process_set=ranks(0, 2), topology=graph)
        trainer.train(4)
        trainer.opt.drain()
        return trainer.weights()

    one, other, two = Cluster(3).run(train)
    assert one.tobytes() == two.tobytes()
    alone = problem.start[1]
    for step in range(1, 5):
        alone = alone - SGD.lr * problem.gradient(alone, 1, step)
    np.testing.assert_allclose(other, alone, atol=1e-5)


def test_two_optimizers_in_one_process():
    problem = least_squares(2, MOMENTUM)
    started = threading.Barrier(2)

    def train(rank: int) -> Any:
        trainers = [GossipTrainer(problem, rank, graph, algorithm=name)
                    for graph, name in ((True, "sgp"), (False, "adpsgd"))]  # fmt: skip
        started.wait(60)
        for step in range(4 + rank):
            trainers[0].train(1)
            if step % 2:
                trainers[1].train(1)
        trainers[0].opt.drain()
        return [trainer.weights().tobytes() for trainer in trainers]

    one, other = Cluster(2).run(train)
    assert one == other
