"""A step of a Keras optimizer whose rank has weights of its own, in a graph and eagerly.

In a graph, ``apply`` is: a py_function that meets the other ranks and tells the push-sum weight; the wrapped
optimizer's own ``apply``, on weights times that; one py_function that gives the weights as a vector to the worker,
which waits for messages, and gets them back mixed. TensorFlow runs what reads and writes a variable in the order in
which it was made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_async.tensorflow.buffers import raw, signature
from hvd_async.tensorflow.flat import Flat
from hvd_async.tensorflow.gradient_feed import is_finite
from hvd_async.tensorflow.gradient_step import _py
from hvd_async.tensorflow.local_state import LocalSettings


class LocalStepping:
    """``apply`` and what belongs to it; ``LocalMixin`` has the rest."""

    _async: LocalSettings

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
            ReplicaStateError: an earlier step was broken off here.
            FloatingPointError: the step has made a weight NaN or infinite; nothing was sent.
        """
        grads = list(grads)
        if not grads:
            return
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        self._async_prepare(variables)
        self._check_variables_are_known(variables)
        if all(gradient is None for gradient in grads):
            raise ValueError("no variable has a gradient: does the loss depend on the model's weights?")
        grads = [self._async_scaled(g, v) for g, v in zip(grads, variables, strict=True)]
        if self._async.passes == 1:
            self._async_update(grads, variables)
        else:
            self._async_add_up(grads, variables)

    def _async_prepare(self: Any, variables: list[Any]) -> None:
        """Build the wrapped optimizer, once, outside of any graph."""
        state = self._async
        with tf.init_scope():
            if not self.built:
                self.build(variables)
                self.built = True
            if state.flat is None:
                overwritten = [v for v in self._trainable_variables if self._overwrite_variable_with_gradient(v)]
                if overwritten:
                    raise ValueError(
                        f"{signature(overwritten[0])} is overwritten by its gradient (float8 training), which other "
                        f"ranks' cannot be mixed with: take another dtype policy"
                    )
                state.flat = Flat([v for v in self._trainable_variables if not state.is_local(v)], state.devices[0])
            if state.passes > 1 and state.done is None:
                state.done = tf.Variable(0, trainable=False)

    def _async_scaled(self: Any, gradient: Any, variable: Any) -> Any:
        """Horovod divides gradients of local variables by the number of ranks: the loss is their average."""
        state = self._async
        if gradient is None or not (state.scale_local and state.is_local(variable)):
            return gradient
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(gradient.values / state.size, gradient.indices, gradient.dense_shape)
        return gradient / state.size

    # -- several calls make a step ----------------------------------------------------------------------------

    def _async_add_up(self: Any, grads: list[Any], variables: list[Any]) -> None:
        """Add gradients up on this rank; at each N-th call, take a step with their sum."""
        state = self._async
        dense = [self._async_dense(gradient) for gradient in grads]
        sums = [self._async_sum_of(v, gradient) for gradient, v in zip(dense, variables, strict=True)]
        factor = 1.0 / state.passes if state.average_passes else 1.0

        def last() -> tf.Tensor:
            totals: list[Any] = []
            for gradient, total in zip(dense, sums, strict=True):
                value = total if gradient is None or total is None else total + tf.cast(gradient, total.dtype)
                totals.append(None if value is None else value * tf.constant(factor, total.dtype))
            self._async_update(totals, variables)
            for total in sums:
                if total is not None:
                    total.assign(tf.zeros_like(total))
            return _done(state.done.assign(0))

        def earlier() -> tf.Tensor:
            for gradient, total in zip(dense, sums, strict=True):
                if gradient is not None:
                    total.assign_add(tf.cast(gradient, total.dtype))
            return _done(state.done.assign_add(1))

        tf.cond(state.done + 1 >= state.passes, last, earlier)

    def _async_dense(self: Any, gradient: Any) -> Any:
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient
        with tf.device(self._async.devices[1] or None):
            return tf.convert_to_tensor(gradient)

    def _async_sum_of(self: Any, variable: Any, gradient: Any) -> Any:
        """Where the variable's gradients are added up; None if it never had one."""
        index = self._get_variable_index(variable)
        if gradient is not None and index not in self._async.sums:
            with tf.init_scope():
                self._async.sums[index] = tf.Variable(tf.zeros_like(raw(variable)), trainable=False)
        return self._async.sums.get(index)

    # -- a step -----------------------------------------------------------------------------------------------

    def _async_update(self: Any, grads: list[Any], variables: list[Any]) -> None:
        """A step; with Keras' gradient accumulation only the calls that move the weights are one."""
        steps = self.gradient_accumulation_steps
        if not steps:
            self._async_step(grads, variables)
            return

        tf.cond(
            (raw(self._iterations) + 1) % steps == 0,
            lambda: _done(self._async_step(grads, variables)),
            lambda: _done(self._wrapped_class.apply(self, grads, variables)),
        )

    def _async_step(self: Any, grads: list[Any], variables: list[Any]) -> None:
        flat: Flat = self._async.flat
        eager = tf.executing_eagerly()
        # (no step begins before the one before it has been mixed, also in a graph of several)
        ready = [flat.variables[0].read_value(), *(g for g in grads if g is not None)]
        with contextlib.nullcontext() if eager else tf.control_dependencies([*ready, *self._async_first()]):
            begun = call_or_op(self._async_begin, [], tf.float64, [2])
        with self._async_updating() if eager else contextlib.nullcontext():
            weight, nothing = begun[0], tf.zeros([0], flat.dtype)

            def scale() -> tf.Tensor:
                flat.scale(weight)
                return _done()

            tf.cond(tf.not_equal(weight, 1.0), scale, _done)
            before = tf.cond(begun[1] > 0, flat.read, lambda: nothing)
            with self._async_biased(None if eager and float(weight) == 1.0 else weight):
                self._wrapped_class.apply(self, grads, variables)
            done = self._async_before_mix()
            with contextlib.nullcontext() if eager else tf.control_dependencies(done):
                mixed = call_or_op(self._async_mix, [before, flat.read()], flat.dtype, [flat.elements])
            flat.write(mixed)

    def _async_first(self) -> list[tf.Tensor]:
        """What a step of a graph must wait for."""
        return []

    def _async_before_mix(self) -> list[tf.Tensor]:
        """What there is to do between the wrapped optimizer's step and the mixing, and what to wait for in a graph."""
        return []

    @contextlib.contextmanager
    def _async_biased(self: Any, weight: tf.Tensor | None) -> Iterator[None]:
        """While Keras' update is traced, or done: the variables hold the model's weights times ``weight``, but moving
        averages and constraints are of the model's weights themselves."""
        state = self._async
        constrained = []
        if weight is not None:
            constrained = [v for v in self._trainable_variables if v.constraint is not None and not state.is_local(v)]
        before = [v.constraint for v in constrained]
        state.weight = weight
        try:
            for variable, constraint in zip(constrained, before, strict=True):
                variable.constraint = _biased(constraint, weight)
            yield
        finally:
            state.weight = None
            for variable, constraint in zip(constrained, before, strict=True):
                variable.constraint = constraint

    def _update_model_variables_moving_average(self: Any, trainable_variables: Any) -> None:
        state = self._async
        if state.weight is not None:
            trainable_variables = [
                v if state.is_local(v) else raw(v) / tf.cast(state.weight, raw(v).dtype) for v in trainable_variables
            ]
        self._wrapped_class._update_model_variables_moving_average(self, trainable_variables)

    def _overwrite_model_variables_with_average_value(self: Any, trainable_variables: Any) -> None:
        self._wrapped_class._overwrite_model_variables_with_average_value(self, trainable_variables)
        if self._async.weight is not None:
            self._async.flat.scale(self._async.weight)

    # -- the Python side of a step ----------------------------------------------------------------------------

    def _async_begin(self: Any) -> np.ndarray[Any, Any]:
        """Returns float64 of shape (2,): the push-sum weight, and whether ``_async_mix`` wants the weights before the
        update too. The first call meets the other ranks."""
        worker = self._async_worker()
        worker.check_step()
        self._async.stepping = True
        return np.array([worker.weight, worker.wants_before], np.float64)

    def _async_mix(self: Any, before: tf.Tensor, after: tf.Tensor) -> np.ndarray[Any, Any]:
        """Weights times the push-sum weight, before (if it wants them) and after the update -> mixed weights."""
        weights = after.numpy()
        with self._async_updating():
            if not is_finite(weights):
                raise FloatingPointError(self._async_not_finite())
            mixed: np.ndarray[Any, Any] = self._async.worker.mix(before.numpy(), weights)
        self._async.stepping = False
        return mixed

    def _async_not_finite(self: Any) -> str:
        bad = [v for v in self._trainable_variables if not is_finite(raw(v).numpy().reshape(-1))]
        return (
            f"this rank's step has made weights NaN or infinite ({', '.join(map(signature, bad[:5]))}), which would "
            f"spread to all ranks; nothing was sent. Lower the learning rate, clip gradients, or wrap a "
            f"keras.optimizers.LossScaleOptimizer"
        )

    def _async_check_mixed(self: Any) -> None:
        state = self._async
        if state.stepping:
            state.stepping = False
            state.broken = state.broken or "a step was broken off: an op of the training step's graph failed"


def call_or_op(call: Callable[..., Any], inputs: list[tf.Tensor], dtype: tf.DType, shape: list[int]) -> tf.Tensor:
    """``call`` now, or as an op of the graph that is being built."""
    if tf.executing_eagerly():
        return tf.convert_to_tensor(call(*inputs), dtype)
    return tf.ensure_shape(_py(call, inputs, dtype), shape)


def _done(_: Any = None) -> tf.Tensor:
    """What a branch of a condition returns that was there for its effects."""
    return tf.constant(0)


def _biased(constraint: Callable[[Any], Any], weight: tf.Tensor) -> Callable[[Any], Any]:
    """A constraint of weights, for weights times ``weight``."""

    def biased(value: Any) -> Any:
        factor = tf.cast(weight, raw(value).dtype)
        return constraint(raw(value) / factor) * factor

    return biased
