"""Methods that a wrapped Keras optimizer's class gains: public methods, and methods that Keras calls; no state."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from hvd_async.errors import ReplicaStateError
from hvd_async.optimizers import methods
from hvd_async.optimizers.leader import LeaderDriver
from hvd_async.optimizers.local import LocalDriver
from hvd_async.tensorflow.checkpoint import StateMethods
from hvd_async.tensorflow.collectives import LIFECYCLE
from hvd_async.tensorflow.ops import as_op, call_or_op
from hvd_async.tensorflow.variables import Flat, constant, raw, signature
from hvd_async.tensorflow.weight_replica import WeightReplica


class WeightMethods(StateMethods, methods.OptimizerMethods):
    """Methods of a wrapped Keras optimizer whose ranks have weights of their own."""

    _async: LocalDriver
    _wrapped_class: ClassVar[type[Any]]

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]  # it would warn of what it cannot
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        """Take a step of the wrapped optimizer on this rank, then let other ranks' weights move this one's.

        Args:
            grads: one a variable; a variable with None is not updated, but mixed like all that the optimizer was built
                with.
            trainable_variables: as in Keras; those the optimizer was built with if None.

        Raises:
            ValueError: no variable has a gradient.
            ReplicaMismatchError: at the first step, if the ranks' weights or settings differ. (Errors raised while a
                ``tf.function`` or ``fit()`` runs arrive inside a ``tf.errors`` exception, with their text.)
            ReplicaStateError: an earlier step was interrupted on this rank.
            FloatingPointError: the step has made a weight NaN or infinite; it was not sent.
        """
        grads = list(grads)
        if grads:
            given = self._trainable_variables if trainable_variables is None else trainable_variables
            take_step(self, grads, list(given))

    def register_local_var(self, variable: Any) -> None:
        """Exclude a variable from the mixing: each rank trains its own. Call it before the first step, on all ranks.

        Raises:
            ReplicaStateError: the ranks have met already.
        """
        if self._async.worker is not None:
            raise ReplicaStateError(
                f"{signature(variable)} has been mixed with other ranks' already: register local variables before the "
                f"first step"
            )
        self._async.replica.keep_local(variable)  # type: ignore[attr-defined]

    # -- methods that Keras calls by name -----------------------------------------------------------------------

    def build(self, variables: Any) -> None:
        """Create the wrapped optimizer's variables, and the sums of several passes, before a step is traced."""
        self._wrapped_class.build(self, variables)
        self._async.replica.make_sums()  # type: ignore[attr-defined]

    def finalize_variable_values(self: Any, var_list: Any) -> None:
        """Set the averaged weights at the end of ``fit()``, with ``use_ema``, the same on all ranks."""
        begun = self._async.worker is not None
        if self.use_ema and begun:
            self.drain()
        self._wrapped_class.finalize_variable_values(self, var_list)
        if self.use_ema and begun:
            self._async.on_weights_replaced()

    def _update_model_variables_moving_average(self: Any, trainable_variables: Any) -> None:
        replica = self._async.replica
        if replica.weight is not None:
            trainable_variables = [
                v if replica.is_local(v) else raw(v) / tf.cast(replica.weight, raw(v).dtype)
                for v in trainable_variables
            ]
        self._wrapped_class._update_model_variables_moving_average(self, trainable_variables)

    def _overwrite_model_variables_with_average_value(self: Any, trainable_variables: Any) -> None:
        replica = self._async.replica
        self._wrapped_class._overwrite_model_variables_with_average_value(self, trainable_variables)
        if replica.weight is not None:
            replica.flat.scale(replica.weight)


class GossipMethods(WeightMethods, methods.GossipMethods):
    """Methods that ``GossipOptimizer`` adds to the class of the Keras optimizer it wraps."""


class LeaderMethods(WeightMethods, methods.LeaderMethods):
    """Methods that ``LeaderOptimizer`` adds to the class of the Keras optimizer it wraps."""

    def record_loss(self: Any, loss: Any) -> None:
        """Record the training loss of this step, before ``apply()``: the rank with the lowest mean loss leads. Keras'
        ``fit()`` does it automatically.

        Args:
            loss: a number, or a tensor of one; also while a ``tf.function`` is traced.

        Raises:
            ValueError: it is several numbers.
        """
        note_loss(self._async, loss)

    def scale_loss(self: Any, loss: Any) -> Any:
        """Take the loss of each training step, which Keras gives it."""
        self.record_loss(loss)
        return self._wrapped_class.scale_loss(self, loss)

    def _get_current_learning_rate(self: Any) -> Any:
        """Return this rank's learning rate within an update; schedules, callbacks and checkpoints see and set that of
        all ranks."""
        rate, factor = self._wrapped_class._get_current_learning_rate(self), self._async.lr_factor
        return tf.convert_to_tensor(rate) * factor if self._async.replica.updates and factor != 1.0 else rate


# -- a step, in a graph and eagerly ------------------------------------------------------------------------------------
# In a graph it is: a py_function that begins the step, meets the other ranks and returns the push-sum weight; the
# wrapped optimizer's own ``apply``, on weights times that; one py_function that passes the weights as a vector to the
# driver, which waits for messages and mixes them in, applies Keras' constraints to the mixed weights, and returns
# these. Weights are copied once into the vector; the variables then share the memory of the mixed vector. TensorFlow
# runs the ops that read and write a variable in the order of their creation.


def take_step(optimizer: Any, grads: Sequence[Any], variables: list[Any]) -> None:
    """Take a step of a wrapped optimizer, or add its gradients up.

    Args:
        optimizer: a wrapped optimizer.
        grads: one a variable, at least one; None where there is none.
        variables: the optimizer's own, or some of them.

    Raises:
        ValueError: no variable has a gradient.
    """
    replica: WeightReplica = optimizer._async.replica
    replica.prepare(variables)
    optimizer._check_variables_are_known(variables)
    if all(gradient is None for gradient in grads):
        raise ValueError("no variable has a gradient: does the loss depend on the model's weights?")
    scaled = [_scaled(replica, g, v) for g, v in zip(grads, variables, strict=True)]
    if replica.passes == 1:
        _update(optimizer, scaled, variables)
    else:
        _add_up(optimizer, scaled, variables)


def _scaled(replica: WeightReplica, gradient: Any, variable: Any) -> Any:
    """Return a gradient, divided by the number of ranks for a local variable, as in Horovod."""
    if gradient is None or not (replica.given.scale_local_gradients and replica.is_local(variable)):
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values / replica.size, gradient.indices, gradient.dense_shape)
    return gradient / replica.size


# -- several calls make a step ------------------------------------------------------------------------------------


def _add_up(optimizer: Any, grads: list[Any], variables: list[Any]) -> None:
    """Add gradients up on this rank; at each N-th call, take a step with their sum."""
    replica: WeightReplica = optimizer._async.replica
    dense = [_dense(replica, gradient) for gradient in grads]
    sums = [_sum_of(optimizer, v, gradient) for gradient, v in zip(dense, variables, strict=True)]
    factor = 1.0 / replica.passes if replica.given.average_aggregated_gradients else 1.0
    passed = replica.done
    assert passed is not None  # (several passes make a step)

    def last() -> tf.Tensor:
        totals: list[Any] = []
        for gradient, total in zip(dense, sums, strict=True):
            value = total if gradient is None or total is None else total + tf.cast(gradient, total.dtype)
            totals.append(None if value is None else value * tf.constant(factor, total.dtype))
        _update(optimizer, totals, variables)
        for total in sums:
            if total is not None:
                total.assign(tf.zeros_like(total))
        return _done(passed.assign(0))

    def earlier() -> tf.Tensor:
        for gradient, total in zip(dense, sums, strict=True):
            if gradient is not None:
                total.assign_add(tf.cast(gradient, total.dtype))
        return _done(passed.assign_add(1))

    tf.cond(passed + 1 >= replica.passes, last, earlier)


def _dense(replica: WeightReplica, gradient: Any) -> Any:
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    with tf.device(replica.given.device_sparse or None):
        return tf.convert_to_tensor(gradient)


def _sum_of(optimizer: Any, variable: Any, gradient: Any) -> Any:
    """Return the sum of a variable's gradients; None if it never had one."""
    replica: WeightReplica = optimizer._async.replica
    index = optimizer._get_variable_index(variable)
    if gradient is not None:
        replica.summed.add(index)
    return replica.sums[index] if index in replica.summed else None


# -- a step -------------------------------------------------------------------------------------------------------


def _update(optimizer: Any, grads: list[Any], variables: list[Any]) -> None:
    """Take a step; with Keras' gradient accumulation only the calls that move the weights are one."""
    steps = optimizer.gradient_accumulation_steps
    if not steps:
        _step(optimizer, grads, variables)
        return

    def step() -> tf.Tensor:
        _step(optimizer, grads, variables)
        return _done()

    tf.cond(
        (raw(optimizer._iterations) + 1) % steps == 0,
        step,
        lambda: _done(optimizer._wrapped_class.apply(optimizer, grads, variables)),
    )


def _step(optimizer: Any, grads: list[Any], variables: list[Any]) -> None:
    driver: LocalDriver = optimizer._async
    replica: WeightReplica = optimizer._async.replica
    flat = replica.mixed()
    eager = tf.executing_eagerly()
    # (no step begins before the one before it has been mixed, also in a graph of several)
    ready = [flat.variables[0].read_value(), *(g for g in grads if g is not None), *_loss_recorded(replica)]
    # (read here, as an op: the update increases the iterations, on which a schedule depends)
    rate = tf.cast(raw(optimizer._get_current_learning_rate()), tf.float64)
    with contextlib.nullcontext() if eager else tf.control_dependencies(ready):
        (begun,) = call_or_op(lambda rate: [_begin(driver, rate)], [rate], [tf.float64], [3])
    with driver.updating() if eager else contextlib.nullcontext():
        weight, before = begun[0], tf.zeros([0], flat.dtype)
        scaled = not isinstance(driver, LeaderDriver)  # (see LeaderWorker.weight and .wants_before)
        if scaled:
            before = tf.cond(begun[1] > 0, flat.joined, lambda: before)
        with (
            contextlib.nullcontext() if eager else tf.control_dependencies([begun]),
            _multiplied([*flat.variables, *map(raw, replica.iterates())], weight)
            if scaled
            else contextlib.nullcontext(),
            _updating(replica, None if not scaled or (eager and float(weight) == 1.0) else weight),
        ):
            if eager and begun[2] > 0:
                optimizer._wrapped_class.apply(optimizer, grads, variables)
            elif not eager:
                _apply_unless_done(optimizer, grads, variables, begun[2])
        corrected = [replica.velocities()] if driver.corrects_momentum else []
        given = {id(raw(v)) for gradient, v in zip(grads, variables, strict=True) if gradient is not None}
        indices = {i for i, v in enumerate(flat.variables) if id(v) in given}
        results = call_or_op(
            functools.partial(_end, driver, flat, indices),
            [before, *flat.values()],
            [one.dtype for one in (flat, *corrected)],
            [one.elements for one in (flat, *corrected)],
        )
        flat.write(results[0])
        if corrected:  # (not in Python: nothing would order it after the update, which has written them too)
            replica.add_to_momentum(results[-1], indices)


def _apply_unless_done(optimizer: Any, grads: list[Any], variables: list[Any], due: tf.Tensor) -> None:
    """Make the wrapped optimizer's update in a graph; in elastic jobs only if it is due."""

    def update() -> tf.Tensor:
        return _done(optimizer._wrapped_class.apply(optimizer, grads, variables))

    if LIFECYCLE.elastic:
        tf.cond(due > 0, update, _done)
    else:
        update()


@contextlib.contextmanager
def _multiplied(variables: Sequence[tf.Variable], weight: tf.Tensor) -> Iterator[None]:
    """Multiply variables by ``weight`` inside the context, and divide them by it at the end; eagerly also after an
    error."""

    def scale(factor: tf.Tensor) -> tf.Tensor:
        for variable in variables:
            variable.assign(variable * tf.cast(factor, variable.dtype))
        return _done()

    tf.cond(tf.not_equal(weight, 1.0), lambda: scale(weight), _done)
    try:
        yield
    finally:
        tf.cond(tf.not_equal(weight, 1.0), lambda: scale(1.0 / weight), _done)


@contextlib.contextmanager
def _updating(replica: WeightReplica, weight: tf.Tensor | None) -> Iterator[None]:
    """Return a context for Keras' update: the variables hold the model's weights times ``weight``, but moving averages
    are of the weights themselves, and constraints are applied to the mixed weights later."""
    replica.weight, replica.updates = weight, True
    try:
        with replica.without_constraints():
            yield
    finally:
        replica.weight, replica.updates = None, False


# -- losses -------------------------------------------------------------------------------------------------------


def note_loss(driver: LeaderDriver, loss: Any) -> None:
    """Record a step's loss, a number or a tensor of one; also while a ``tf.function`` is traced.

    Raises:
        ValueError: it is several numbers.
    """
    if not tf.is_tensor(loss):
        driver.record_loss(loss)
        return
    if loss.shape.num_elements() not in (1, None):
        raise ValueError(f"record_loss() takes one number, and this is a tensor of shape {loss.shape}")

    number = tf.stop_gradient(tf.reshape(loss, []))
    replica: WeightReplica = driver.replica  # type: ignore[assignment]
    if tf.executing_eagerly():
        driver.record_loss(number)
        replica.recorded = None
    else:
        # (not as an argument of the step's first op: a loss counts also where a step does not follow, after the last
        # of several backward passes or an overflow)
        replica.recorded = as_op(lambda value: driver.record_loss(value), [number], [])


def _loss_recorded(replica: WeightReplica) -> list[tf.Operation]:
    """Return what a step of a graph must wait for, so that its loss is recorded."""
    op, replica.recorded = replica.recorded, None
    graph: Any = tf.compat.v1.get_default_graph()
    while op is not None and graph is not None and graph is not op.graph:  # (it may be one around this one)
        graph = getattr(graph, "outer_graph", None)
    return [] if op is None or graph is None else [op]


# -- the Python side of a step ------------------------------------------------------------------------------------


def _begin(driver: LocalDriver, rate: tf.Tensor) -> tf.Tensor:
    """Begin a step with this learning rate.

    Returns:
        float64, shape (3,): the push-sum weight, whether ``_end`` needs the weights before the update too, and whether
        the update is due.
    """
    replica: Any = driver.replica
    replica.rate, replica.has_rate = float(rate), True
    start = driver.begin_step(changes_weights=replica.has_constraints())
    return constant((float(start.scale), float(start.needs_pre_update), float(start.updates)), tf.float64)


def _end(driver: LocalDriver, flat: Flat, given: set[int], before: tf.Tensor, *values: tf.Tensor) -> list[tf.Tensor]:
    """End a step.

    Args:
        driver: of the optimizer.
        flat: the weights.
        given: the indices of the weights that have a gradient.
        before: the weights before the update, shape (n,); empty if they are not needed.
        values: of the variables of ``flat`` after it.

    Returns:
        The new weights, shape (n,); then the correction of the momentum, if steps have one.
    """
    replica: WeightReplica = driver.replica  # type: ignore[assignment]
    replica.have_gradients = given
    with driver.updating():
        end = driver.end_step(before.numpy(), flat.vector(values))
        weights = replica.constrained(end.weights)
        driver.publish(weights)
    taken = flat.taken(weights)
    if not driver.corrects_momentum:
        return [taken]
    return [taken, np.zeros_like(end.weights) if end.correction is None else end.correction]


def _done(_: Any = None) -> tf.Tensor:
    """Return the result of a conditional branch that is run for its side effects."""
    return tf.constant(0)
