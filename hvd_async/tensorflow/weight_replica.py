"""The Keras replica of a rank with weights of its own: reads and writes them as one vector, in a graph and eagerly."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from hvd_async.algorithms.gossip.message_format import MessageFormat, NumpyMessageFormat
from hvd_async.optimizers import replica
from hvd_async.optimizers.agreement import Buffers
from hvd_async.runtime.memory import ReusedBlocks
from hvd_async.runtime.protocol import Hyper
from hvd_async.tensorflow.variables import (
    SCHEDULE_FREE,
    Flat,
    buffers_of,
    build,
    checksum,
    flat_double,
    frozen,
    is_finite,
    raw,
    refuse_overwritten,
    signature,
    statistics,
)

if TYPE_CHECKING:
    from hvd_async.tensorflow.factories import GossipArguments, LeaderArguments

Array = np.ndarray[Any, Any]
VECTORS_KEPT = 3
"""Vectors whose memory is kept for the next step: the weights read, a message in flight, the weights in use."""


class WeightReplica(replica.WeightReplica):
    """Weights, batch-norm statistics and moving averages of a wrapped Keras optimizer; Keras does not track it.

    Args:
        size: number of ranks that share the optimizer.
        given: the user's arguments.

    Attributes:
        model: the model whose batch-norm statistics agree; None if it is not known.
        passes: backward passes per step.
        flat: the weights that are mixed; None until they are known.
        rate: the learning rate of the step that has begun; ``has_rate``: whether any has.
        have_gradients: the indices of the weights that have a gradient in the step that ends.
        weight: the push-sum weight by which the variables are multiplied while the wrapped optimizer works on them.
        updates: whether the wrapped optimizer's update is being traced, or made.
        sums: gradients of backward passes before the last, by the variable's index; none if a pass is a step.
        summed: indices of the variables that ever had a gradient.
        done: backward passes since the last step; None if a pass is a step.
        recorded: in a graph that is being built: the op that records a loss which belongs to the next step.
        leads, dtypes: none; see ``GradientReplica``.
    """

    leads: Sequence[Any] = ()
    dtypes: Sequence[tf.DType] = ()

    def __init__(self, size: int, given: GossipArguments | LeaderArguments) -> None:
        self.size, self.given, self.model = size, given, given.model
        self.passes = given.backward_passes_per_step
        self._local: dict[int, Any] = {}
        """Variables that are not mixed, by the id of their ``tf.Variable``."""
        self._memory = ReusedBlocks(VECTORS_KEPT)
        self.flat: Flat | None = None
        self._velocities: Flat | None = None
        self._mixed: list[Any] | None = None
        """The Keras variables that are mixed; None until they are known."""
        self.rate = 1.0
        self.has_rate = False
        self.have_gradients: set[int] = set()
        self.weight: tf.Tensor | None = None
        self.updates = False
        self.sums: dict[int, tf.Variable] = {}
        self.summed: set[int] = set()
        self.done: tf.Variable | None = None
        self.recorded: tf.Operation | None = None

    def attach(self, optimizer: Any) -> None:
        super().attach(optimizer)
        if optimizer.built:
            self.make_sums()

    def continue_from(self, before: WeightReplica) -> None:
        self._local = before._local
        self.sums, self.summed, self.done = before.sums, before.summed, before.done

    def make_sums(self) -> None:
        """Create the variables that add up several passes, once the optimizer is built. (If they were created while a
        step is traced, TensorFlow would trace it twice.)"""
        if self.passes == 1 or self.done is not None:
            return
        with tf.init_scope():
            self.done = tf.Variable(0, trainable=False)
            for index, variable in enumerate(self.optimizer._trainable_variables):
                self.sums[index] = tf.Variable(tf.zeros_like(raw(variable)), trainable=False)

    def is_local(self, variable: Any) -> bool:
        """Return whether a variable is not mixed."""
        return id(raw(variable)) in self._local

    def keep_local(self, variable: Any) -> None:
        """Exclude a variable from the mixing."""
        self._local[id(raw(variable))] = raw(variable)
        self.flat = self._velocities = self._mixed = None

    # -- weights ----------------------------------------------------------------------------------------------

    def prepare(self, variables: list[Any] | None = None) -> None:
        """Build the wrapped optimizer if necessary; arguments and errors as in ``build``."""
        build(self.optimizer, self.model, variables)
        with tf.init_scope():
            if self.flat is None:
                refuse_overwritten(self.optimizer, "mixed with other ranks'")
                self.flat = Flat(self._trained(), self._memory)

    def mixed(self) -> Flat:
        """Return the weights that are mixed; the optimizer is built."""
        assert self.flat is not None
        return self.flat

    def read(self) -> Array:
        with tf.init_scope():
            return self.mixed().read()

    def write(self, weights: Any) -> None:
        with tf.init_scope():
            self.mixed().write(weights)

    def _trained(self) -> list[Any]:
        """Return the Keras variables that are mixed, in the vector's order; the optimizer is built."""
        if self._mixed is None:
            self._mixed = [v for v in self.optimizer._trainable_variables if not self.is_local(v)]
        return self._mixed

    def has_constraints(self) -> bool:
        """Return whether a variable that is mixed has a constraint."""
        return any(v.constraint is not None for v in self._trained())

    def constrained(self, weights: Array) -> Array:
        if not self.has_constraints():
            return weights
        weights, start = weights + 0, 0
        with tf.init_scope():
            for variable in self._trained():
                part = weights[start : (start := start + int(raw(variable).shape.num_elements()))]
                if variable.constraint is not None:
                    value = tf.convert_to_tensor(part.reshape(variable.shape), raw(variable).dtype)
                    part[:] = np.asarray(variable.constraint(value)).reshape(-1)
        return weights

    @contextlib.contextmanager
    def without_constraints(self) -> Iterator[None]:
        """Return a context without the constraints of variables that are mixed: they are applied after the mixing."""
        before = [(v, v.constraint) for v in self._trained() if v.constraint is not None]
        try:
            for variable, _ in before:
                variable.constraint = None
            yield
        finally:
            for variable, constraint in before:
                variable.constraint = constraint

    def sizes(self) -> list[int]:
        return [int(raw(v).shape.num_elements()) for v in self._trained()]

    def frozen(self) -> list[slice]:
        sizes = self.sizes()
        triples = zip(self._trained(), sizes, itertools.accumulate(sizes), strict=True)
        return [slice(end - size, end) for v, size, end in triples if not v.trainable and size]

    def moving(self) -> list[bool]:
        return [v.trainable and index in self.have_gradients for index, v in enumerate(self._trained())]

    def fingerprint(self, resumed: bool) -> tuple[list[str], list[int]]:
        """(Hyperparameters and the optimizer's state are each rank's own.)"""
        optimizer = self.optimizer
        buffers = 0 if self.model is None else len(statistics(self.model))
        after = ", weights as after cut()" if resumed else ""
        kinds = [
            f"optimizer {optimizer._wrapped_class.__name__}, moving averages {optimizer.use_ema}{after}",
            f"{self.passes} backward passes per step",
            f"buffers {self.given.buffers}, {buffers} of the model",
            *(f"local {signature(v)}" for v in optimizer._trainable_variables if self.is_local(v)),
        ]
        mixed = [v for v in optimizer._trainable_variables if not self.is_local(v)]
        sums = [0 if resumed else checksum(v) for v in mixed]
        return [*kinds, *(signature(v) for v in mixed)], [0] * len(kinds) + sums

    def has_state(self) -> bool:
        with tf.init_scope():
            return int(self.optimizer.iterations) > 0

    def message_format(self, received: int, **options: Any) -> MessageFormat:
        flat = self.mixed()
        return NumpyMessageFormat(flat.elements, flat.dtype.as_numpy_dtype, memory=self._memory, **options)

    def is_finite(self, weights: Array) -> bool:
        return is_finite(weights)

    def describe_nonfinite(self, step: str = "this rank's step has") -> str:
        bad = [v for v in self.optimizer._trainable_variables if not is_finite(raw(v).numpy().reshape(-1))]
        named = f" ({', '.join(map(signature, bad[:5]))})" if bad else ", by a constraint"
        return (
            f"{step} made weights NaN or infinite{named}, which would spread to all ranks; they were not "
            f"sent. Lower the learning rate, clip gradients, or wrap a "
            f"keras.optimizers.LossScaleOptimizer"
        )

    def read_double(self) -> Array:
        return flat_double(self.mixed().variables)

    # -- state other than the weights -------------------------------------------------------------------------

    def hyperparameters(self) -> Hyper:
        return [{"learning_rate": self.rate, "frozen": frozen(self.optimizer)}] if self.has_rate else []

    def learning_rates(self) -> list[tuple[int, float]]:
        return [(self.mixed().elements, self.rate)]

    def inertia(self) -> tuple[float, float]:
        """(Keras multiplies a gradient by the learning rate before it enters the momentum.)"""
        optimizer = self.optimizer
        if not isinstance(optimizer, (keras.optimizers.SGD, keras.optimizers.RMSprop)):
            return 0.0, 0.0
        beta = float(optimizer.momentum)
        return beta, 1.0 - beta if getattr(optimizer, "nesterov", False) else 0.0

    def check_momentum(self) -> None:
        optimizer = self.optimizer
        if not isinstance(optimizer, keras.optimizers.SGD) or not optimizer.momentum:
            raise ValueError(
                f"quasi_global corrects the momentum of keras.optimizers.SGD, and {optimizer._wrapped_class.__name__} "
                f"has none: pass an SGD with momentum=0.9 or the like, or leave quasi_global out"
            )

    def velocities(self) -> Flat:
        """Return the momenta of the weights that are mixed; the optimizer is built."""
        if self._velocities is None:
            optimizer = self.optimizer
            pairs = zip(optimizer._trainable_variables, optimizer.momentums, strict=True)
            self._velocities = Flat([velocity for v, velocity in pairs if not self.is_local(v)], self._memory)
        return self._velocities

    def momentum(self) -> Array:
        with tf.init_scope():
            return self.velocities().read()

    def write_momentum(self, momentum: Array) -> None:
        with tf.init_scope():
            self.velocities().write(momentum)

    def velocity(self, momentum: Array, rates: Sequence[tuple[int, float]]) -> Array:
        """(Keras' momentum is a velocity, which has the learning rate in it and is added to the weights.)"""
        ((_, rate),) = rates
        return momentum * momentum.dtype.type(-rate)

    def add_to_momentum(self, correction: Any, indices: Collection[int] | None = None) -> None:
        """Add a vector to the velocities.

        Args:
            correction: shape (n,).
            indices: indices of the variables among the mixed ones; None: all.
        """
        self.velocities().add(correction, indices)

    def buffers(self) -> Buffers:
        return buffers_of(self.model)

    def number(self, loss: Any) -> float:
        return float(loss)

    def _moving_averages(self) -> Flat | None:
        """Return Keras' moving averages of the variables that are mixed, and the iterates of a schedule-free optimizer,
        which derives its averages from them."""
        optimizer = self.optimizer
        averages = self.iterates()
        if optimizer.use_ema:
            pairs = zip(optimizer._trainable_variables, optimizer._model_variables_moving_average, strict=True)
            averages += [average for variable, average in pairs if not self.is_local(variable)]
        return Flat(averages, self._memory) if averages else None

    def iterates(self) -> list[Any]:
        """Return the variable z of each variable that is mixed, for a schedule-free optimizer."""
        optimizer = self.optimizer
        if not isinstance(optimizer, SCHEDULE_FREE):
            return []
        pairs = zip(optimizer._trainable_variables, optimizer._momentums, strict=True)
        return [iterate for variable, iterate in pairs if not self.is_local(variable)]

    def moving_averages(self) -> Array | None:
        with tf.init_scope():
            flat = self._moving_averages()
            return None if flat is None else flat.read()

    def write_moving_averages(self, averages: Array) -> None:
        with tf.init_scope():
            flat = self._moving_averages()
            assert flat is not None
            flat.write(averages)

    def warn_before_drain(self) -> None:
        if self.done is not None:
            replica.warn_of_open_passes(int(self.done.numpy()), self.passes)
