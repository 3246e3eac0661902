"""Keras: what scripts bring along from Horovod: integer variables, Horovod's own callbacks, XLA."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow.keras as horovod
import keras
import pytest
import tensorflow as tf

import hvd_async.tensorflow.keras as hvd
from hvd_async.errors import ReplicaStateError
from hvd_async.testing import Cluster
from tests.conformance.drive import scripted_engine
from tests.conformance.keras_ranks import batch, compiled, conv_model, flat

SGD = keras.optimizers.SGD


class Counts(keras.layers.Layer):
    """Counts calls in an integer, which Keras calls trainable unless reported otherwise."""

    def build(self, shape: Any) -> None:
        self.calls = self.add_weight(name="calls", shape=(2,), dtype="int32", initializer="ones")

    def call(self, inputs: Any) -> Any:
        return inputs


@pytest.mark.parametrize(
    "make", [lambda: SGD(0.1, momentum=0.9), lambda: keras.optimizers.AdamW(0.1, weight_decay=2.0)]
)
def test_integer_variables_are_left_alone(make: Any) -> None:
    def train(rank: int) -> Any:
        model = keras.Sequential([keras.Input((5, 5, 1)), Counts(), *conv_model().layers])
        model.set_weights([w * 0 + 1 for w in model.get_weights()])
        compiled(hvd.EagerOptimizer(make(), groups=2), model)
        model.fit(*batch(rank, 0), verbose=0)
        model.optimizer.drain()
        return model.layers[0].calls.numpy().tolist(), flat(model.weights).tobytes()

    one, other = Cluster(2).run(train)
    assert one == other
    assert one[0] == [1, 1]


@pytest.mark.parametrize(
    "make",
    [
        lambda: horovod.callbacks.BroadcastGlobalVariablesCallback(0),
        lambda: horovod.callbacks.MetricAverageCallback(),
        lambda: horovod.callbacks.LearningRateWarmupCallback(initial_lr=0.1),
        lambda: horovod.callbacks.LearningRateScheduleCallback(initial_lr=0.1, multiplier=0.5),
    ],
)
def test_horovods_own_callbacks_say_which_import_to_change(make: Any) -> None:
    model = compiled(SGD(0.1))
    with pytest.raises(ReplicaStateError, match=r"'import hvd_async.tensorflow.keras as hvd' instead of"):
        model.fit(*batch(0, 0), verbose=0, callbacks=[make()])


def test_xla_is_refused_before_training_and_by_name() -> None:
    with scripted_engine(2):
        model = compiled(hvd.EagerOptimizer(SGD(0.1)), jit_compile=True)
        with pytest.raises(ValueError, match="jit_compile=False"):
            model.fit(*batch(0, 0), verbose=0, callbacks=[hvd.callbacks.GossipEpochCallback()])
        with pytest.raises(tf.errors.InvalidArgumentError, match="jit_compile_False"):
            model.fit(*batch(0, 0), verbose=0)
