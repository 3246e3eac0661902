"""Keras: ``fit()`` records the samples of each batch separately, so ranks with batches of different sizes train as on
one large batch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_async.tensorflow.keras as hvd
from hvd_async.testing import Cluster
from tests.conformance.keras_ranks import LOSS, compiled, conv_model, flat

sgd = keras.optimizers.SGD
BATCH = (4, 2)
"""Samples of a batch, by rank; the last one of an epoch is smaller."""
LENGTHS = (14, 5)
"""Samples in all: four batches and three."""


def data(rank: int) -> tuple[Any, Any]:
    random = np.random.default_rng(rank)
    return random.normal(size=(LENGTHS[rank], 5, 5, 1)).astype(np.float32), random.integers(0, 3, LENGTHS[rank])


def schedule() -> Any:
    """A callback of this library that changes nothing."""
    return hvd.callbacks.LearningRateScheduleCallback(0.05, 1.0, momentum_correction=False)


def wrapped() -> Any:
    return hvd.EagerOptimizer(sgd(0.05, momentum=0.9), quorum="all", weighting="samples")


def fitted(rank: int, model: Any, fit: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """The weights after two epochs."""
    given = {"batch_size": BATCH[rank], "epochs": 2, "shuffle": False, "verbose": 0, "callbacks": [schedule()], **fit}
    model.fit(*data(rank), **given)
    return flat(model.trainable_variables)


def large(weights: Any = None) -> Any:
    """The weights that a plain optimizer has after two epochs of the batches of the k of P ranks that still have one,
    together, whose gradients count k / P.

    Args:
        weights: by rank, of its samples; each batch counts as many as it has, and its loss is Keras' mean.
    """
    model, plain = conv_model(), sgd(0.05, momentum=0.9)
    plain.build(model.trainable_variables)
    for _ in range(2):
        for step in range(4):
            own = {rank: slice(step * size, (step + 1) * size) for rank, size in enumerate(BATCH)}
            own = {rank: part for rank, part in own.items() if part.start < LENGTHS[rank]}
            counts = [len(data(rank)[1][part]) for rank, part in own.items()]
            with tf.GradientTape() as tape:
                losses = [
                    LOSS(
                        data(rank)[1][part],
                        model(data(rank)[0][part], training=True),
                        None if weights is None else weights[rank][part],
                    )
                    for rank, part in own.items()
                ]
                loss = sum(n * one for n, one in zip(counts, losses, strict=True)) / sum(counts) * len(own) / 2
            plain.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return flat(model.trainable_variables)


@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}, {"steps_per_execution": 2}], ids=str)
def test_fit_trains_as_on_one_large_batch(options):
    for weights in Cluster(2).run(lambda rank: fitted(rank, compiled(wrapped(), **options))):
        np.testing.assert_allclose(weights, large(), rtol=0, atol=2e-6)


def test_a_sample_counts_whatever_its_sample_weight():
    weights = [np.random.default_rng([7, rank]).integers(0, 3, LENGTHS[rank]).astype(np.float32) for rank in range(2)]
    for own in Cluster(2).run(lambda rank: fitted(rank, compiled(wrapped()), {"sample_weight": weights[rank]})):
        np.testing.assert_allclose(own, large(weights), rtol=0, atol=2e-6)


def test_without_a_callback_of_this_library_fit_says_what_is_missing_and_nothing_is_half_done():
    """Then with one."""

    def run(rank: int) -> Any:
        model = compiled(wrapped())
        before = flat(model.variables)
        with pytest.raises(Exception, match=r"not recorded.*In fit\(\) a callback of hvd.callbacks does it"):
            fitted(rank, model, {"callbacks": []})
        assert model.optimizer.stats().steps == 0
        assert flat(model.variables).tolist() == before.tolist()
        return fitted(rank, model)

    for weights in Cluster(2).run(run):
        np.testing.assert_allclose(weights, large(), rtol=0, atol=2e-6)


class Twice(keras.Model):
    """Two inputs by name, and a training step of its own, with ``GradientTape``."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        self.dense.build((None, 2))
        self.built = True

    def train_step(self, batch: Any) -> dict[str, Any]:
        (inputs,) = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.dense(inputs["a"]) * inputs["b"])
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def test_a_models_own_training_step_on_a_dataset_of_dictionaries():
    """Two steps on batches of 3 and 1, of 2 and 1: gradients are means of a x b."""
    values = ([1.0, 1.0, 1.0, 3.0], [2.0, 2.0, 4.0])

    def run(rank: int) -> Any:
        given = np.array(values[rank], np.float32)[:, None]
        inputs = {"a": np.repeat(given, 2, axis=1), "b": np.ones_like(given)}
        batches = tf.data.Dataset.from_tensor_slices((inputs,)).batch(3 - rank)
        opt = hvd.EagerOptimizer(sgd(0.05), quorum="all", weighting="samples")
        model = compiled(opt, Twice(), loss=None)
        model.fit(batches, verbose=0, shuffle=False, callbacks=[schedule()])
        return flat(model.trainable_variables)

    expected = 1.0 - 0.05 * ((3 * 1 + 2 * 2) / 5 + (1 * 3 + 1 * 4) / 2)
    for weights in Cluster(2).run(run):
        np.testing.assert_allclose(weights, [expected] * 2, rtol=1e-6)


def test_what_is_recorded_in_a_graph_is_recorded_in_each_run():
    """A static shape, a tensor; no number of samples is refused while the function is traced."""

    def run(rank: int) -> list[float]:
        weight = keras.Variable(0.0)
        opt = hvd.EagerOptimizer(sgd(1.0), quorum="all", weighting="samples")
        opt.build([weight])

        @tf.function
        def step(batch: tf.Tensor) -> None:
            opt.record_samples(batch.shape[0])
            opt.apply([tf.reduce_mean(batch)], [weight])

        for _ in range(3):
            step(tf.fill([1 + 2 * rank], float(rank)))
        opt.drain()
        for wrong in (1.5, tf.constant(1.5), tf.constant([1, 2]), None):
            with pytest.raises(ValueError, match=r"record_samples\("):
                tf.function(lambda given=wrong: opt.record_samples(given)).get_concrete_function()
        return [float(weight)]

    np.testing.assert_allclose(Cluster(2).run(run), [[-3 * 0.75]] * 2, rtol=1e-6)
