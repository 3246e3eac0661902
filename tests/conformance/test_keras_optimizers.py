"""Keras' own features under the wrapper: clipping, decay, averages, accumulation, schedules, freezing, settings."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_async.tensorflow.keras as hvd
from hvd_async.errors import ReplicaMismatchError
from hvd_async.testing import Cluster
from tests.conformance.cases import Case
from tests.conformance.drive import wait_for_rounds
from tests.conformance.keras_ranks import LOSS, KerasTrainer, batch, conv_model, flat

both_modes = pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
Make = Callable[[], Any]
sgd = keras.optimizers.SGD


class Signs(keras.optimizers.Optimizer):
    """Somebody's own: moves by the sign of an averaged gradient."""

    def build(self, variables: list[Any]) -> None:
        super().build(variables)
        self.smooth = self.add_optimizer_variables(variables, "smooth")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        smooth = self.smooth[self._get_variable_index(variable)]
        self.assign(smooth, 0.5 * smooth + gradient)
        self.assign_sub(variable, keras.ops.sign(smooth) * keras.ops.cast(learning_rate, variable.dtype))


OPTIMIZERS: dict[str, Make] = {
    "clipnorm": lambda: sgd(0.1, momentum=0.9, clipnorm=0.05),
    "global_clipnorm": lambda: sgd(0.1, global_clipnorm=0.1),
    "clipvalue": lambda: sgd(0.1, clipvalue=0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "ema": lambda: sgd(0.1, use_ema=True, ema_momentum=0.5),
    "ema-overwriting": lambda: sgd(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    "accumulating": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2, weight_decay=0.1),
    "schedule": lambda: sgd(keras.optimizers.schedules.PiecewiseConstantDecay([2, 4], [0.1, 0.05, 0.2])),
    "callable": lambda: sgd(lambda: 0.07),
    "constant-scale": lambda: sgd(0.1, momentum=0.9, loss_scale_factor=8.0),
    "lamb": lambda: keras.optimizers.Lamb(0.01),
    "own": lambda: Signs(0.01),
}


def hand_made(make: Make, size: int, steps: int) -> Any:
    """A plain optimizer fed with the average of all ranks' gradients: weights and the optimizer's variables."""
    trainer = KerasTrainer.__new__(KerasTrainer)
    trainer.model, optimizer = conv_model(), make()
    variables = trainer.model.trainable_variables
    optimizer.build(variables)
    for step in range(steps):
        average = sum(trainer.gradient(rank, step) for rank in range(size)) / size
        parts = np.split(average.astype(np.float32), np.cumsum([np.prod(v.shape) for v in variables])[:-1])
        optimizer.apply([tf.constant(part.reshape(v.shape)) for part, v in zip(parts, variables, strict=True)])
    return flat(v.numpy() for v in [*variables, *optimizer.variables])


@both_modes
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_quorum_all_equals_a_plain_optimizer_fed_with_averages(name, graph):
    make, steps = OPTIMIZERS[name], 6

    def train(rank: int) -> Any:
        trainer = KerasTrainer(Case("sgd", "sgd", 0.1), graph)
        trainer.opt = hvd.EagerOptimizer(make(), quorum="all")
        trainer.opt.build(trainer.model.trainable_variables)
        trainer.train(rank, range(steps))
        trainer.opt.drain()
        return flat(v.numpy() for v in [*trainer.model.trainable_variables, *trainer.opt.variables])

    expected = hand_made(make, 2, steps)
    outcomes = Cluster(2).run(train)
    assert outcomes[0].tobytes() == outcomes[1].tobytes()
    np.testing.assert_allclose(outcomes[0], expected, rtol=1e-5, atol=2e-6)


def test_fit_puts_the_moving_average_in_place_on_all_ranks():
    def train(rank: int) -> tuple[Any, Any]:
        model = conv_model()
        opt = hvd.EagerOptimizer(sgd(0.1, use_ema=True, ema_momentum=0.5))
        model.compile(optimizer=opt, loss=LOSS, jit_compile=False)
        images, labels = batch(rank, 0)
        model.fit(images, labels, batch_size=2 - rank, verbose=0)
        return flat(model.trainable_variables), flat(v.numpy() for v in opt._model_variables_moving_average)

    (one, average), (other, _) = Cluster(2).run(train)
    assert one.tobytes() == other.tobytes() == average.tobytes()


def test_two_optimizers_in_one_process():
    """As a GAN has them: steps taken in turn, a different number of each."""

    def train(rank: int) -> Any:
        trainers = [KerasTrainer(Case("sgd", "sgd", 0.1, momentum=0.9), graph, bucket_cap_mb=1e-6)
                    for graph in (True, False)]  # fmt: skip
        for step in range(4 + rank):
            trainers[0].train(rank, range(step, step + 1))
            if step % 2:
                trainers[1].train(rank, range(step, step + 1))
        trainers[0].opt.drain()
        return [(t.weights().tobytes(), t.opt.stats().gradients_applied) for t in trainers]

    one, other = Cluster(2).run(train)
    assert one == other
    assert [applied for _, applied in one] == [9, 4]


# -- frozen variables -----------------------------------------------------------------------------------------


@both_modes
def test_frozen_variables_stay_where_the_leading_rank_left_them(graph):
    """Rank 0 freezes the convolution after two steps and thaws it after four; rank 1 comes late and never does."""
    late = threading.Event()

    def train(rank: int) -> Any:
        model = conv_model()
        everything = model.trainable_variables
        conv = model.get_layer("conv")
        opt = hvd.EagerOptimizer(sgd(0.1, momentum=0.9, weight_decay=0.1), bucket_cap_mb=1e-6)
        opt.build(everything)
        steps: dict[int, Any] = {}

        def take(number: int) -> None:
            variables = model.trainable_variables

            def call(*gradients: Any) -> None:
                opt.apply(gradients, variables)

            step = steps.setdefault(len(variables), tf.function(call) if graph else call)
            images, labels = batch(rank, number)
            with tf.GradientTape() as tape:
                loss = LOSS(labels, model(images, training=True))
            step(*tape.gradient(loss, [v.value for v in variables]))

        worker = opt._async.worker_now()
        history = []
        if rank == 1:
            assert late.wait(60)
            wait_for_rounds(worker, 6)
        for number in range(6):
            if rank == 0:
                conv.trainable = number not in (2, 3)
            take(number)
            history.append((flat(conv.trainable_variables or conv.variables), flat(everything)))
        late.set()
        opt.drain()
        return history, flat([*everything, *(v.numpy() for v in opt.variables)])

    (history, one), (_, other) = Cluster(2).run(train)
    assert one.tobytes() == other.tobytes()
    conv = [conv for conv, _ in history]
    assert np.array_equal(conv[1], conv[2])
    assert np.array_equal(conv[1], conv[3])
    assert not np.array_equal(conv[0], conv[1])
    assert not np.array_equal(conv[3], conv[4])
    assert all(not np.array_equal(a, b) for (_, a), (_, b) in itertools.pairwise(history))


def test_a_frozen_variable_keeps_its_velocity():
    def train(rank: int) -> list[Any]:
        one, two = keras.Variable(0.0, name="one"), keras.Variable(0.0, name="one_more")
        opt = hvd.EagerOptimizer(sgd(1.0, momentum=0.5), quorum="all")
        opt.build([one, two])
        opt.apply([tf.constant(1.0), tf.constant(1.0)], [one, two])
        one.trainable = False
        opt.apply([tf.constant(1.0)], [two])
        one.trainable = True
        opt.apply([tf.constant(0.0), tf.constant(0.0)], [one, two])
        opt.drain()
        return [float(one), float(two), float(opt.momentums[0]), float(opt.momentums[1])]

    assert Cluster(2).run(train) == [[-1.5, -3.25, -0.5, -0.75]] * 2


def test_a_model_is_compiled_anew_with_a_layer_frozen():
    """Keras' way: fit, freeze, compile with the same optimizer, fit."""

    def train(rank: int) -> Any:
        model = conv_model()
        opt = hvd.EagerOptimizer(sgd(0.1, momentum=0.9))
        broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        broadcast.on_train_begin = lambda logs=None: None  # (there is no Horovod here; it drains at the end)
        images, labels = batch(rank, 0)

        def fit() -> tuple[Any, Any]:
            model.compile(optimizer=opt, loss=LOSS, jit_compile=False)
            model.fit(images, labels, batch_size=1 + rank, verbose=0)
            opt.drain()
            return flat(model.get_layer("conv").variables), flat(model.variables)

        first = fit()
        model.get_layer("conv").trainable = False
        second = fit()
        model.get_layer("conv").trainable = True
        return first, second, fit()

    one, other = Cluster(2).run(train)
    for (_, mine), (_, theirs) in zip(one, other, strict=True):
        assert mine.tobytes() == theirs.tobytes()
    assert np.array_equal(one[0][0], one[1][0])
    assert not np.array_equal(one[1][0], one[2][0])


# -- settings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda rank: sgd(0.1, momentum=0.9 - 0.1 * rank),
        lambda rank: sgd(0.1, weight_decay=0.1 * rank),
        lambda rank: sgd(0.1, clipnorm=1.0 + rank),
        lambda rank: sgd(keras.optimizers.schedules.ExponentialDecay(0.1, 10 + rank, 0.5)),
        lambda rank: sgd(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5) if rank else 0.1),
        lambda rank: (sgd if rank else keras.optimizers.RMSprop)(0.1),
    ],
    ids=["momentum", "decay", "clipnorm", "schedule", "schedule-or-not", "class"],
)
def test_ranks_with_other_settings_are_refused_at_the_first_step(make):
    def train(rank: int) -> None:
        weight = keras.Variable(0.0)
        opt = hvd.EagerOptimizer(make(rank))
        opt.apply([tf.constant(1.0)], [weight])

    for outcome in Cluster(2).outcomes(train):
        assert isinstance(outcome, ReplicaMismatchError)


def test_exclusions_from_weight_decay_must_agree():
    def train(rank: int) -> None:
        weight = keras.Variable(0.0, name="bias")
        plain = sgd(0.1, weight_decay=0.1)
        plain.exclude_from_weight_decay(var_names=["bias"] if rank else ["kernel"])
        hvd.EagerOptimizer(plain).apply([tf.constant(1.0)], [weight])

    for outcome in Cluster(2).outcomes(train):
        assert isinstance(outcome, ReplicaMismatchError)


def test_settings_change_on_all_ranks_after_a_drain():
    def train(rank: int) -> float:
        weight = keras.Variable(0.0)
        opt = hvd.EagerOptimizer(sgd(1.0, momentum=0.5))
        opt.apply([tf.constant(1.0)], [weight])
        opt.drain()
        opt.momentum = 0.25
        opt.apply([tf.constant(0.0)], [weight])
        opt.drain()
        return float(weight)

    (one,) = Cluster(1).run(train)
    assert one == -1.25
    outcomes = Cluster(2).run(train)
    assert outcomes[0] == outcomes[1]


def test_settings_changed_on_one_rank_are_noticed_with_a_hint():
    def train(rank: int) -> None:
        weight = keras.Variable(0.0)
        opt = hvd.EagerOptimizer(sgd(1.0, momentum=0.5), quorum="all")
        opt.apply([tf.constant(1.0)], [weight])
        if rank:
            opt.momentum = 0.25
        opt.apply([tf.constant(1.0)], [weight])
        opt.drain()

    outcomes = [str(outcome) for outcome in Cluster(2).outcomes(train)]
    assert any("change anything else on every rank after a drain()" in outcome for outcome in outcomes)


def test_a_variable_that_its_gradient_overwrites_is_refused():
    def train(rank: int) -> None:
        weight = keras.Variable(0.0)
        weight.overwrite_with_gradient = True
        hvd.EagerOptimizer(sgd(1.0)).apply([tf.constant(1.0)], [weight])

    (outcome,) = Cluster(1).outcomes(train)
    assert "float8" in str(outcome)


def test_no_gradient_at_all_is_an_error_as_in_keras():
    def train(rank: int) -> None:
        hvd.EagerOptimizer(sgd(1.0)).apply([None], [keras.Variable(0.0)])

    (outcome,) = Cluster(1).outcomes(train)
    assert "no variable has a gradient" in str(outcome)
