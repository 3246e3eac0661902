"""What a step of Keras' ``fit()`` costs in each mode, with ranks as threads; on the command line, of some modes:

``python -m tests.conformance.keras_host_counts all solo --ranks 1 2`` prints a table, with ``--names`` also operators.
"""

from __future__ import annotations

import argparse
import threading
from collections import Counter
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from tensorflow.python.ops import script_ops

from hvd_async.testing import Cluster
from scripts.benchmarks.jobs.shared.keras_arm import wrapped
from scripts.benchmarks.support.arms import PLAIN, eager
from tests.conformance import (
    conftest,  # noqa: F401  ranks that are threads trace one at a time
    keras_ranks,  # noqa: F401  before anything has run in TensorFlow
)
from tests.conformance.host_counts import MODES

VARIABLES, ELEMENTS = 40, 8
"""Fewer than ResNet-50's: Keras makes operators for each, and to trace them takes long."""
BUCKET_MB = VARIABLES * ELEMENTS * 4 / 5 / 2**20
STEPS = 16
"""Steps that are counted, after as many: a multiple of every period."""


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


class KerasCost(NamedTuple):
    """What a training step costs.

    Attributes:
        operators: of its graph and the functions in it, by type.
        crossings: from the graph into Python, on average over ``STEPS`` steps.
    """

    operators: Counter[str]
    crossings: float

    @property
    def py_functions(self) -> int:
        """Operators that call Python."""
        return sum(self.operators[name] for name in ("EagerPyFunc", "PyFunc", "PyFuncStateless"))


class Crossings:
    """Counts the calls of Python functions from graphs, of all ranks together."""

    def begin(self) -> None:
        self.count, self._call, lock = 0, script_ops.EagerFunc.__call__, threading.Lock()

        def counted(function: Any, *args: Any) -> Any:
            with lock:
                self.count += 1
            return self._call(function, *args)

        script_ops.EagerFunc.__call__ = counted

    def end(self) -> None:
        script_ops.EagerFunc.__call__ = self._call


class Trained:
    """A model under a mode, whose step is the graph that ``fit()`` makes of it."""

    def __init__(self, mode: str, ranks: int) -> None:
        own: dict[str, Any] = {"bucket_cap_mb": BUCKET_MB, "grace": 0.0} if eager(mode) else {}
        own |= {"group": [list(range(ranks))]} if mode == "lsgd" else {}
        model = SmallVariables()
        self.optimizer = wrapped(mode, keras.optimizers.SGD(1e-6, momentum=0.9), model, **own)
        model.compile(self.optimizer, loss="mse")
        self.optimizer.build(model.trainable_variables)
        self._step = tf.function(model.train_step)

    def train(self) -> None:
        """Take ``STEPS`` steps."""
        batch = tf.ones([1, ELEMENTS])
        for _ in range(STEPS):
            self._step((batch, batch))

    def operators(self) -> Counter[str]:
        """Return the operators of a step by type, those of the functions in its graph included."""
        concrete = self._step._list_all_concrete_functions()[-1]
        graph = concrete.graph.as_graph_def()
        nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
        return Counter(node.op for node in nodes)


def plain() -> KerasCost:
    """Return what a step of the plain optimizer costs."""
    trained = Trained(PLAIN, 1)
    trained.train()
    return KerasCost(trained.operators(), 0.0)


def measure(mode: str, ranks: int) -> KerasCost:
    """Return what a step of a mode costs a rank."""
    together, crossings = threading.Barrier(ranks, timeout=60), Crossings()

    def work(rank: int) -> Counter[str]:
        trained = Trained(mode, ranks)
        trained.train()
        if together.wait() == 0:
            crossings.begin()
        together.wait()
        trained.train()
        if together.wait() == 0:
            crossings.end()
        trained.optimizer.drain()
        return trained.operators()

    operators, *_ = Cluster(ranks).run(work)
    return KerasCost(operators, crossings.count / (STEPS * ranks))


def main() -> None:
    """Print the counts of some modes."""
    parser = argparse.ArgumentParser(description="Operators of a Keras step's graph over plain Keras', and crossings.")
    parser.add_argument("modes", nargs="*", default=MODES, help=f"of {', '.join(MODES)}; not given: all")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--names", type=int, metavar="N", default=0, help="also the N most frequent operators")
    args = parser.parse_args()
    base = plain()
    print(f"plain: {base.operators.total()} operators")
    print("mode      ranks  operators  py_functions  crossings")
    for mode in args.modes:
        for ranks in args.ranks:
            if mode == "majority" and ranks == 1:
                continue
            cost = measure(mode, ranks)
            over = cost.operators.total() - base.operators.total()
            print(f"{mode:10} {ranks:4} {over:10} {cost.py_functions:13} {cost.crossings:10.1f}", flush=True)
            for name, count in (cost.operators - base.operators).most_common(args.names):
                print(f"    {count:6} {name}")


if __name__ == "__main__":
    main()
