"""Keras' own features where ranks have weights of their own: accumulation, moving averages, loss scaling, ``fit()``."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_async.tensorflow.keras as hvd
from hvd_async.errors import ReplicaStateError
from hvd_async.runtime.lifecycle import local_engine
from hvd_async.testing import Cluster
from tests.conformance.keras_ranks import Scalar, Watch, compiled, conv_model, data, flat
from tests.conformance.leader_drive import wait_for_pulls

each_algorithm = pytest.mark.parametrize("algorithm", ["lsgd", "easgd"])
sgd, leader = keras.optimizers.SGD, hvd.LeaderOptimizer
NEVER = {"group": 1, "global_period": 1000}
"""No pulls: ranks train separately, until a drain."""


def wrapped(kind: str, optimizer: Any, **options: Any) -> Any:
    """Return the optimizer of a rank that gossips, follows a leader and is not pulled, or shares gradients."""
    wrap, own = {
        "gossip": (hvd.GossipOptimizer, {}),
        "leader": (leader, NEVER),
        "eager": (hvd.EagerOptimizer, {"quorum": "all"}),
    }[kind]
    return wrap(optimizer, **own, **options)


def scalar(optimizer: Any, graph: bool = False, start: float = 0.0, **options: Any) -> Scalar:
    """A rank that gossips."""
    return Scalar(hvd.GossipOptimizer(optimizer, **options), graph, start)


def step(one: Scalar, kind: str, gradient: float) -> float:
    """A step; return the weight after it."""
    return one.step(gradient, 1.0 if kind == "leader" else None)


# -- what a step is -------------------------------------------------------------------------------------------


def test_several_steps_in_one_graph_are_mixed_in_order():
    """``steps_per_execution`` makes such graphs; the gradients depend on nothing that would order them."""

    def train(rank: int) -> float:
        several, one = (scalar(sgd(1.0, momentum=0.5), topology="star") for _ in range(2))

        @tf.function
        def steps(gradient: tf.Tensor) -> None:
            for _ in range(4):
                several._take(gradient)

        steps(tf.constant(1.0 + rank))
        last = float(several.weight.numpy())
        one_by_one = [one.step(1.0 + rank) for _ in range(4)]
        several.opt.drain()
        assert several.opt.stats().steps == 4
        return last - one_by_one[-1]

    assert Cluster(3).run(train) == [0.0] * 3


@pytest.mark.parametrize(
    ("kind", "built", "graph", "average"),
    [
        ("gossip", "before it is wrapped", True, False),
        ("gossip", "afterwards", False, True),
        ("leader", "before it is wrapped", False, False),
        ("leader", "afterwards", True, True),
        ("eager", "before it is wrapped", False, True),
        ("eager", "afterwards", True, False),
        ("eager", "afterwards", True, True),
        ("scaled", "afterwards", True, False),
    ],
)
def test_backward_passes_are_added_up_into_a_step_that_is_traced_once(kind, built, graph, average):
    """TensorFlow traces a function twice that makes variables while it is traced, and the first step takes longer. In
    a LossScaleOptimizer, the one inside adds them up, which Keras builds by the outer one."""
    scale = 4.0 if kind == "scaled" else 1.0

    def train(rank: int) -> list[Any]:
        plain, weight = sgd(1.0, momentum=0.5), keras.Variable(0.0)
        if kind == "scaled":
            plain = keras.optimizers.LossScaleOptimizer(plain, initial_scale=scale)
        if built == "before it is wrapped":
            plain.build([weight])
        passes = {"backward_passes_per_step": 2, "average_aggregated_gradients": average}
        opt = wrapped("gossip" if kind == "scaled" else kind, plain, **passes)
        one = Scalar(opt, graph, weight=weight)
        path = [step(one, kind, scale * gradient) for gradient in (1.0, 2.0, 4.0, 8.0, 16.0)]
        assert not graph or one._apply.experimental_get_tracing_count() == 1
        opt.drain()
        return [*path, opt.stats().steps, int(opt.iterations)]

    first, second = (-1.5, -8.25) if average else (-3.0, -16.5)
    with pytest.warns(UserWarning, match=r"1 backward pass\(es\) short of a step of 2") as caught:
        assert Cluster(1).run(train) == [[0.0, first, first, second, second, 2, 2]]
    assert [one.filename for one in caught] == [__file__]


def test_a_variable_without_gradients_in_any_pass_does_not_move():
    """Decay would move it, were its gradients added up to zero."""

    def train(rank: int) -> list[float]:
        moved, still = keras.Variable(1.0), keras.Variable(1.0)
        opt = hvd.GossipOptimizer(sgd(1.0, weight_decay=0.5), backward_passes_per_step=2)
        opt.build([moved, still])
        step = tf.function(lambda: opt.apply([tf.constant(0.0), None], [moved, still]))
        for _ in range(4):
            step()
        opt.drain()
        return [float(moved), float(still)]

    with pytest.warns(UserWarning, match="Gradients do not exist"):
        assert Cluster(1).run(train) == [[0.25, 1.0]]


@pytest.mark.parametrize(("kind", "graph"), [("gossip", False), ("gossip", True), ("leader", True)])
def test_keras_own_accumulation_is_a_step_when_the_weights_move(kind, graph):
    def train(rank: int) -> list[Any]:
        one = Scalar(wrapped(kind, sgd(1.0, gradient_accumulation_steps=2)), graph)
        path = [step(one, kind, gradient + 2 * rank) for gradient in (1.0, 2.0, 4.0, 8.0)]
        one.opt.drain()
        return [*path, one.opt.stats().steps]

    if kind == "gossip":
        assert Cluster(2).run(train) == [[0.0, -2.5, -2.5, -9.5, 2]] * 2
    else:
        assert Cluster(1).run(train) == [[0.0, -1.5, -1.5, -7.5, 2]]


@pytest.mark.parametrize("passes", [1, 2])
def test_sparse_gradients_stay_on_their_rank(passes):
    def train(rank: int) -> list[Any]:
        table = keras.Variable(np.zeros((4, 1), np.float32))
        opt = hvd.GossipOptimizer(sgd(1.0), backward_passes_per_step=passes)
        opt.build([table])

        @tf.function
        def step() -> None:
            slices = tf.IndexedSlices(tf.ones((2, 1)), tf.constant([rank, 3]), tf.constant([4, 1]))
            opt.apply([slices], [table])

        for _ in range(passes):
            step()
        opt.drain()
        return table.numpy()[:, 0].tolist()

    assert Cluster(2).run(train) == [[-0.5 * passes, -0.5 * passes, 0.0, -1.0 * passes]] * 2


@pytest.mark.parametrize(
    ("wrap", "options", "graph", "scale", "shared_ends"),
    [
        (hvd.GossipOptimizer, {"topology": "complete"}, False, True, -1.5),
        (hvd.GossipOptimizer, {"topology": "complete"}, True, False, -1.5),
        (leader, {"algorithm": "easgd", "beta": 0.5, "global_period": 1}, True, False, -0.75),
    ],
    ids=["gossip-eager", "gossip-graph", "easgd-graph"],
)
def test_local_variables_are_not_mixed(wrap, options, graph, scale, shared_ends):
    def train(rank: int) -> list[Any]:
        shared, own = keras.Variable(0.0, name="shared"), keras.Variable(float(rank), name="own")
        opt = wrap(sgd(1.0, use_ema=True), scale_local_gradients=scale, **options)
        opt.register_local_var(own)
        opt.build([shared, own])
        worker = opt._async.worker_now()

        def take(*gradients: tf.Tensor) -> None:
            opt.apply(gradients, [shared, own])

        step = tf.function(take) if graph else take
        step(tf.constant(1.0 + rank), tf.constant(2.0))
        if wrap is leader:
            wait_for_pulls(worker, 1)
        opt.drain()
        with pytest.raises(ReplicaStateError, match="before the first step"):
            opt.register_local_var(shared)
        averages = [float(average.numpy()) for average in opt._model_variables_moving_average]
        return [float(shared), float(own), *averages, opt.consensus_distance()]

    moved = 1.0 if scale else 2.0
    expected = [[shared_ends, rank - moved, -1.5, rank - moved, 0.0] for rank in range(2)]
    assert Cluster(2).run(train) == expected


def test_hyperparameters_and_state_are_each_ranks_own():
    def train(rank: int) -> list[float]:
        one = scalar(sgd(0.5 * (rank + 1), momentum=0.5 * rank))
        for _ in range(2):
            one.step(1.0)
        one.opt.drain()
        return [float(one.weight), float(one.opt.learning_rate), int(one.opt.iterations)]

    # a step of -1/2 and one of -1 are averaged, then one of -1/2 and one of -1 - 1/2
    assert Cluster(2).run(train) == [[-1.75, 0.5, 2], [-1.75, 1.0, 2]]


def test_learning_rates_of_a_leaders_rank_are_its_own_only_within_a_step():
    """Schedules and callbacks see, and set, the ones that all ranks have; so does a checkpoint."""

    def train(rank: int) -> list[float]:
        one = Scalar(leader(sgd(0.5), group=1, lr_spread="power"), graph=True)
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


@pytest.mark.parametrize(("kind", "graph"), [("gossip", False), ("gossip", True), ("leader", True)])
def test_a_step_that_is_broken_off_ends_this_ranks_training(kind, graph):
    """An op of the step itself fails: in a graph no Python of this library sees it."""

    class Breaking(sgd):
        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            tf.debugging.assert_less(gradient, 5.0)
            super().update_step(gradient, variable, learning_rate)

    def train(rank: int) -> None:
        one = Scalar(wrapped(kind, Breaking(0.1)), graph)
        step(one, kind, 1.0)
        with pytest.raises(tf.errors.InvalidArgumentError):
            step(one, kind, 7.0)
        for call in (one.opt.drain, lambda: step(one, kind, 1.0), one.opt.cut):
            with pytest.raises(Exception, match=r"(?s)broken off.*restart from a checkpoint"):
                call()

    assert Cluster(1).run(train) == [None]


# -- moving averages --------------------------------------------------------------------------------------------


def test_moving_averages_are_of_the_model_and_agree_after_a_drain():
    """On a star the wrapped optimizer works on weights times 3/2 or 3/4: what it averages is what the model holds."""

    def train(rank: int) -> Any:
        one = scalar(sgd(0.0, use_ema=True, ema_momentum=0.5), True, start=4.0, topology="star")
        (average,) = one.opt._model_variables_moving_average
        seen = []
        for _ in range(3):
            one.step(0.0)
            seen.append(float(average.numpy()))
        weight = one.opt.stats().push_sum_weight
        one.opt.learning_rate = 1.0
        one.step(float(rank))
        one.opt.drain()
        agreed = float(average.numpy())
        one.opt.finalize_variable_values([one.weight])
        return seen, weight, agreed, float(one.weight.numpy())

    outcomes = Cluster(3).run(train)
    assert {weight for _, weight, _, _ in outcomes} != {1.0}
    for seen, _, agreed, final in outcomes:
        assert seen == pytest.approx([4.0, 4.0, 4.0])
        assert agreed == final == outcomes[0][2] != 4.0


@pytest.mark.parametrize(
    ("options", "agreed", "left", "after"),
    [(NEVER, -4.0, -6.0, -5.0), ({"algorithm": "easgd", "beta": 0.5, "global_period": 1000}, -3.0, 0.0, -4.0)],
    ids=["leader", "center"],
)
def test_moving_averages_after_a_drain_are_the_leaders_or_the_mean(options, agreed, left, after):
    def train(rank: int) -> list[float]:
        one = Scalar(leader(sgd(1.0, use_ema=True, ema_momentum=0.5), **options), graph=True)
        (average,) = one.opt._model_variables_moving_average
        for gradient in (1.0, 2.0):
            one.step(gradient * (1 + rank), 2.0 - rank)
        own = float(average.numpy())
        one.opt.drain()
        ends = [own, float(average.numpy()), float(one.weight)]
        steps, rounds = one.opt.stats().steps, one.opt.rounds
        one.opt.finalize_variable_values([one.weight])
        assert (one.opt.stats().steps, one.opt.rounds) == (steps, rounds)
        with one.opt.consensus():
            assert float(one.weight) == ends[1]
        continued = one.step(1.0, 1.0)
        one.opt.drain()
        return [*ends, continued]

    # averages: first -1, then (-1 - 3) / 2, twice that on rank 1, which leads
    assert Cluster(2).run(train) == [[own, agreed, left, after] for own in (-2.0, -4.0)]


@each_algorithm
def test_moving_averages_that_a_slower_rank_puts_in_place_later_are_where_all_continue_from(algorithm):
    """No rank is pulled while ranks are at different weights, and the center is the same everywhere. Rank 1 puts its
    averages in place when rank 0, which has done so, waits for it: rank 0 would have been pulled by then."""
    ahead, engines = threading.Event(), list[Any]()

    class Late(sgd):
        def finalize_variable_values(self, var_list: Any) -> None:
            late = local_engine() is not engines[0]
            if late:
                assert ahead.wait(60.0)
                deadline = time.monotonic() + 60.0
                while not engines[0]._waits and time.monotonic() < deadline:
                    time.sleep(0.001)
            super().finalize_variable_values(var_list)
            if not late:
                ahead.set()

    def train(rank: int) -> list[float]:
        options = {"group": 1, "global_pull": 0.5} if algorithm == "lsgd" else {"algorithm": "easgd", "beta": 0.5}
        one = Scalar(leader(Late(1.0, use_ema=True, ema_momentum=0.5), global_period=1, **options))
        engines.insert(rank, one.opt._async.worker_now().engine)
        for steps in (3, 4):
            for _ in range(steps):
                one.step(1.0 + rank, 1.0)
            if steps == 3:
                one.opt.finalize_variable_values([one.weight])
        one.opt.drain()
        return [float(one.weight), one.opt.stats().steps]

    one, other = Cluster(2).run(train)
    assert one == other
    assert one[1] == 7


# -- loss scaling ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("outside", "graph"), [(False, True), (True, False)], ids=["inside", "outside"])
def test_a_step_that_overflows_is_none(graph, outside):
    def train(rank: int) -> Any:
        if outside:
            opt = keras.optimizers.LossScaleOptimizer(hvd.GossipOptimizer(sgd(1.0)), initial_scale=16.0)
            ours = opt.inner_optimizer
        else:
            opt = ours = hvd.GossipOptimizer(keras.optimizers.LossScaleOptimizer(sgd(1.0), initial_scale=16.0))
            assert isinstance(opt, keras.optimizers.LossScaleOptimizer)
        one = Scalar(opt, graph)
        for number in range(3):
            spoilt = rank == 1 and number == 1
            one.step(np.inf if spoilt else (1.0 + rank) * float(opt.scale_loss(1.0)))
        ours.drain()
        state = None if outside else float(opt.get_state()["dynamic_scale"])
        return float(one.weight), ours.stats().steps, float(opt.dynamic_scale.numpy()), state

    (one, *first), (other, *second) = Cluster(2).run(train)
    assert one == other
    assert first == [3, 16.0, None if outside else 16.0]
    assert second == [2, 8.0, None if outside else 8.0]


# -- fit() ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("validates", "drain"), [("all", False), ("one", True)])
def test_evaluation_in_fit_sees_the_average(drain, validates):
    """Also where one rank alone evaluates, and with callbacks that all have the ranks meet."""

    def train(rank: int) -> Any:
        opt = hvd.GossipOptimizer(sgd(0.1), topology="star", peers={0: 1}, schedule={1: "allreduce", 2: "sgp"})
        model, watch, (images, labels) = compiled(opt), Watch(), data(rank, 2 + rank)
        schedule = hvd.callbacks.LearningRateScheduleCallback(0.1, 1.0)
        callbacks = [schedule, hvd.callbacks.GossipEpochCallback(drain=drain), watch]
        held_out = (images[:4], labels[:4]) if validates == "all" or rank == 1 else None
        model.fit(images, labels, batch_size=4, epochs=3, verbose=0, callbacks=callbacks, validation_data=held_out)
        return watch.evaluated, watch.ended, flat(model.weights), opt.stats().averagings

    outcomes = Cluster(3).run(train)
    evaluated = [one[0] for one in outcomes if one[0]]
    assert len(evaluated) == (3 if validates == "all" else 1)
    for seen, ended, final, _ in outcomes:
        assert [one.tobytes() for one in seen] in ([], [one.tobytes() for one in evaluated[0]])
        assert final.tobytes() == outcomes[0][2].tobytes()
        same = [one.tobytes() == other.tobytes() for one, other in zip(ended, outcomes[0][1], strict=True)]
        assert all(same) or not drain
    if not drain:
        assert outcomes[0][1][0].tobytes() != outcomes[1][1][0].tobytes()
    assert [one[3] for one in outcomes] == [2, 3, 4]


@pytest.mark.parametrize("drain", [False, True])
def test_evaluation_in_fit_sees_the_leader_and_own_weights_come_back(drain):
    """Rank 1 leads always, with a loop of its own; rank 0 fits. Several callbacks have the ranks meet, once."""

    def fits() -> tuple[Any, ...]:
        opt = leader(sgd(0.1), **NEVER)
        model, watch, (images, labels) = compiled(opt), Watch(), data(0, 3)
        meet = [hvd.callbacks.LearningRateScheduleCallback(0.1, 1.0), hvd.callbacks.GossipEpochCallback(drain=drain)]
        held_out, callbacks = (images[:4], labels[:4]), [*meet, watch]
        model.fit(images, labels, batch_size=4, epochs=2, verbose=0, validation_data=held_out, callbacks=callbacks)
        return watch.evaluated, watch.ended, flat(model.weights), opt.stats().steps

    def leads() -> tuple[Any, ...]:
        model = conv_model()
        opt, seen = leader(sgd(0.1), **NEVER, model=model), []
        for _ in range(2):
            opt.record_loss(-1.0)
            opt.apply([tf.ones(v.shape) for v in model.trainable_variables], model.trainable_variables)
            seen.append(flat(model.weights))
            if drain:
                opt.drain()
            with contextlib.nullcontext() if drain else opt.consensus():  # where the other rank evaluates
                assert flat(model.weights).tobytes() == seen[-1].tobytes()
        opt.drain()
        return seen, [], flat(model.weights), opt.stats().steps

    (evaluated, ended, final, steps), (led, _, other, _) = Cluster(2).run(lambda rank: leads() if rank else fits())
    assert [one.tobytes() for one in evaluated] == [one.tobytes() for one in led]
    assert [one.tobytes() == best.tobytes() for one, best in zip(ended, led, strict=True)] == [drain] * 2
    assert final.tobytes() == other.tobytes() == led[-1].tobytes()
    assert steps == 6


@each_algorithm
def test_fit_again_with_moving_averages_and_batch_norm(algorithm):
    """Both ranks, which have 3 batches and 5, have the same weights in place at the end of each ``fit()``."""
    options = {"group": 2, "local_period": 1} if algorithm == "lsgd" else {"algorithm": "easgd"}

    def train(rank: int) -> list[Any]:
        layers = [keras.Input((5, 5, 1)), keras.layers.Flatten(), keras.layers.BatchNormalization(name="norm")]
        model = keras.Sequential([*layers, keras.layers.Dense(3, name="dense")])
        model.set_weights([np.full(w.shape, 0.5, np.float32) for w in model.get_weights()])
        opt = leader(sgd(0.1, use_ema=True, ema_momentum=0.5), global_period=1, model=model, **options)
        compiled(opt, model)
        ends = []
        for _ in range(3):
            callbacks = [hvd.callbacks.GossipEpochCallback()]
            model.fit(*data(rank, 3 + 2 * rank), batch_size=4, verbose=0, callbacks=callbacks)
            ends.append(flat(model.weights).tobytes())
        return ends

    one, other = Cluster(2).run(train)
    assert one == other
    assert len(set(one)) == 3
