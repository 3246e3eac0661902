"""Both bindings of partial allreduce by one interface, so that one suite runs for either."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import tensorflow as tf
import torch

import hvd_async.tensorflow.keras as keras_hvd
import hvd_async.torch as torch_hvd
from tests.conformance import keras_ranks, torch_ranks
from tests.conformance.cases import Case, Script
from tests.conformance.drive import ScriptedWorker, attach, scripted_engine
from tests.conformance.reference import Array

SGD = Case("sgd", "sgd", 0.1)
UNIT = Case("unit", "sgd", 1.0)
MOMENTUM = Case("momentum", "sgd", 0.05, momentum=0.9)
ADAM = Case("adam-decay", "adam", 0.01, weight_decay=0.05)
TINY = torch_ranks.TINY
NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True)
class Binding:
    """A framework, and how a step is taken.

    Attributes:
        framework: as the reference names it.
        hvd: the namespace that a user imports.
        trainer: makes a rank with a model by case and the wrapper's options; see ``drive.Trainer``.
        vectors: makes a rank with given gradients by sizes, case and options.
        tensor: makes the framework's of an array.
        plain: makes the plain optimizer of a case for parameters, which Keras' is built with.
        apply_plainly: has that one take a flat gradient.
    """

    framework: str
    hvd: Any
    trainer: Callable[..., Any]
    vectors: Callable[..., Any]
    tensor: Callable[[Any], Any]
    plain: Callable[[Case, Sequence[Any]], Any]
    apply_plainly: Callable[[Any, Sequence[Any], Array], None]

    def scripted(self, case: Case, script: Script, size: int, **options: Any) -> tuple[Any, ScriptedWorker]:
        """A rank with a model whose rounds are those of a script, and its worker."""
        with scripted_engine(size):
            trainer = self.trainer(case, **options)
            worker = ScriptedWorker(script, size, trainer.weights().size, case.lr, self.tensor)
            return trainer, attach(trainer.opt, worker)

    def averaged(self, case: Case, sizes: Sequence[int]) -> Array:
        """Weights of a model that one plain optimizer trains with averages of the first this many ranks' gradients, by
        step."""
        with scripted_engine(1):
            reader = self.trainer(case)
        optimizer = self.plain(case, reader.parameters)
        for step, size in enumerate(sizes):
            average = sum(reader.gradient(rank, step) for rank in range(size)) / size
            self.apply_plainly(optimizer, reader.parameters, average)
        weights: Array = reader.weights()
        return weights


def _keras_plain(case: Any, variables: Sequence[Any]) -> Any:
    optimizer = keras_ranks.plain(case) if isinstance(case, Case) else case
    optimizer.build(variables)
    return optimizer


TORCH = Binding(
    "torch",
    torch_hvd,
    torch_ranks.TorchTrainer,
    torch_ranks.TorchVectors,
    torch.as_tensor,
    torch_ranks.plain,
    torch_ranks.apply_plainly,
)


def _keras(graph: bool) -> Binding:
    return Binding(
        "keras",
        keras_hvd,
        functools.partial(keras_ranks.KerasTrainer, graph=graph),
        functools.partial(keras_ranks.KerasVectors, graph=graph),
        tf.constant,
        _keras_plain,
        keras_ranks.apply_plainly,
    )


KERAS, KERAS_GRAPH = _keras(False), _keras(True)
NAMES = {"torch": TORCH, "keras": KERAS, "keras-graph": KERAS_GRAPH}
both = pytest.mark.parametrize("binding", [pytest.param(TORCH, id="torch"), pytest.param(KERAS, id="keras")])
"""For a test of what does not depend on how a step is taken in Keras."""
all_modes = pytest.mark.parametrize("binding", [pytest.param(one, id=name) for name, one in NAMES.items()])
"""For a test of a step."""
