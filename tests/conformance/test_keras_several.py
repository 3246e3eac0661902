"""Keras: several wrapped optimizers in one model, as a GAN's ``train_step()`` has them, served by one callback."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_async.tensorflow.keras as hvd
from hvd_async.testing import Cluster
from tests.conformance.drive import scripted_engine
from tests.conformance.keras_ranks import compiled, flat


class Game(keras.Model):
    """A generator and a discriminator of a few weights, each with its optimizer."""

    def __init__(self, held: str) -> None:
        super().__init__()
        self.generator = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3), keras.layers.BatchNormalization()])
        self.discriminator = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        random = np.random.default_rng(7)  # (Keras' seed is all threads')
        for each in (self.generator, self.discriminator):
            each.set_weights([random.uniform(0.5, 1.0, w.shape).astype(np.float32) for w in each.get_weights()])
        self.games = [self._optimizer(), self._optimizer()]
        self.held = held
        if held == "attributes":
            self.for_one, self.for_other = self.games
        if held != "list":
            games, self.games = tuple(self.games), ()
            self._play = lambda: games
        else:
            self._play = lambda: self.games

    @staticmethod
    def _optimizer() -> Any:
        return hvd.EagerOptimizer(keras.optimizers.SGD(0.05, momentum=0.9), quorum="solo", max_staleness=2)

    def train_step(self, data: Any) -> dict[str, Any]:
        (noise, real), one_and_other = data, self._play()
        for ours, other, sign in zip(one_and_other, (self.generator, self.discriminator), (1.0, -1.0), strict=True):
            with tf.GradientTape() as tape:
                made = self.discriminator(self.generator(noise, training=True), training=True)
                loss = sign * (tf.reduce_mean(made) - tf.reduce_mean(self.discriminator(real, training=True)))
            variables = other.trainable_variables
            ours.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def play(rank: int, held: str, batches: int) -> tuple[Any, list[bool], list[int]]:
    model = compiled("rmsprop", Game(held), loss=None)
    random = np.random.default_rng(rank)
    noise, real = (random.normal(size=(4 * batches, width)).astype(np.float32) for width in (2, 3))
    ended: list[bool] = []
    ours = model._play()
    look = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: ended.append(all(one._async.worker.settled for one in ours))
    )
    model.fit(noise, real, batch_size=4, epochs=2, verbose=0, callbacks=[hvd.callbacks.GossipEpochCallback(), look])
    weights = flat([*model.generator.variables, *model.discriminator.variables])
    return weights, [*ended, all(one._async.worker.settled for one in ours)], [one.rounds for one in ours]


@pytest.mark.parametrize(
    ("held", "batches"), [("attributes", (11, 5)), ("list", (5, 11)), ("elsewhere", (3, 3))], ids=str
)
def test_the_optimizers_of_a_gan_are_drained_together(held: str, batches: tuple[int, int]) -> None:
    """At each epoch's end and at that of fit(), whatever the ranks' numbers of batches."""
    one, other = Cluster(2).run(lambda rank: play(rank, held, batches[rank]), timeout=120)
    assert one[0].tobytes() == other[0].tobytes(), "statistics of batch norm too"
    for _, settled, rounds in (one, other):
        assert settled == [True] * 3
        assert rounds == one[2]


def warnings_of(fit_with: Any) -> list[str]:
    """Warnings of a callback when fit() begins, at 2 ranks."""
    callback = hvd.callbacks.GossipEpochCallback()
    callback.set_model(compiled(fit_with))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        callback.on_train_begin()
        callback.on_train_begin()
    return [str(one.message) for one in caught]


def test_a_model_whose_optimizer_was_not_wrapped_is_warned_of_once() -> None:
    with scripted_engine(2):
        (text,) = warnings_of(keras.optimizers.SGD(0.1))
        assert "plain SGD" in text
        assert "hvd.load_model()" in text
        assert warnings_of(hvd.EagerOptimizer(keras.optimizers.SGD(0.1))) == []
    with scripted_engine(1):
        assert warnings_of(keras.optimizers.SGD(0.1)) == []


def test_a_plain_optimizer_that_steps_while_the_wrapped_one_does_not_is_warned_of_once() -> None:
    with scripted_engine(2), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = compiled(plain := keras.optimizers.SGD(0.1))
        wrapped = hvd.EagerOptimizer(keras.optimizers.SGD(0.1))
        callback = hvd.callbacks.GossipEpochCallback()
        callback.set_model(model)
        callback.on_train_begin()
        callback.on_epoch_end(0)
        assert caught == [], "(train_step() may call the other one)"
        variables = model.trainable_variables
        plain.apply([tf.zeros_like(v) for v in variables], variables)
        for epoch in (1, 2):
            callback.on_epoch_end(epoch)
        assert wrapped.rounds == 0
    assert [str(one.message)[:40] for one in caught] == ["the model's optimizer is a plain SGD, wh"]
