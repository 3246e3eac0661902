"""A round applied by a Keras optimizer: its average gradient, its hyperparameters, the same bits on every rank.

``Update`` applies it, ``Extrapolation`` extends the update, ``clip_by_global_norm`` is for use in ``round_transform=``.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvd_async.algorithms.eager.extrapolation import factor, momentum_of
from hvd_async.algorithms.eager.gradient_format import ReducedRound
from hvd_async.errors import ReplicaMismatchError
from hvd_async.tensorflow.gradient_format import Layout, has_gradients
from hvd_async.tensorflow.variables import SCHEDULE_FREE, constant, own_name, raw

# -- clipping ----------------------------------------------------------------------------------------------------------
# The result is the same, bit for bit, on ranks with different numbers of threads.


BLOCK = 4096
"""Number of elements that one thread adds up."""


def clip_by_global_norm(gradients: Sequence[tf.Tensor], clip_norm: float) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Scale gradients down to a global norm, as ``tf.clip_by_global_norm`` does, for use in ``round_transform=``.

    TensorFlow's own splits a large sum among its threads, so ranks with different numbers of threads may get norms that
    differ in the last bit, and replicas diverge. Here sums are computed in blocks of one size, in one order.

    Args:
        gradients: dense tensors of floating-point numbers, of any shapes.
        clip_norm: the largest global norm, above 0.

    Returns:
        The gradients times ``clip_norm / max(norm, clip_norm)``, and their global norm before, a float32 scalar. Where
        that is not finite, the gradients are NaN.
    """
    norm = tf.sqrt(_sum(tf.stack([_sum(tf.square(tf.cast(one, tf.float32))) for one in gradients])))
    scale = clip_norm / tf.maximum(norm, clip_norm)
    scale = tf.where(tf.math.is_finite(norm), scale, float("nan"))
    return [one * tf.cast(scale, one.dtype) for one in gradients], norm


def _sum(values: tf.Tensor) -> tf.Tensor:
    """Return the sum of a tensor of known shape, computed block by block."""
    flat = tf.reshape(values, [-1])
    while flat.shape[0] > BLOCK:
        rows = tf.reshape(tf.pad(flat, [[0, -flat.shape[0] % BLOCK]]), [-1, BLOCK])
        flat = tf.reduce_sum(rows, axis=1)
    return tf.reduce_sum(flat)


# -- extrapolation -----------------------------------------------------------------------------------------------------


class Extrapolation:
    """The extrapolated updates of one optimizer, over its trainable variables.

    Args:
        optimizer: a wrapped optimizer, built.
        rounds: rounds to look ahead; 0: updates stay as they are.
        before: the extrapolation before a membership change, whose leads are kept; None at first.

    Attributes:
        leads: of each trainable variable, by how much it is ahead of its updates; empty where nothing is extrapolated.
    """

    def __init__(self, optimizer: Any, rounds: float, before: Extrapolation | None = None) -> None:
        self._optimizer, self._rounds = optimizer, rounds
        self.leads: list[tf.Variable] = before.leads if before is not None and rounds else []
        if self.wants_leads():
            self.make_leads()

    def wants_leads(self) -> bool:
        """Return whether updates are extrapolated, given the optimizer's present momentum."""
        return self._factor() != 0

    def make_leads(self) -> None:
        """Create leads of 0 if there are none. Not in a graph."""
        if not self.leads:
            self.leads = [tf.Variable(tf.zeros_like(raw(v)), trainable=False) for v in self._variables()]

    def forget_leads(self) -> None:
        """Reset the leads: the weights were replaced."""
        for lead in self.leads:
            lead.assign(tf.zeros_like(lead))

    def _variables(self) -> list[Any]:
        return list(self._optimizer._trainable_variables)

    def _factor(self) -> float:
        if isinstance(self._optimizer, SCHEDULE_FREE):
            return 0.0
        return factor(momentum_of(vars(self._optimizer)), self._rounds)

    @contextlib.contextmanager
    def around_update(self, moved: Sequence[Any]) -> Iterator[None]:
        """Extend the update of variables whose ops are made inside the context; before constraints and averages."""
        lead_of = {id(raw(v)): lead for v, lead in zip(self._variables(), self.leads, strict=bool(self.leads))}
        pairs = [(raw(v), lead_of[id(raw(v))]) for v in moved] if self.leads else []
        before = [tf.identity(variable) for variable, _ in pairs]
        yield
        for (variable, lead), start in zip(pairs, before, strict=True):
            new = tf.cast(self._factor(), variable.dtype) * (variable - start)
            variable.assign_add(new - lead)
            lead.assign(new)


# -- rounds ------------------------------------------------------------------------------------------------------------


RoundTransform = Callable[[list[tf.Tensor]], Sequence[tf.Tensor]]
NOT_SETTINGS = {"name", "built", "loss_scale_factor"}
"""Plain attributes of a Keras optimizer that may differ from rank to rank."""


def scheduled(optimizer: Any) -> bool:
    """Return whether an optimizer's learning rate follows from ``iterations``."""
    return isinstance(optimizer._learning_rate, keras.optimizers.schedules.LearningRateSchedule)


def settings(optimizer: Any) -> list[str]:
    """Return the settings of an optimizer that Keras builds into graphs, such as its momentum, as text."""
    plain = {
        key: value
        for key, value in vars(optimizer).items()
        if not key.startswith("_") and key not in NOT_SETTINGS and isinstance(value, bool | int | float | str | None)
    }
    if scheduled(optimizer):
        try:
            schedule = keras.optimizers.schedules.serialize(optimizer._learning_rate)
        except NotImplementedError:  # (of a class without ``get_config()``)
            schedule = type(optimizer._learning_rate).__name__
        plain["learning_rate"] = json.dumps(schedule, sort_keys=True, default=repr)
    return [f"{key}={value!r}" for key, value in sorted(plain.items())]


def digest(optimizer: Any) -> int:
    """Return the CRC-32 of the settings."""
    return zlib.crc32("\n".join(settings(optimizer)).encode())


def owners(optimizer: Any, variables: Sequence[Any]) -> dict[int, list[Any]]:
    """Return the optimizer's variables (such as velocities) by the index of the variable they belong to: by their place
    in a list of one for each variable, else the variable in whose name they begin."""
    prefixes = {str(getattr(v, "path", v.name)).replace("/", "_").replace(":", "_") + "_": i
                for i, v in enumerate(variables)}  # fmt: skip
    lists = {key: held for key, held in vars(optimizer).items() if isinstance(held, list) and key != "_variables"}
    averages = {id(v) for v in lists.pop("_model_variables_moving_average", []) if v is not None}
    places = {id(v): i for held in lists.values() if len(held) == len(variables) for i, v in enumerate(held)}
    found: dict[int, list[Any]] = {}
    for variable in optimizer.variables:
        index = places.get(id(variable))
        if index is None:
            fitting = [prefix for prefix in prefixes if own_name(variable).startswith(prefix)]
            index = prefixes[max(fitting, key=len)] if fitting else None
        if index is not None and id(variable) not in averages:  # (those of frozen weights are updated too)
            found.setdefault(index, []).append(raw(variable))
    return found


class Update:
    """Applies rounds, in a training graph or outside; replaced when the optimizer's settings change.

    TensorFlow rewrites entire graphs, so the same update rounds differently in different graphs, and replicas would
    diverge by bits. As a function of its own that is not inlined, called from a function in either case, the update is
    rewritten separately and gives the same bits. (Whole-graph rewriting was seen to differ by 1e-7 for
    RMSprop, Lamb, Adagrad, SGD with weight decay; this way by nothing.)

    Args:
        optimizer: a wrapped optimizer; ``optimizer._wrapped_class.apply`` does the work.
        layout: of the buckets.
        transform: see ``round_transform``.
        correct_momentum: scale velocities when a round changes the rate (Goyal et al., 2017, section 3).
        last_rate: float32, where the rate of the last round is kept for that. (Made while a step is traced, it would
            have TensorFlow trace the step twice.)
        extrapolation: of its updates.
    """

    def __init__(
        self,
        optimizer: Any,
        layout: Layout,
        transform: RoundTransform | None,
        correct_momentum: Callable[[], bool],
        last_rate: tf.Variable,
        extrapolation: Extrapolation,
    ) -> None:
        self._optimizer, self._layout = optimizer, layout
        self._transform, self._correct = transform, correct_momentum
        self._variables = list(optimizer._trainable_variables)
        self.scheduled, self.digest, self._corrects = scheduled(optimizer), digest(optimizer), correct_momentum()
        rate = [] if self.scheduled else [tf.TensorSpec([], tf.float32)]
        weights = [tf.TensorSpec([len(layout)], tf.float64)] if layout.weighted else []
        arguments = [*rate, *weights, *layout.specs]
        self.types = [argument.dtype for argument in arguments]
        self.nothing = [tf.zeros([0], dtype) for dtype in self.types]
        """Placeholder for a missing round."""
        self._shapes = [argument.shape for argument in arguments]
        self._last_rate, self._extrapolation = last_rate, extrapolation
        last_rate.assign(0.0)
        self._inner = tf.function(
            lambda *parts: self._apply(*parts),
            input_signature=arguments,
            autograph=False,
            experimental_attributes={"_noinline": True},
        )
        self._alone = tf.function(lambda *parts: self._inner(*parts), input_signature=arguments, autograph=False)

    def stale(self) -> bool:
        """Return whether the optimizer's settings have changed."""
        now = (scheduled(self._optimizer), digest(self._optimizer), self._correct())
        return now != (self.scheduled, self.digest, self._corrects)

    def group(self, frozen: Sequence[int], rate: Sequence[tf.Tensor]) -> dict[str, Any]:
        """Return the hyperparameters of a step.

        Args:
            frozen: variables that a round led by this rank must not move.
            rate: this rank's learning rate; empty if it follows a schedule.
        """
        group: dict[str, Any] = {"frozen": list(frozen), "settings": self.digest}
        return group | ({"learning_rate": float(rate[0])} if rate else {})

    def parts(self, round_: ReducedRound) -> list[Any]:
        """Return a round as the arguments of ``__call__``, of dtypes ``types``. Buckets that carried no gradient, or no
        samples, are frozen for it: momentum and decay must not move variables for which no rank had a gradient.

        Raises:
            ReplicaMismatchError: as ``rate``.
        """
        rate, weights = self.rate(round_), []
        if self._layout.weighted:
            weights = [tf.constant([round_.weight(bucket) for bucket in range(len(self._layout))], tf.float64)]
        return [*rate, *weights, *self._layout.without(self.unmoved(round_), round_.sums)]

    def rate(self, round_: ReducedRound) -> list[tf.Tensor]:
        """Return the learning rate of a round; empty if it follows a schedule.

        Raises:
            ReplicaMismatchError: the rank that led it has an optimizer with other settings.
        """
        (group,) = round_.hyper
        if ("learning_rate" in group) == self.scheduled or group["settings"] != self.digest:
            raise ReplicaMismatchError(
                f"a round was led by a rank whose {type(self._optimizer).__name__} has other settings than this rank's "
                f"({', '.join(settings(self._optimizer))}). Only a learning rate that is a number can differ from rank "
                f"to rank; change anything else on every rank after a drain()."
            )
        return [] if self.scheduled else [constant(group["learning_rate"], tf.float32)]

    def unmoved(self, round_: ReducedRound) -> list[int]:
        """Return the variables that a round must not move: frozen on the rank that led it, or in empty buckets."""
        (group,) = round_.hyper
        buckets = enumerate(self._layout.buckets)
        empty = {index for number, bucket in buckets if not round_.weight(number) for index in bucket.indices}
        return sorted(empty.union(group["frozen"]))

    def keep(self, round_: ReducedRound) -> Callable[[], None]:
        """Return a function that restores the variables, and the optimizer's variables for them, that a round must not
        move. (Keras moves all variables that it is given, by decay and momentum also without a gradient. In the graph
        of the update this would double its size, and the time to trace it.)"""
        optimizer, unmoved = self._optimizer, set(self.unmoved(round_))
        held = self._held() if unmoved else []
        kept = [(variable, tf.identity(variable)) for index, variable in held if index in unmoved]
        averages = optimizer._model_variables_moving_average if optimizer.use_ema else []
        pairs = [pair for index, pair in enumerate(zip(self._variables, averages, strict=False)) if index in unmoved]
        averaged = [(raw(v), raw(average), tf.identity(raw(average))) for v, average in pairs if average is not None]
        updates, period = int(optimizer.iterations) if averaged else 0, optimizer.ema_overwrite_frequency

        def put_back() -> None:
            for variable, value in kept:
                variable.assign(value)
            # Keras averages variables that it does not move, too, and overwrites them; in the update they had moved.
            for variable, average, before in averaged:
                momentum = tf.constant(optimizer.ema_momentum if updates else 0.0, variable.dtype)
                average.assign(momentum * before + (1 - momentum) * variable)
                if period and (updates + 1) % period == 0:
                    variable.assign(average)

        return put_back

    def __call__(self, *parts: Any) -> tf.Tensor:
        """Apply a round; return a tensor to wait for."""
        parts = tuple(tf.ensure_shape(part, shape) for part, shape in zip(parts, self._shapes, strict=True))
        return (self._alone if tf.executing_eagerly() else self._inner)(*parts)

    def _apply(self, *parts: tf.Tensor) -> tf.Tensor:
        optimizer, rest = self._optimizer, list(parts)
        rate = None if self.scheduled else rest.pop(0)
        weights = rest.pop(0) if self._layout.weighted else None
        gradients = self._layout.averages(rest, weights)
        if self._transform is not None:
            gradients = list(self._transform(list(gradients)))
        with self._with(rate):
            if rate is not None and self._corrects:
                self._correct_momentum(rate)
            moved = [variable for variable in self._variables if has_gradients(variable)]
            optimizer._wrapped_class.apply(optimizer, gradients, moved)
        return tf.identity(raw(optimizer._iterations))

    def _held(self) -> list[tuple[int, Any]]:
        """Return each variable that a round may move, with the index of the trainable variable it belongs to."""
        held = [(index, raw(v)) for index, v in enumerate(self._variables)]
        held += [(index, v) for index, v in enumerate(self._extrapolation.leads)]
        return held + [(i, v) for i, found in owners(self._optimizer, self._variables).items() for v in found]

    @contextlib.contextmanager
    def _with(self, rate: tf.Tensor | None) -> Iterator[None]:
        """Return a context for Keras' update: it has the round's learning rate, and takes gradients as unscaled."""
        own = vars(self._optimizer)
        before = {key: own[key] for key in ("_learning_rate", "loss_scale_factor")}
        own["loss_scale_factor"] = None
        if rate is not None:
            own["_learning_rate"] = lambda: rate
        try:
            yield
        finally:
            own.update(before)

    def _correct_momentum(self, rate: tf.Tensor) -> None:
        last = self._last_rate
        ratio = tf.where(last > 0, rate / last, 1.0)
        for velocity in getattr(self._optimizer, "momentums", None) or []:
            if velocity is not None:
                velocity.assign(raw(velocity) * tf.cast(ratio, raw(velocity).dtype))
        last.assign(rate)
