"""A step of a wrapped Keras optimizer, in a graph and eagerly.

In a graph, ``apply`` is: for each bucket but the last a py_function that hands it over and returns; a py_function that
hands over the last, waits for the step's round and returns it; then a loop that applies a round and, in a py_function,
ends it and fetches the next. So a step of b buckets and one round calls Python b + 1 times. TensorFlow runs a
function's stateful ops in the order they were made, so no hand-over is behind the op that waits. The same code runs
eagerly.

A call of a py_function costs 30 us, and 50 us more if it returns NumPy's numbers: ours return tensors, or nothing. None
takes or returns an int32, which would keep it off a GPU: TensorFlow's kernel for accelerators does neither.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

from hvd_async.optimizers.eager import EagerDriver
from hvd_async.tensorflow import tracebacks
from hvd_async.tensorflow.bucket_layout import accumulated
from hvd_async.tensorflow.gradient_replica import GradientReplica

OP_NAME = "hvd_async_needs_jit_compile_False"
"""XLA, which cannot run such ops, tells people this name."""


def take(optimizer: Any, grads: list[Any], trainable_variables: Any, scale: Any) -> Any:
    """Take a step with gradients of a loss that was multiplied by ``scale``; returns whether all were finite (bool)."""
    if not grads:
        return tf.constant(True)
    replica: GradientReplica = optimizer._async.replica
    variables = list(optimizer._trainable_variables if trainable_variables is None else trainable_variables)
    layout = replica.set_up(variables)
    gradients = _indexed(optimizer, grads, variables, scale)
    frozen = [i for i, v in enumerate(optimizer._trainable_variables) if not v.trainable and not _among(v, variables)]
    vectors = {b: layout.flatten(b, gradients) for b in range(len(layout)) if layout.has_any(b, gradients)}
    update = replica.update
    assert update is not None
    buckets, scaled = list(vectors), scale is not None
    waits = 0 if scaled or replica.nonfinite == "raise" else len(buckets) - 1  # (all are looked at before any leaves)
    give = functools.partial(replica.give, scaled)
    step = functools.partial(replica.step, scaled, frozen, update, buckets[waits:])
    last = [*(vectors[bucket] for bucket in buckets[waits:]), *([] if update.scheduled else [replica.own_rate()])]
    end = functools.partial(replica.end_round, update)
    if tf.executing_eagerly():
        for bucket in buckets[:waits]:
            give(bucket, vectors[bucket])
        finite, more, *parts = step(*last)
        while more:
            more, *parts = end(update(*parts))
        return finite
    given = [_py(functools.partial(give, bucket), [vectors[bucket]], []) for bucket in buckets[:waits]]
    with tf.control_dependencies(given):
        finite, more, *parts = _py(step, last, [tf.bool, tf.bool, *update.types])

    def one_round(_: tf.Tensor, *parts: tf.Tensor) -> list[tf.Tensor]:
        more, *parts = _py(end, [update(*parts)], [tf.bool, *update.types])
        return [tf.ensure_shape(more, []), *parts]

    tf.while_loop(lambda more, *_: more, one_round, [tf.ensure_shape(more, []), *parts], parallel_iterations=1)
    return tf.ensure_shape(finite, [])


def record_samples(driver: EagerDriver, samples: Any) -> None:
    """Record of how many samples the next gradient is the mean; while a ``tf.function`` is traced, in each run of it.

    Raises:
        ValueError: no whole number, or rounds are not weighted by samples.
    """
    if tf.executing_eagerly():
        driver.record_samples(samples)
        return
    driver.check_weighting()
    if not tf.is_tensor(samples):  # (a batch's static shape, say)
        samples = tf.constant(driver.samples_of(samples), tf.int64)
    if not samples.dtype.is_integer or samples.shape.num_elements() not in (1, None):
        raise ValueError(
            f"record_samples() takes one whole number, and this is a tensor of {samples.dtype.name} and shape "
            f"{samples.shape}: give tf.shape(x)[0]"
        )

    # (stateful: it runs before the ops of a step that follows)
    _py(lambda count: driver.record_samples(count), [tf.cast(tf.reshape(samples, []), tf.int64)], [])


def _indexed(optimizer: Any, gradients: list[Any], variables: list[Any], scale: Any) -> dict[int, tf.Tensor]:
    """Return gradients by their variable's index, dense and unscaled."""
    optimizer._check_variables_are_known(variables)
    indexed = {}
    static = None if optimizer.loss_scale_factor is None else 1.0 / optimizer.loss_scale_factor
    for gradient, variable in zip(gradients, variables, strict=True):
        if isinstance(gradient, tf.IndexedSlices):
            with tf.device(optimizer._async.replica.devices[1] or None):
                gradient = tf.convert_to_tensor(gradient)
        if gradient is None:
            continue
        gradient = tf.convert_to_tensor(gradient)
        for factor in (static, None if scale is None else 1.0 / scale):
            if factor is not None:
                gradient = tf.cast(gradient, accumulated(variable)) * tf.cast(factor, accumulated(variable))
        indexed[optimizer._get_variable_index(variable)] = gradient
    if not indexed:
        raise ValueError("no variable has a gradient: does the loss depend on the model's weights?")
    return indexed


def _among(variable: Any, variables: Sequence[Any]) -> bool:
    return any(variable is one for one in variables)


def _py(call: Callable[..., Any], inputs: list[Any], types: Any) -> Any:
    """``call`` as an op of the graph that is being built."""

    def readable(*arguments: Any) -> Any:
        try:
            return call(*arguments)
        except HorovodInternalError as error:
            # The graph makes a tf.errors.UnknownError of it, which hvd.elastic takes for Horovod's by this word.
            told = HorovodInternalError(f"HorovodAllreduce: {error}")
            tracebacks.remember(told)
            raise told from error
        except Exception as error:
            tracebacks.remember(error)
            raise

    return tf.py_function(readable, inputs, types, name=OP_NAME)
