"""Keras: what is in the graph of a training step, which TensorFlow traces and optimizes at the first one."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

import hvd_async.tensorflow.keras as hvd
from tests.conformance.drive import scripted_engine


def nodes(function: Any) -> int:
    """Of a traced function and of all that it calls."""
    graph = function.get_concrete_function().graph.as_graph_def()
    return len(graph.node) + sum(len(each.node_def) for each in graph.library.function)


def test_an_update_is_little_more_than_keras_own() -> None:
    """What rounds may bring now and then, such as frozen variables, is not in it."""
    variables = [keras.Variable([float(i)] * 3, name=f"v{i}") for i in range(30)]
    plain = keras.optimizers.Adam(0.1)
    plain.build(variables)
    own = nodes(tf.function(lambda: plain.apply([tf.ones([3])] * len(variables), variables), autograph=False))
    with scripted_engine(2):
        opt = hvd.EagerOptimizer(keras.optimizers.Adam(0.1))
    opt.build(variables)
    opt._async.replica.set_up(variables)
    ours = nodes(opt._async.replica.update._inner)
    assert ours < 1.4 * own
