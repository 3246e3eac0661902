"""The LSTM that the benchmark ``lengths`` trains under TensorFlow."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from scripts.benchmarks.jobs.sequence_lengths_keras import HIDDEN, Lstm
from scripts.benchmarks.support.clips import PIXELS


def test_the_lstms_gradient_is_that_of_what_it_computes():
    keras.utils.set_random_seed(0)
    layer, frames, weights = Lstm(), tf.random.normal([3, 7, PIXELS]), tf.random.normal([3, HIDDEN])
    layer.build(frames.shape)

    def value():
        return tf.reduce_sum(weights * tf.gather(layer(frames), [6, 3, 1], batch_dims=1))

    with tf.GradientTape() as tape:
        centre = value()
    random, small = np.random.default_rng(0), 1e-3
    for variable, gradient in zip(layer.variables, tape.gradient(centre, layer.variables), strict=True):
        start = variable.numpy()
        direction = random.standard_normal(start.shape).astype(np.float32)
        sides = []
        for sign in (1, -1):
            variable.assign(start + sign * small * direction)
            sides.append(float(value()))
        variable.assign(start)
        numeric = (sides[0] - sides[1]) / (2 * small)
        np.testing.assert_allclose(float(tf.reduce_sum(gradient * direction)), numeric, rtol=0.02, atol=0.05)
