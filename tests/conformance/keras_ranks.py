"""Ranks in Keras: a small convolutional model, the same on all of them, or vectors; and optimizers by case.

Ranks are threads of one process here, and each may wait in an op of each bucket, which holds one of TensorFlow's
inter-op threads; so there must be more of these than such ops. Import it before anything has run in TensorFlow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvd_async.tensorflow.keras as hvd
from hvd_async.tensorflow.variables import own_name
from hvd_async.testing import MemoryCollectives
from tests.conformance.cases import Case
from tests.conformance.reference import Array

tf.config.threading.set_inter_op_parallelism_threads(64)
tf.config.threading.set_intra_op_parallelism_threads(1)
# A process whose first operators run in several threads at once crashes now and then: TensorFlow sets them up so.
tf.reshape(tf.Variable([1.0]) * tf.constant(2.0), [-1])


def sum_in_graph(plane: MemoryCollectives, vector: tf.Tensor, name: str, process_set: Any, scale: float) -> tf.Tensor:
    """Return the sum of a vector over the ranks, as ``HorovodCollectives.sum_in_graph`` does; ``plane.sums`` keeps the
    last one of each name, for tapes."""
    sums = vars(plane).setdefault("sums", {})

    def add(own: tf.Tensor) -> Any:
        handle = plane.allreduce_sum(own, name, process_set, True, scale)
        while not handle.completes_within(0.1):
            if not plane.started:
                raise plane.failure(f"{name}: the data plane has been shut down")
        sums[name] = handle.result()
        return sums[name]

    # (stateless, as Horovod's op is: TensorFlow would put stateful ones in an order)
    summed = tf.numpy_function(lambda own: add(tf.constant(own)).numpy(), [vector], vector.dtype, stateful=False)
    return tf.ensure_shape(summed, vector.shape)


MemoryCollectives.sum_in_graph = sum_in_graph  # type: ignore[attr-defined]  # (the class itself knows no framework)


def conv_model(seed: int = 0) -> keras.Model:
    """5x5 images, three classes; the weights by NumPy."""
    model = keras.Sequential(
        [
            keras.Input((5, 5, 1)),
            keras.layers.Conv2D(2, 3, activation="relu", name="conv"),
            keras.layers.Flatten(name="flatten"),
            keras.layers.Dense(3, name="dense"),
        ],
        name="model",
    )
    random = np.random.default_rng(seed)
    model.set_weights([random.normal(size=w.shape).astype(np.float32) * 0.3 for w in model.get_weights()])
    return model


def batch(rank: int, step: int) -> tuple[Any, Any]:
    """Each rank's own data."""
    random = np.random.default_rng([rank, step])
    return random.normal(size=(4, 5, 5, 1)).astype(np.float32), random.integers(0, 3, 4)


def data(rank: int, steps: int) -> tuple[Any, Any]:
    """A rank's batches of some steps, together."""
    images, labels = map(np.concatenate, zip(*(batch(rank, step) for step in range(steps)), strict=True))
    return images, labels


LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def compiled(optimizer: Any, model: Any = None, **options: Any) -> Any:
    """A model, or the small one, that an optimizer trains in ``fit()``."""
    model = conv_model() if model is None else model
    model.compile(optimizer=optimizer, **{"loss": LOSS, "jit_compile": False, **options})
    return model


def plain(case: Case, **options: Any) -> Any:
    """Keras' optimizer for a case."""
    decay = case.weight_decay or None
    if case.kind == "adam":
        return keras.optimizers.Adam(case.lr, weight_decay=decay, **options)
    return keras.optimizers.SGD(case.lr, momentum=case.momentum, nesterov=case.nesterov, weight_decay=decay, **options)


def flat(tensors: Any) -> Array:
    """Tensors or variables as one NumPy vector."""
    return np.concatenate([np.asarray(t).reshape(-1) for t in tensors]).astype(np.float64)


def apply_plainly(optimizer: Any, variables: Sequence[Any], gradient: Array) -> None:
    """A step of a plain optimizer with a flat gradient."""
    parts = np.split(gradient.astype(np.float32), np.cumsum([np.prod(v.shape, dtype=int) for v in variables])[:-1])
    optimizer.apply([tf.constant(part.reshape(v.shape)) for part, v in zip(parts, variables, strict=True)], variables)


def _made(case: Any, variables: Any) -> Any:
    return plain(case) if isinstance(case, Case) else case(variables)


class _Rank:
    """The part that a rank with a model and one with given gradients share."""

    opt: Any
    parameters: list[Any]
    """In the order in which they lie in vectors."""

    def weights(self) -> Array:
        return flat(self.parameters)

    def state(self) -> list[list[float]]:
        """Return for each variable its weights and the optimizer's variables that belong to it."""
        paths = [v.path.replace("/", "_") + "_" for v in self.parameters]
        owners = [
            max((path for path in paths if own_name(v).startswith(path)), key=len, default="")
            for v in self.opt.variables
        ]
        owned = list(zip(self.opt.variables, owners, strict=True))
        return [
            flat([v, *(own for own, owner in owned if owner == path)]).tolist()
            for v, path in zip(self.parameters, paths, strict=True)
        ]

    def saved(self) -> Any:
        """Return what a checkpoint holds; the arrays are copies, as from a file."""
        return [v.numpy() for v in self.parameters], {k: np.array(v) for k, v in self.opt.get_state().items()}

    def set_rate(self, rate: float) -> None:
        """Set the learning rate."""
        self.opt.learning_rate = rate

    def rate(self) -> float:
        """Its learning rate now."""
        return float(self.opt.learning_rate)

    def assign(self, index: int, value: Any) -> None:
        """Write a variable."""
        variable = self.parameters[index]
        variable.assign(np.broadcast_to(np.asarray(value), variable.shape))

    def load(self, saved: Any) -> None:
        """Be as the rank that was saved."""
        weights, state = saved
        for variable, values in zip(self.parameters, weights, strict=True):
            variable.assign(values)
        self.opt.set_state(state)


class KerasTrainer(_Rank):
    """One rank, with a custom ``GradientTape`` loop.

    Args:
        case: its optimizer, or a function that makes it for the variables.
        graph: whether a step is a ``tf.function``.
    """

    def __init__(self, case: Any, graph: bool = False, **options: Any) -> None:
        self.model = conv_model()
        self.parameters = self.model.trainable_variables
        self.opt = hvd.EagerOptimizer(_made(case, self.parameters), **{"quorum": "solo", **options})
        self.opt.build(self.parameters)
        self._apply = tf.function(self._take) if graph else self._take
        self._gradients: list[tf.Tensor] = []

    def _take(self, gradients: list[tf.Tensor]) -> None:
        self.opt.apply_gradients(zip(gradients, self.parameters, strict=True))

    def gradient(self, rank: int, step: int) -> Array:
        images, labels = batch(rank, step)
        with tf.GradientTape() as tape:
            loss = LOSS(labels, self.model(images, training=True))
        self._gradients = tape.gradient(loss, self.parameters)
        return flat(self._gradients)

    def step(self) -> None:
        self._apply(self._gradients)

    def train(self, rank: int, steps: range) -> None:
        """Several steps."""
        for step in steps:
            self.gradient(rank, step)
            self.step()


class KerasVectors(_Rank):
    """A rank whose gradients are given: some vectors, each a variable.

    Args:
        sizes: of the vectors.
        case: their optimizer, or a function that makes it for them.
        start: what they are filled with.
        dtypes: theirs; all of float32 if none are given.
        graph: whether a step is a ``tf.function``.

    Attributes:
        samples: to be recorded for each backward pass; None if nothing is.
    """

    samples: int | None = None

    def __init__(
        self,
        sizes: Sequence[int],
        case: Any,
        start: float = 0.0,
        dtypes: Sequence[str] = (),
        graph: bool = False,
        **options: Any,
    ) -> None:
        kinds = dtypes or ["float32"] * len(sizes)
        named = enumerate(zip(sizes, kinds, strict=True))
        self.parameters = [keras.Variable(np.full(n, start), dtype=d, name=f"own{i}") for i, (n, d) in named]
        if callable(options.get("groups")):
            options["groups"] = options["groups"](self.parameters)
        self.opt = hvd.EagerOptimizer(_made(case, self.parameters), **{"quorum": "solo", **options})
        self.opt.build(self.parameters)
        self._apply = tf.function(self._take) if graph else self._take

    def _take(self, gradients: list[Any]) -> None:
        self.opt.apply(gradients, [v for v in self.parameters if v.trainable])

    def freeze(self, index: int, frozen: bool = True) -> None:
        """A vector has no gradient from now on, or has again. (In a graph their number tells which are traced.)"""
        self.parameters[index].trainable = not frozen

    def take(self, *gradients: Any) -> None:
        """A step with one gradient each: numbers, or None for none."""
        pairs = [(v, np.asarray(g)) for v, g in zip(self.parameters, gradients, strict=True) if v.trainable]
        given = [None if g.dtype == object else tf.constant(np.broadcast_to(g, v.shape), v.dtype) for v, g in pairs]
        if self.samples is not None:
            self.opt.record_samples(self.samples)
        self._apply(given)

    def take_passes(self, passes: Sequence[Sequence[Any]]) -> None:
        """A step of several backward passes."""
        for gradients in passes:
            self.take(*gradients)


class Scalar:
    """A rank with one weight; its gradients are given.

    Args:
        opt: wrapped.
        graph: whether a step is a ``tf.function``.
        start: of the weight.
        weight: another one.
    """

    def __init__(self, opt: Any, graph: bool = False, start: float = 0.0, weight: Any = None) -> None:
        self.weight, self.opt = keras.Variable(start, name="weight") if weight is None else weight, opt
        opt.build([self.weight])
        self._apply = tf.function(self._take) if graph else self._take

    def _take(self, gradient: tf.Tensor) -> None:
        self.opt.apply([gradient], [self.weight])

    def step(self, gradient: float, loss: float | None = None) -> float:
        """The weight after it."""
        if loss is not None:
            self.opt.record_loss(loss)
        self._apply(tf.constant(gradient, self.weight.dtype))
        return float(self.weight.numpy())


class Watch(keras.callbacks.Callback):
    """Notes what the model holds while it is evaluated, and at the end of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.evaluated: list[Array] = []
        self.ended: list[Array] = []

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.evaluated.append(flat(self.model.weights))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.ended.append(flat(self.model.weights))
