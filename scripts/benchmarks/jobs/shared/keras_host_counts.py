"""Counters of the cost of a Keras training step: operators of its graph, and crossings from there into Python.

As ``host_counts`` for torch: ``tests/conformance/test_host_budgets.py`` limits what the case ``host`` shows.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.ops import script_ops

from .keras_arm import wrapped

VARIABLES, ELEMENTS = 40, 8
"""Number of variables of ``SmallVariables``, and elements of each. (Fewer than ResNet-50 has: Keras makes operators for
each variable, and tracing them takes long.)"""
BUCKET_MB = VARIABLES * ELEMENTS * 4 / 5 / 2**20
"""``bucket_cap_mb`` for five buckets."""
STEPS = 16
"""Steps that are counted, after as many: a multiple of every period."""
PY_FUNCTIONS = ("EagerPyFunc", "PyFunc", "PyFuncStateless")
"""Types of operators that call Python."""


class SmallVariables(keras.Model):
    """A model of many variables that computes next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = [self.add_weight(shape=(ELEMENTS,), initializer="ones") for _ in range(VARIABLES)]

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Return the inputs, shape (batch, 8), times all variables."""
        for factor in self.factors:
            inputs = inputs * factor
        return inputs


class SmallSteps:
    """The model under an arm, whose step is the graph that ``fit()`` makes of it.

    Args:
        arm: its name.
        own: further arguments of the wrapper.
    """

    def __init__(self, arm: str, **own: Any) -> None:
        self.model = SmallVariables()
        self.optimizer = wrapped(arm, keras.optimizers.SGD(1e-6, momentum=0.9), self.model, **own)
        self.model.compile(self.optimizer, loss="mse")
        self.optimizer.build(self.model.trainable_variables)
        self._step = tf.function(self.model.train_step)
        self._batch = tf.ones([1, ELEMENTS])

    def train(self) -> None:
        """Take a step."""
        self._step((self._batch, self._batch))

    def operators(self) -> Counter[str]:
        """Return the operators of a step by type, those of the functions in its graph included."""
        concrete = self._step._list_all_concrete_functions()[-1]
        graph = concrete.graph.as_graph_def()
        nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
        return Counter(node.op for node in nodes)


class Crossings:
    """Counter of calls of Python functions from graphs, in all threads, from ``begin`` to ``end``.

    Attributes:
        count: of them.
    """

    def __init__(self) -> None:
        self.count = 0
        self._call = script_ops.EagerFunc.__call__

    def begin(self) -> None:
        """Begin to count."""
        lock = threading.Lock()

        def counted(function: Any, *args: Any) -> Any:
            with lock:
                self.count += 1
            return self._call(function, *args)

        script_ops.EagerFunc.__call__ = counted

    def end(self) -> None:
        """Stop counting."""
        script_ops.EagerFunc.__call__ = self._call
