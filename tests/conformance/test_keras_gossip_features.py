"""Keras' own features under gossip: accumulation, moving averages, constraints, loss scaling, callbacks, saving."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_async.tensorflow.keras as hvd
from hvd_async.errors import ReplicaStateError
from hvd_async.testing import Cluster
from tests.conformance.drive import scripted_engine
from tests.conformance.gossip_ranks import alike
from tests.conformance.keras_ranks import LOSS, Scalar, Watch, batch, conv_model, flat

both_modes = pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
sgd = keras.optimizers.SGD


def scalar(optimizer: Any, graph: bool = False, start: float = 0.0, **options: Any) -> Scalar:
    """A rank that gossips."""
    return Scalar(hvd.GossipOptimizer(optimizer, **options), graph, start)


@pytest.mark.parametrize("kind", [sgd, keras.optimizers.AdamW])
def test_the_result_is_an_instance_of_the_wrapped_class(kind):
    with scripted_engine(2):
        plain = kind(0.25, name="mine")
        wrapped, named = hvd.GossipOptimizer(plain), hvd.GossipOptimizer(plain, name="other")
    assert isinstance(wrapped, kind)
    assert (wrapped.name, named.name) == ("mine", "other")
    assert type(plain) is kind
    assert wrapped.get_config() == plain.get_config()
    assert wrapped.stats().steps == 0
    assert type(keras.optimizers.deserialize(keras.optimizers.serialize(wrapped))) is kind


def test_weights_that_cannot_be_mixed_are_refused_with_a_hint():
    with scripted_engine(2):
        opt = hvd.GossipOptimizer(sgd(0.1))
        opt.build([half := keras.Variable(0.0, dtype="bfloat16")])
        with pytest.raises(ValueError, match="'mixed_float16' and 'mixed_bfloat16'"):
            opt.apply([tf.constant(1.0, tf.bfloat16)], [half])
        opt = hvd.GossipOptimizer(sgd(0.1))
        with pytest.raises(ValueError, match=r"optimizer.build\(model.trainable_variables\)"):
            opt.drain()
        opt.build([weight := keras.Variable(0.0)])
        state = opt.get_state()
        with pytest.raises(ValueError, match="no variable has a gradient"):
            opt.apply([None], [weight])
        (other := hvd.GossipOptimizer(keras.optimizers.Adam())).build([weight])
        with pytest.raises(ValueError, match="of another optimizer"):
            other.set_state(state)
        with pytest.raises(ValueError, match="cannot compress gradients"):
            hvd.EagerOptimizer(sgd(), compression=hvd.Compression.int8)


# -- what a step is -------------------------------------------------------------------------------------------


def test_double_precision_is_mixed_in_double_precision():
    third = 1.0 / 3.0

    def train(rank: int) -> tuple[float, float]:
        one, two = keras.Variable(0.0), keras.Variable(0.0, dtype="float64")
        opt = hvd.GossipOptimizer(sgd(1.0))
        opt.build([one, two])
        tf.function(opt.apply)([tf.constant(1.0 + rank), tf.constant(third * (1 + rank), tf.float64)])
        opt.drain()
        return float(one), float(two.numpy())

    assert Cluster(2).run(train) == [(-1.5, -1.5 * third)] * 2


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


@pytest.mark.parametrize(("graph", "average"), [(False, True), (True, False)])
def test_backward_passes_are_added_up_into_a_step(graph, average):
    def train(rank: int) -> list[Any]:
        one = scalar(sgd(1.0), graph, backward_passes_per_step=2, average_aggregated_gradients=average)
        path = [one.step(gradient + 2 * rank) for gradient in (1.0, 2.0, 4.0, 8.0, 16.0)]
        one.opt.drain()
        return [*path, one.opt.stats().steps, int(one.opt.iterations)]

    with pytest.warns(UserWarning, match=r"1 backward pass\(es\) short of a step of 2"):
        outcomes = Cluster(2).run(train)
    first, second = (-2.5, -9.5) if average else (-5.0, -19.0)  # both ranks' sums (or means), averaged
    assert outcomes == [[0.0, first, first, second, second, 2, 2]] * 2


@both_modes
def test_keras_own_accumulation_mixes_when_the_weights_move(graph):
    def train(rank: int) -> list[Any]:
        one = scalar(sgd(1.0, gradient_accumulation_steps=2), graph)
        path = [one.step(gradient + 2 * rank) for gradient in (1.0, 2.0, 4.0, 8.0)]
        one.opt.drain()
        return [*path, one.opt.stats().steps]

    assert Cluster(2).run(train) == [[0.0, -2.5, -2.5, -9.5, 2]] * 2


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


@pytest.mark.parametrize(("graph", "scale"), [(False, True), (True, False)])
def test_local_variables_are_not_mixed(graph, scale):
    def train(rank: int) -> list[Any]:
        shared, own = keras.Variable(0.0, name="shared"), keras.Variable(float(rank), name="own")
        opt = hvd.GossipOptimizer(sgd(1.0, use_ema=True), topology="complete", scale_local_gradients=scale)
        opt.register_local_var(own)
        opt.build([shared, own])

        def take(*gradients: tf.Tensor) -> None:
            opt.apply(gradients, [shared, own])

        step = tf.function(take) if graph else take
        step(tf.constant(1.0 + rank), tf.constant(2.0))
        opt.drain()
        with pytest.raises(ReplicaStateError, match="before the first step"):
            opt.register_local_var(shared)
        averages = [float(average.numpy()) for average in opt._model_variables_moving_average]
        return [float(shared), float(own), *averages, opt.consensus_distance()]

    moved = 1.0 if scale else 2.0
    assert Cluster(2).run(train) == [[-1.5, rank - moved, -1.5, rank - moved, 0.0] for rank in range(2)]


def test_a_variable_without_gradient_is_mixed_too():
    def train(rank: int) -> list[float]:
        used, other = keras.Variable(1.0, name="used"), keras.Variable(1.0, name="other")
        opt = hvd.GossipOptimizer(sgd(1.0))
        opt.build([used, other])
        opt.apply([tf.constant(1.0), tf.constant(1.0) if rank == 0 else None], [used, other])
        return [float(used), float(other)]

    assert Cluster(2).run(train) == [[0.0, 0.5]] * 2


def test_hyperparameters_and_state_are_each_ranks_own():
    def train(rank: int) -> list[float]:
        weight = keras.Variable(0.0)
        opt = hvd.GossipOptimizer(sgd(0.5 * (rank + 1), momentum=0.5 * rank))
        for _ in range(2):
            opt.apply([tf.constant(1.0)], [weight])
        opt.drain()
        return [float(weight), float(opt.learning_rate), int(opt.iterations)]

    # a step of -1/2 and one of -1 are averaged, then one of -1/2 and one of -1 - 1/2
    assert Cluster(2).run(train) == [[-1.75, 0.5, 2], [-1.75, 1.0, 2]]


@both_modes
def test_a_step_that_is_broken_off_ends_this_ranks_training(graph):
    """An op of the step itself fails: in a graph no Python of ours sees it."""

    class Breaking(sgd):
        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            tf.debugging.assert_less(gradient, 5.0)
            super().update_step(gradient, variable, learning_rate)

    def train(rank: int) -> None:
        one = scalar(Breaking(0.1), graph)
        one.step(1.0)
        with pytest.raises(tf.errors.InvalidArgumentError):
            one.step(7.0)
        for call in (one.opt.drain, lambda: one.step(1.0), one.opt.cut):
            with pytest.raises(Exception, match=r"(?s)broken off.*restart from a checkpoint"):
                call()

    assert Cluster(1).run(train) == [None]


def test_a_rank_with_no_batch_only_drains():
    """Its optimizer is built by then, from the model."""

    def train(rank: int) -> bytes:
        model = conv_model()
        opt = hvd.GossipOptimizer(sgd(0.1), model=model)
        if rank == 0:
            model.compile(optimizer=opt, loss=LOSS, run_eagerly=True, jit_compile=False)
            model.fit(*batch(0, 0), verbose=0)
        opt.drain()
        return flat(model.trainable_variables).tobytes()

    alike(train, 2)


# -- weights times the push-sum weight are nobody's business --------------------------------------------------


@both_modes
def test_moving_averages_are_of_the_model_and_agree_after_a_drain(graph):
    """On a star the wrapped optimizer works on weights times 3/2 or 3/4: what it averages is what the model holds."""

    def train(rank: int) -> Any:
        one = scalar(sgd(0.0, use_ema=True, ema_momentum=0.5), graph, start=4.0, topology="star")
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


def test_moving_averages_that_overwrite_the_model():
    def train(rank: int) -> list[float]:
        optimizer = sgd(0.0, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2)
        one = scalar(optimizer, graph=True, start=4.0, topology="star")
        return [one.step(0.0) for _ in range(4)]

    assert Cluster(3).run(train) == [pytest.approx([4.0] * 4)] * 3


@both_modes
def test_constraints_are_on_the_model(graph):
    def train(rank: int) -> list[float]:
        one = scalar(sgd(1.0), graph, start=1.0, topology="star")
        one.weight.constraint = lambda value: tf.clip_by_value(value, -2.0, 2.0)
        path = [one.step(-5.0) for _ in range(3)]
        assert one.weight.constraint(tf.constant(3.0)) == 2.0
        return path

    for path in Cluster(3).run(train):
        assert path == pytest.approx([2.0] * 3, rel=1e-6)


# -- loss scaling ---------------------------------------------------------------------------------------------


@both_modes
@pytest.mark.parametrize("outside", [False, True])
def test_a_step_that_overflows_is_none(graph, outside):
    def train(rank: int) -> Any:
        weight = keras.Variable(0.0)
        if outside:
            opt = keras.optimizers.LossScaleOptimizer(hvd.GossipOptimizer(sgd(1.0)), initial_scale=16.0)
            ours = opt.inner_optimizer
        else:
            opt = ours = hvd.GossipOptimizer(keras.optimizers.LossScaleOptimizer(sgd(1.0), initial_scale=16.0))
            assert isinstance(opt, keras.optimizers.LossScaleOptimizer)
        opt.build([weight])

        def take(gradient: tf.Tensor) -> None:
            opt.apply([gradient], [weight])

        step = tf.function(take) if graph else take
        for number in range(3):
            spoilt = rank == 1 and number == 1
            step(tf.constant(np.inf if spoilt else (1.0 + rank) * float(opt.scale_loss(1.0))))
        ours.drain()
        state = None if outside else float(opt.get_state()["dynamic_scale"])
        return float(weight), ours.stats().steps, float(opt.dynamic_scale.numpy()), state

    (one, *first), (other, *second) = Cluster(2).run(train)
    assert one == other
    assert first == [3, 16.0, None if outside else 16.0]
    assert second == [2, 8.0, None if outside else 8.0]


def test_fit_in_mixed_float16():
    def train(rank: int) -> Any:
        policy = keras.DTypePolicy("mixed_float16")
        layers = [keras.Input((5, 5, 1)), keras.layers.Flatten(), keras.layers.Dense(3, dtype=policy)]
        model = keras.Sequential(layers)
        model.set_weights([np.full(w.shape, 0.1, np.float32) for w in model.get_weights()])
        model.dtype_policy = policy
        opt = hvd.GossipOptimizer(sgd(0.05))
        model.compile(optimizer=opt, loss=LOSS, jit_compile=False)
        assert model.optimizer.inner_optimizer is opt
        images, labels = batch(rank, 0)
        ends = hvd.callbacks.GossipEpochCallback()
        model.fit(images, labels, batch_size=2, epochs=2, verbose=0, callbacks=[ends])
        return flat(model.trainable_variables).tobytes(), opt.stats().steps

    assert alike(train, 2)[1] == 4


# -- fit(), its callbacks, saving -----------------------------------------------------------------------------


@pytest.mark.parametrize(("validates", "drain"), [("all", False), ("one", True)])
def test_evaluation_in_fit_sees_the_average(drain, validates):
    """Also where one rank alone evaluates, and with callbacks that all have the ranks meet."""

    def train(rank: int) -> Any:
        model = conv_model()
        opt = hvd.GossipOptimizer(sgd(0.1), topology="star", peers={0: 1}, schedule={1: "allreduce", 2: "sgp"})
        model.compile(optimizer=opt, loss=LOSS, jit_compile=False)
        data = [batch(rank, step) for step in range(2 + rank)]
        images, labels = (np.concatenate([one[i] for one in data]) for i in (0, 1))
        watch = Watch()
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
        alike = [one.tobytes() == other.tobytes() for one, other in zip(ended, outcomes[0][1], strict=True)]
        assert all(alike) or not drain
    if not drain:
        assert outcomes[0][1][0].tobytes() != outcomes[1][1][0].tobytes()
    assert [one[3] for one in outcomes] == [2, 3, 4]


def test_momentum_follows_the_learning_rate():
    """The velocity of Keras has the rate inside."""

    def train(rank: int) -> Any:
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
        opt = hvd.GossipOptimizer(sgd(0.1, momentum=0.5))
        model.compile(optimizer=opt, loss=lambda y, z: z, jit_compile=False, run_eagerly=True)
        model.layers[0].kernel.assign([[0.0]])
        schedule = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 10.0**epoch)
        model.fit(np.ones((1, 1)), np.ones((1, 1)), epochs=2, verbose=0, callbacks=[schedule])
        return float(opt.momentums[0].numpy()[0, 0])

    for velocity in Cluster(2).run(train):
        assert velocity == pytest.approx(0.5 * -1.0 - 1.0)


@pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")
def test_a_saved_model_loads_with_a_plain_optimizer_and_is_wrapped_again(tmp_path):
    def train(rank: int) -> tuple[Any, str]:
        model = conv_model()
        opt = hvd.GossipOptimizer(sgd(0.05, momentum=0.9), model=model)
        model.compile(optimizer=opt, loss=LOSS, jit_compile=False)
        model.fit(*batch(rank, 0), verbose=0)
        path = tmp_path / f"{rank}.keras"
        with opt.consensus():
            model.save(path)
            weights = flat(model.trainable_variables)
        return weights, str(path)

    (one, path), (other, _) = Cluster(2).run(train)
    assert one.tobytes() == other.tobytes()
    loaded = keras.models.load_model(path)
    assert type(loaded.optimizer) is sgd
    assert flat(loaded.trainable_variables).tobytes() == one.tobytes()
    with scripted_engine(2):
        again = hvd.load_model(path, wrapper=hvd.GossipOptimizer, algorithm="dpsgd")
    assert again.optimizer._async.plan.config.algorithm == "dpsgd"
    assert again.optimizer._async.replica.model is again
