"""Methods that ``EagerOptimizer`` adds to the Keras optimizer's class: public methods, and methods that Keras calls."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import tensorflow as tf

from hvd_async.errors import ReplicaStateError
from hvd_async.optimizers import methods
from hvd_async.optimizers.eager import EagerDriver
from hvd_async.tensorflow.apply_round import Update
from hvd_async.tensorflow.checkpoint import StateMethods
from hvd_async.tensorflow.gradient_format import Layout, accumulated
from hvd_async.tensorflow.gradient_replica import GradientReplica
from hvd_async.tensorflow.ops import as_op
from hvd_async.tensorflow.variables import signature


class EagerMethods(StateMethods, methods.EagerMethods):
    """Methods of a wrapped Keras optimizer whose gradients travel."""

    _async: EagerDriver
    _wrapped_class: ClassVar[type[Any]]

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]  # it would warn of what it cannot
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        """Hand over the gradients, wait for this step's round, apply every round that is waiting.

        Args:
            grads: one a variable; None counts as zero.
            trainable_variables: as in Keras; those the optimizer was built with if None. One that is left out and not
                ``trainable`` is frozen: rounds that this rank leads do not move it.

        Raises:
            ValueError: no variable has a gradient.
            ReplicaMismatchError: at the first step, if the ranks' weights or settings differ. (Errors raised while a
                ``tf.function`` or ``fit()`` runs arrive inside a ``tf.errors`` exception, with their text.)
            FloatingPointError: NaN or infinity in the gradients, with ``nonfinite="raise"``.
            ReplicaStateError: ``weighting="samples"``, and the gradients' samples were not recorded.
        """
        take_step(self, list(grads), trainable_variables, None)

    def record_samples(self, samples: Any) -> None:
        """Record the number of samples of the next gradients, with ``weighting="samples"``, on every rank, before each
        ``apply()``; the last call counts. In Keras' ``fit()`` a callback of ``hvd.callbacks`` does it: it counts the
        batch, whatever ``sample_weight`` is, as Keras' mean does.

        With ``backward_passes_per_step`` a step's gradient is the sum of its passes, as in Horovod, and its samples are
        those of all passes; with ``average_aggregated_gradients`` it is their mean by samples.

        Args:
            samples: a whole number, 0 or more, or a tensor of one, also while a ``tf.function`` is traced. 0: this rank
                takes part with an empty batch, which has no weight.

        Raises:
            ValueError: no such number; or rounds are not weighted by samples.
        """
        note_samples(self._async, samples)

    # -- methods that Keras calls by name -----------------------------------------------------------------------

    def _backend_update_step(self: Any, grads: Any, trainable_variables: Any, learning_rate: Any) -> None:
        with self._async.replica.extrapolation.around_update(trainable_variables):
            self._wrapped_class._backend_update_step(self, grads, trainable_variables, learning_rate)

    def load_own_variables(self: Any, store: Any) -> None:
        """Load variables, for Keras' ``load_weights()`` and ``load_model()``, and reset the leads, which belong to the
        weights before, unless the file has some."""
        if self._async.replica.extrapolation is not None:
            self._async.replica.extrapolation.forget_leads()
        super().load_own_variables(store)

    def __setattr__(self: Any, name: str, value: Any) -> None:
        if name == "loss_scale_factor" and value is None:
            # LossScaleOptimizer's constructor removes it: there is no other sign of being wrapped in one.
            raise ReplicaStateError(
                "a LossScaleOptimizer cannot be around an EagerOptimizer (compile() puts one there under "
                "mixed_float16): it leaves steps out when a gradient overflows, and other ranks would wait for them. "
                "Write EagerOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))"
            )
        super().__setattr__(name, value)

    def register_local_var(self, variable: Any) -> None:
        """Raise: a variable that each rank trains alone is not possible here.

        Raises:
            ReplicaStateError: always.
        """
        raise ReplicaStateError(
            f"{signature(variable)} cannot be local: a rank applies rounds that other ranks lead, at their pace and "
            f"with their hyperparameters, so that all replicas stay the same, and a local variable would differ. Leave "
            f"it out of this optimizer and train it with a separate plain Keras optimizer."
        )

    def finalize_variable_values(self: Any, var_list: Any) -> None:
        """Set the averaged weights at the end of ``fit()``, with ``use_ema``, after a drain."""
        if self.use_ema and self._async.worker is not None:
            self.drain()  # (later rounds would be applied on top)
        self._wrapped_class.finalize_variable_values(self, var_list)


# -- a step, in a graph and eagerly ------------------------------------------------------------------------------------
# In a graph, ``apply`` is: a py_function for each bucket but the last that hands it over and returns; a py_function
# that hands over the last bucket, waits for the step's round and returns it; then a loop that applies a round and, in a
# py_function, ends it and fetches the next. So a step of b buckets and one round calls Python b + 1 times. TensorFlow
# runs the stateful ops of a function in the order of their creation, so no hand-over comes after the op that waits. The
# same code runs eagerly.
#
# Under ``quorum="all"`` Horovod's ops in the graph sum the buckets, each as soon as backward has filled it. Then
# a step calls Python three times: to begin, which tells the coordinator, to wait for the round's hyperparameters, and
# to end. A failure of Horovod in these ops is raised as TensorFlow's error, and the next call names the lost rank.
#
# A call of a py_function takes 30 us, and 50 us more if it returns NumPy numbers, so they return tensors or nothing.
# None has an int32 argument or result, which would exclude it from GPUs: TensorFlow's kernel for accelerators supports
# neither.


def take_step(optimizer: Any, grads: list[Any], trainable_variables: Any, scale: Any) -> Any:
    """Take a step with gradients of a loss that was multiplied by ``scale``; return whether all were finite (bool)."""
    if not grads:
        return tf.constant(True)
    replica: GradientReplica = optimizer._async.replica
    replica.scaled = scaled = scale is not None
    variables = list(optimizer._trainable_variables if trainable_variables is None else trainable_variables)
    layout = replica.prepare(variables)
    gradients = _indexed(optimizer, grads, variables, scale)
    known = {id(v) for v in variables}
    frozen = [i for i, v in enumerate(optimizer._trainable_variables) if not v.trainable and id(v) not in known]
    filled = [b for b, bucket in enumerate(layout.buckets) if not gradients.keys().isdisjoint(bucket.indices)]
    vectors = {b: layout.flatten(b, gradients) for b in filled}
    update = replica.update
    assert update is not None
    if replica.sums_in_graph():
        return _sum_in_graph(replica, layout, vectors, frozen, update, scaled)
    buckets = list(vectors)
    waits = 0 if scaled or replica.nonfinite == "raise" else len(buckets) - 1  # (all are checked before any leaves)
    step = functools.partial(replica.step, scaled, frozen, update, buckets[waits:])
    last = [*(vectors[bucket] for bucket in buckets[waits:]), *([] if update.scheduled else [replica.own_rate()])]
    end = functools.partial(replica.end_round, update)
    if tf.executing_eagerly():
        for bucket in buckets[:waits]:
            replica.give(bucket, vectors[bucket])
        finite, more, *parts = step(*last)
        while more:
            more, *parts = end(update(*parts))
        return finite
    given = [as_op(functools.partial(replica.give, bucket), [vectors[bucket]], []) for bucket in buckets[:waits]]
    with tf.control_dependencies(given):
        finite, more, *parts = as_op(step, last, [tf.bool, tf.bool, *update.types])

    def one_round(_: tf.Tensor, *parts: tf.Tensor) -> list[tf.Tensor]:
        more, *parts = as_op(end, [update(*parts)], [tf.bool, *update.types])
        return [tf.ensure_shape(more, []), *parts]

    tf.while_loop(lambda more, *_: more, one_round, [tf.ensure_shape(more, []), *parts], parallel_iterations=1)
    return tf.ensure_shape(finite, [])


def _sum_in_graph(
    replica: GradientReplica,
    layout: Layout,
    vectors: dict[int, tf.Tensor],
    frozen: list[int],
    update: Update,
    scaled: bool,
) -> tf.Tensor:
    """Add ops that take a step whose buckets they sum; return whether all gradients were finite (bool).

    Args:
        replica, layout, frozen, update: of the optimizer.
        vectors: by bucket; a missing one counts as zero.
        scaled: whether the loss was scaled: then all buckets are handed over or none.
    """
    every = [vectors.get(bucket, layout.nothing(bucket)) for bucket in range(len(layout))]
    finite = [tf.reduce_all(tf.math.is_finite(vector)) for vector in every]
    all_finite = tf.reduce_all(tf.stack(finite))
    given = [all_finite] * len(layout) if scaled else finite
    rate = [] if update.scheduled else [replica.own_rate()]
    # No step is promised before backward has come this far, so that input that ends or fails begins none.
    with tf.control_dependencies([all_finite] if scaled else [next(iter(vectors.values()))]):
        number = replica.optimizer._async.worker.number
        begun = as_op(functools.partial(replica.promise, number, frozen, update), rate, tf.bool)
    # (``begun`` differs by bucket and is no constant: TensorFlow would call Horovod to fold the sum of a bucket without
    # gradients, or merge such sums)
    goes = tf.unstack(tf.ensure_shape(begun, [len(layout)]))
    parts = zip(goes, given, every, strict=True)
    computed_at = _time_of(all_finite)
    sums = replica.sums([tf.where(go & has, vector, tf.zeros([], vector.dtype)) for go, has, vector in parts])
    tails = tf.stack([tf.cast(one[-layout.tail :], tf.float64) for one in sums])
    waited = _time_of(tails) - computed_at
    types = [tf.bool, *(one.dtype for one in rate)]
    flags, *rate = as_op(functools.partial(replica.fulfil, update), [tf.stack(given), tails, waited], types)
    applies, moves_all = tf.unstack(tf.ensure_shape(flags, [2]))

    def one_round() -> tf.Tensor:
        moved = tf.cond(
            moves_all,
            lambda: sums,
            lambda: as_op(functools.partial(replica.without_unmoved, update), sums, layout.dtypes),
        )
        done = as_op(replica.end, [update(*rate, *moved)], [])
        with tf.control_dependencies([done]):
            return tf.constant(True)

    tf.cond(applies, one_round, lambda: tf.constant(False))
    return all_finite


def _time_of(value: tf.Tensor) -> tf.Tensor:
    """Return the time at which a value is computed, on a device too (seconds since the epoch, float64, shape ())."""
    with tf.device("CPU"), tf.control_dependencies([tf.identity(value)]):
        return tf.timestamp()


def note_samples(driver: EagerDriver, samples: Any) -> None:
    """Record the number of samples of the next gradient; while a ``tf.function`` is traced, in each run of it.

    Raises:
        ValueError: it is not a whole number, or rounds are not weighted by samples.
    """
    if tf.executing_eagerly():
        driver.record_samples(samples)
        return
    driver.check_weighting()
    if not tf.is_tensor(samples):  # (a batch's static shape, say)
        samples = tf.constant(driver.samples_of(samples), tf.int64)
    if not samples.dtype.is_integer or samples.shape.num_elements() not in (1, None):
        raise ValueError(
            f"record_samples() takes one integer, got a tensor of {samples.dtype.name} and shape {samples.shape}: "
            f"pass tf.shape(x)[0]"
        )

    # (stateful: it runs before the ops of a step that follows)
    as_op(lambda count: driver.record_samples(count), [tf.cast(tf.reshape(samples, []), tf.int64)], [])


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
