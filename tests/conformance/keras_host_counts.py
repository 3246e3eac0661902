"""Counts of what a step of Keras' ``fit()`` costs in each mode, with ranks as threads. On the command line,

``python -m tests.conformance.keras_host_counts all solo --ranks 1 2`` prints a table, with ``--names`` also operators.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from tensorflow.python.ops import script_ops

from hvd_async import tensorflow as hvd
from hvd_async.testing import Cluster
from scripts.benchmarks.support.arms import PLAIN, is_eager
from scripts.benchmarks.support.names import LEADERS, gossip_of, quorum_of
from tests.conformance import (
    conftest,  # noqa: F401  ranks that are threads trace one at a time
    keras_ranks,  # noqa: F401  before anything has run in TensorFlow
)
from tests.conformance.host_counts import MODES

VARIABLES, ELEMENTS = 40, 8
"""Number of variables of ``SmallVariables``, and elements of each. (Fewer than ResNet-50 has: Keras makes operators for
each variable, and tracing them takes long.)"""
BUCKET_MB = VARIABLES * ELEMENTS * 4 / 5 / 2**20
"""``bucket_cap_mb`` for five buckets."""
STEPS = 16
"""Steps that are counted, after as many: a multiple of every period."""
PY_FUNCTIONS = ("EagerPyFunc", "PyFunc", "PyFuncStateless")
"""Types of operators that call Python."""
PATIENCE = 600.0
"""Time limit of the ranks, seconds. Tracing takes most of it: on a busy machine, minutes."""


class SmallVariables(keras.Model):
    """A model of many variables that computes next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = [self.add_weight(shape=(ELEMENTS,), initializer="ones") for _ in range(VARIABLES)]

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        for factor in self.factors:
            inputs = inputs * factor
        return inputs


def wrapped(mode: str, optimizer: Any, model: Any, **own: Any) -> Any:
    """Return a model's optimizer, wrapped as a mode says; the plain one as it is."""
    own, gossip = {**own, "model": model}, gossip_of(mode)
    if mode == PLAIN:
        return optimizer
    if mode in LEADERS:
        return hvd.LeaderOptimizer(optimizer, algorithm=mode, **own)
    if gossip is not None:
        reduced = getattr(hvd.Compression, gossip.compression)
        return hvd.GossipOptimizer(optimizer, **{**gossip._asdict(), "compression": reduced}, **own)
    return hvd.EagerOptimizer(optimizer, quorum=quorum_of(mode), **own)


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

    def train(self, steps: int = 1) -> None:
        """Take steps."""
        for _ in range(steps):
            self._step((self._batch, self._batch))

    def operators(self) -> Counter[str]:
        """Return the operators of a step by type, those of the functions in its graph included."""
        return Counter(node.op for node in nodes(self._step._list_all_concrete_functions()[-1].graph))


def nodes(graph: tf.Graph) -> list[Any]:
    """Return all nodes of a graph, those of functions that it calls among them."""
    definition = graph.as_graph_def()
    return [*definition.node, *(node for one in definition.library.function for node in one.node_def)]


@contextlib.contextmanager
def crossings() -> Iterator[list[int]]:
    """Count calls of Python functions from graphs, in all threads, within a block; the list has their number then."""
    call, calls, found = script_ops.EagerFunc.__call__, itertools.count(), list[int]()

    def counted(function: Any, *args: Any) -> Any:
        next(calls)  # (in one piece, also among threads)
        return call(function, *args)

    script_ops.EagerFunc.__call__ = counted
    try:
        yield found
    finally:
        script_ops.EagerFunc.__call__ = call
        found.append(next(calls))


class KerasCost(NamedTuple):
    """Cost of a training step.

    Attributes:
        operators: number of operators in its graph, functions in it included, by type.
        crossings: from the graph into Python, on average over ``STEPS`` steps.
    """

    operators: Counter[str]
    crossings: float

    @property
    def py_functions(self) -> int:
        """Operators that call Python."""
        return sum(self.operators[name] for name in PY_FUNCTIONS)


def made(mode: str, ranks: int) -> SmallSteps:
    """Return a model with the optimizer of a mode, without a grace, so that rounds do not depend on time."""
    own: dict[str, Any] = {"bucket_cap_mb": BUCKET_MB, "grace": 0.0} if is_eager(mode) else {}
    return SmallSteps(mode, **own | ({"group": [list(range(ranks))]} if mode == "lsgd" else {}))


def plain() -> KerasCost:
    """Return what a step of the plain optimizer costs."""
    trained = made(PLAIN, 1)
    trained.train()
    return KerasCost(trained.operators(), 0.0)


def measure(mode: str, ranks: int) -> KerasCost:
    """Return what a step of a mode costs a rank."""
    together = threading.Barrier(ranks, timeout=PATIENCE)

    def work(rank: int) -> tuple[Counter[str], int]:
        trained = made(mode, ranks)
        trained.train(STEPS)
        together.wait()
        with crossings() if rank == 0 else contextlib.nullcontext([0]) as counted:
            together.wait()
            trained.train(STEPS)
            together.wait()
        trained.optimizer.drain()
        return trained.operators(), counted[0]

    (operators, calls), *_ = Cluster(ranks).run(work, timeout=PATIENCE)
    return KerasCost(operators, calls / (STEPS * ranks))


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
