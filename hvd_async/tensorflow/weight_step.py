"""A step of a Keras optimizer whose rank has weights of its own, in a graph and eagerly.

In a graph it is: a py_function that begins the step, meets the other ranks and returns the push-sum weight; the wrapped
optimizer's own ``apply``, on weights times that; one py_function that gives the weights as a vector to the driver,
which waits for messages and mixes them in, applies Keras' constraints, once a step, to the mixed weights, and returns
these. Weights are copied once into the vector; the variables then share the mixed one's memory. TensorFlow runs the ops
that read and write a variable in the order in which they were made.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_async.optimizers.leader import LeaderDriver
from hvd_async.optimizers.local import LocalDriver
from hvd_async.tensorflow.collectives import LIFECYCLE
from hvd_async.tensorflow.gradient_step import _py
from hvd_async.tensorflow.memory import constant
from hvd_async.tensorflow.variables import Flat, raw, with_finite
from hvd_async.tensorflow.weight_replica import WeightReplica


def apply(optimizer: Any, grads: Sequence[Any], variables: list[Any]) -> None:
    """Take a step of a wrapped optimizer, or add its gradients up.

    Args:
        optimizer: ours.
        grads: one a variable, at least one; None where there is none.
        variables: the optimizer's own, or some of them.

    Raises:
        ValueError: no variable has a gradient.
    """
    replica: WeightReplica = optimizer._async.replica
    replica.set_up(variables)
    optimizer._check_variables_are_known(variables)
    if all(gradient is None for gradient in grads):
        raise ValueError("no variable has a gradient: does the loss depend on the model's weights?")
    scaled = [_scaled(replica, g, v) for g, v in zip(grads, variables, strict=True)]
    if replica.passes == 1:
        _update(optimizer, scaled, variables)
    else:
        _add_up(optimizer, scaled, variables)


def _scaled(replica: WeightReplica, gradient: Any, variable: Any) -> Any:
    """Horovod divides gradients of local variables by the number of ranks: the loss is their average."""
    if gradient is None or not (replica.scale_local and replica.is_local(variable)):
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
    factor = 1.0 / replica.passes if replica.average_passes else 1.0
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
    with tf.device(replica.device_sparse or None):
        return tf.convert_to_tensor(gradient)


def _sum_of(optimizer: Any, variable: Any, gradient: Any) -> Any:
    """Return where the variable's gradients are added up; None if it never had one."""
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
    written = [flat] if replica.averaged is None else [flat, replica.averaged]
    eager = tf.executing_eagerly()
    # (no step begins before the one before it has been mixed, also in a graph of several)
    ready = [flat.variables[0].read_value(), *(g for g in grads if g is not None), *_loss_recorded(replica)]
    # (read here, as an op: the update increases the iterations, by which a schedule goes)
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
            _multiplied(flat, weight) if scaled else contextlib.nullcontext(),
            _updating(replica, None if not scaled or (eager and float(weight) == 1.0) else weight),
        ):
            if eager and begun[2] > 0:
                optimizer._wrapped_class.apply(optimizer, grads, variables)
            elif not eager:
                _apply_unless_done(optimizer, grads, variables, begun[2])
        corrected = [replica.velocities()] if driver.corrects_momentum else []
        results = call_or_op(
            functools.partial(_end, driver, written),
            [before, *(value for one in written for value in one.values())],
            [one.dtype for one in (*written, *corrected)],
            [one.elements for one in (*written, *corrected)],
        )
        for one, vector in zip(written, results, strict=False):
            one.write(vector)
        if corrected:  # (not in Python: nothing would order it after the update, which has written them too)
            replica.add_to_momentum(results[-1], _with_gradient(replica, grads, variables))


def _with_gradient(replica: WeightReplica, grads: list[Any], variables: list[Any]) -> set[int]:
    """Return the indices, among the variables that are mixed, of those with a gradient."""
    given = {id(raw(v)) for gradient, v in zip(grads, variables, strict=True) if gradient is not None}
    return {index for index, variable in enumerate(replica.mixed().variables) if id(variable) in given}


def _apply_unless_done(optimizer: Any, grads: list[Any], variables: list[Any], due: tf.Tensor) -> None:
    """The wrapped optimizer's update in a graph; where ranks may be lost, only if it is due."""

    def update() -> tf.Tensor:
        return _done(optimizer._wrapped_class.apply(optimizer, grads, variables))

    if LIFECYCLE.elastic:
        tf.cond(due > 0, update, _done)
    else:
        update()


@contextlib.contextmanager
def _multiplied(flat: Flat, weight: tf.Tensor) -> Iterator[None]:
    """Multiply the variables by ``weight`` inside the context, and divide them by it at the end; eagerly also after an
    error."""

    def scale(factor: tf.Tensor) -> tf.Tensor:
        flat.scale(factor)
        return _done()

    tf.cond(tf.not_equal(weight, 1.0), lambda: scale(weight), _done)
    try:
        yield
    finally:
        tf.cond(tf.not_equal(weight, 1.0), lambda: scale(1.0 / weight), _done)


@contextlib.contextmanager
def _updating(replica: WeightReplica, weight: tf.Tensor | None) -> Iterator[None]:
    """Around Keras' update while it is traced, or done: the variables hold the model's weights times ``weight``, but
    moving averages are of the weights themselves, and constraints wait for the mixed weights."""
    replica.weight, replica.updates = weight, True
    try:
        with replica.without_constraints():
            yield
    finally:
        replica.weight, replica.updates = None, False


# -- losses -------------------------------------------------------------------------------------------------------


def record_loss(driver: LeaderDriver, loss: Any) -> None:
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
        replica.recorded = _py(lambda value: driver.record_loss(value), [number], [])


def _loss_recorded(replica: WeightReplica) -> list[tf.Operation]:
    """Return what a step of a graph must wait for, so that its loss is recorded."""
    told, replica.recorded = replica.recorded, None
    return [told] if told is not None and told.graph in _around(tf.compat.v1.get_default_graph()) else []


def _around(graph: Any) -> list[Any]:
    """Return a graph and those in which it is being built."""
    graphs = []
    while graph is not None:
        graphs.append(graph)
        graph = getattr(graph, "outer_graph", None)
    return graphs


# -- the Python side of a step ------------------------------------------------------------------------------------


def _begin(driver: LocalDriver, rate: tf.Tensor) -> tf.Tensor:
    """Begin a step with this learning rate.

    Returns:
        float64, shape (3,): the push-sum weight, whether ``_end`` needs the weights before the update too, and whether
        the update is due.
    """
    driver.replica.rate = float(rate)  # type: ignore[attr-defined]
    start = driver.begin_step(changes_weights=driver.replica.has_constraints())  # type: ignore[attr-defined]
    return constant((float(start.scale), float(start.needs_pre_update), float(start.updates)), tf.float64)


def _end(driver: LocalDriver, flats: Sequence[Flat], before: tf.Tensor, *values: tf.Tensor) -> list[tf.Tensor]:
    """End a step.

    Args:
        driver: of the optimizer.
        flats: the weights, and the batch-norm statistics if they travel.
        before: the weights before the update, shape (n,); empty if they are not needed.
        values: of the variables of ``flats`` after it, one after the other.

    Returns:
        Vectors to go on with, one for each of ``flats``; then the correction to add to the momentum, if it has any.
    """
    rest = iter(values)
    after, *own = (flat.vector(list(itertools.islice(rest, len(flat.variables)))) for flat in flats)
    end = driver.end_step(before.numpy(), after, with_finite(own[0], flats[1].sizes) if own else None)
    weights = driver.replica.constrained(end.weights)
    driver.publish(weights)
    settled: list[Any] = own
    if end.statistics is not None:
        averaged, known = np.asarray(end.statistics).reshape(2, -1)
        settled = [np.where(known > 0, averaged, one) for one in own]
    taken = [flat.taken(vector) for flat, vector in zip(flats, (weights, *settled), strict=True)]
    if not driver.corrects_momentum:
        return taken
    return [*taken, np.zeros_like(end.weights) if end.correction is None else end.correction]


def call_or_op(
    call: Callable[..., list[Any]], inputs: list[tf.Tensor], dtypes: list[tf.DType], elements: Any
) -> list[tf.Tensor]:
    """Do ``call`` now, or make it an op of the graph that is being built.

    Args:
        call: takes the inputs, returns as many vectors as there are dtypes.
        inputs: of it.
        dtypes: of the results.
        elements: of each result.
    """
    if tf.executing_eagerly():
        return [tf.convert_to_tensor(one, dtype) for one, dtype in zip(call(*inputs), dtypes, strict=True)]
    results = _py(call, inputs, dtypes)
    return [tf.ensure_shape(one, [n]) for one, n in zip(results, elements, strict=True)]


def _done(_: Any = None) -> tf.Tensor:
    """Return what a branch of a condition returns that was there for its effects."""
    return tf.constant(0)
