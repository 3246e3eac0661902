"""Both bindings of partial allreduce by one interface, so that one suite runs for either."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
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
        trainer: makes a rank with a model by case and the wrapper's options: see ``torch_ranks.TorchTrainer``.
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
        return reader.weights()


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


class Embedding:
    """A table of 9 rows whose gradients are sparse.

    Attributes:
        samples: to be recorded for each backward pass; None if nothing is.
    """

    samples: int | None = None

    def __init__(self, binding: Binding, **options: Any) -> None:
        self.torch = binding is TORCH
        if self.torch:
            module = torch.nn.Embedding.from_pretrained(torch.full((9, 4), 100.0), freeze=False, sparse=True)
            self.module, self.table = module, module.weight
            self.opt = binding.hvd.EagerOptimizer(torch.optim.SGD([self.table], lr=1.0), **options)
            return
        self.table = keras.Variable(np.full((9, 4), 100.0, np.float32))
        self.opt = binding.hvd.EagerOptimizer(keras.optimizers.SGD(1.0), **options)
        self.opt.build([self.table])

        @tf.function
        def step(words: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                total = tf.reduce_sum(tf.gather(self.table.value, words))
            (gradient,) = tape.gradient(total, [self.table.value])
            assert isinstance(gradient, tf.IndexedSlices)
            self.opt.apply([gradient], [self.table])

        self._step = step

    def take(self, *passes: Sequence[int]) -> None:
        """A step of which each backward pass sees some words."""
        if self.torch:
            self.opt.zero_grad()
        for words in passes:
            if self.samples is not None:
                self.opt.record_samples(self.samples)
            if self.torch:
                self.module(torch.tensor(words)).sum().backward()
            else:
                self._step(tf.constant(words))
        if self.torch:
            self.opt.step()

    def rows(self) -> list[float]:
        """The first number of each row."""
        return [float(x) for x in (self.table.detach() if self.torch else self.table.numpy())[:, 0]]


KERAS, KERAS_GRAPH = _keras(False), _keras(True)
NAMES = {"torch": TORCH, "keras": KERAS, "keras-graph": KERAS_GRAPH}
both = pytest.mark.parametrize("binding", [pytest.param(TORCH, id="torch"), pytest.param(KERAS, id="keras")])
"""For a test of what does not depend on how a step is taken in Keras."""
all_modes = pytest.mark.parametrize("binding", [pytest.param(one, id=name) for name, one in NAMES.items()])
"""For a test of a step."""
