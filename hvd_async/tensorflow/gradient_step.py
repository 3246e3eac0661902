"""A step of a wrapped Keras optimizer, in a graph and eagerly.

In a graph, ``apply`` is: for each bucket a py_function that hands it over and returns, one py_function that waits for
the step's round, then a loop that fetches each waiting round and applies it. TensorFlow runs a function's stateful ops
in the order they were made, so no hand-over is behind the op that waits. The same code runs eagerly.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

from hvd_async.tensorflow import tracebacks
from hvd_async.tensorflow.apply_round import Update
from hvd_async.tensorflow.buffers import Layout, Terms, accumulated, partition, raw, signature
from hvd_async.tensorflow.compression import Codec
from hvd_async.tensorflow.gradient_feed import Feed
from hvd_async.tensorflow.state import State

OP_NAME = "hvd_async_needs_jit_compile_False"
"""XLA, which cannot run such ops, tells people this name."""


class Stepping:
    """``apply`` and what belongs to it; ``EagerMixin`` has the rest."""

    _async: State

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
        """
        self._async_take(list(grads), trainable_variables, None)

    def _async_take(self: Any, grads: list[Any], trainable_variables: Any, scale: Any) -> Any:
        """A step with gradients of a loss that was multiplied by ``scale``; returns whether all were finite (bool)."""
        if not grads:
            return tf.constant(True)
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        layout = self._async_prepare(variables)
        gradients = self._async_indexed(grads, variables, scale)
        frozen = [i for i, v in enumerate(self._trainable_variables) if not v.trainable and not _among(v, variables)]
        vectors = {b: layout.flatten(b, gradients) for b in range(len(layout)) if layout.has_any(b, gradients)}
        update: Update = self._async.update
        give = functools.partial(self._async_give, scale is not None)
        step = functools.partial(self._async_step, scale is not None, frozen, update.digest)
        rate = [] if update.scheduled else [self._async_own_rate()]
        if tf.executing_eagerly():
            for bucket, vector in vectors.items():
                give(bucket, vector)
            rounds, finite = step(*rate)
            for _ in range(int(rounds)):
                self._async_applied(update(*self._async_fetch(update)))
            return tf.constant(bool(finite))
        given = [_py(functools.partial(give, bucket), [vector], tf.int32) for bucket, vector in vectors.items()]
        with tf.control_dependencies(given):
            outcome = tf.reshape(_py(step, rate, tf.int32), [2])

        def one_round(done: tf.Tensor) -> tf.Tensor:
            finished = update(*_py(functools.partial(self._async_fetch, update), [done], update.types))
            return done + tf.reshape(_py(self._async_applied, [finished], tf.int32), [])

        tf.while_loop(lambda done: done < outcome[0], one_round, [tf.constant(0)], parallel_iterations=1)
        return outcome[1] > 0

    def _async_prepare(self: Any, variables: list[Any]) -> Layout:
        """Build the wrapped optimizer, once, outside of any graph."""
        state = self._async
        with tf.init_scope():
            if not self.built:
                self.build(variables)
                self.built = True
            if state.layout is None:
                self._async_lay_out()
            if state.update is None or state.update.stale():
                state.update = Update(self, state.layout, state.round_transform, lambda: state.momentum_correction)
        layout: Layout = state.layout
        return layout

    def _async_lay_out(self: Any) -> None:
        state, variables = self._async, self._trainable_variables
        overwritten = [v for v in variables if self._overwrite_variable_with_gradient(v)]
        if overwritten:
            raise ValueError(
                f"{signature(overwritten[0])} is overwritten by its gradient (float8 training), which cannot be "
                f"averaged with late ones: take another dtype policy"
            )
        buckets = partition([raw(v) for v in variables], state.cap_bytes, state.groups)
        dtypes = dict.fromkeys(accumulated(v) for v in variables)
        before, after = state.scales
        codec = Codec(state.compression, dtypes, state.size, state.config["max_staleness"], after)
        terms = Terms(before, after / codec.scale, codec.slots, state.index % codec.slots, state.devices[0])
        state.codec, state.layout = codec, Layout(variables, buckets, terms)
        state.feed = Feed(state.layout, state.passes, state.average_passes, state.nonfinite)

    def _async_indexed(self: Any, gradients: list[Any], variables: list[Any], scale: Any) -> dict[int, tf.Tensor]:
        """Gradients by their variable's index, dense and unscaled."""
        self._check_variables_are_known(variables)
        indexed = {}
        static = None if self.loss_scale_factor is None else 1.0 / self.loss_scale_factor
        for gradient, variable in zip(gradients, variables, strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                with tf.device(self._async.devices[1] or None):
                    gradient = tf.convert_to_tensor(gradient)
            if gradient is None:
                continue
            gradient = tf.convert_to_tensor(gradient)
            for factor in (static, None if scale is None else 1.0 / scale):
                if factor is not None:
                    gradient = tf.cast(gradient, accumulated(variable)) * tf.cast(factor, accumulated(variable))
            indexed[self._get_variable_index(variable)] = gradient
        if not indexed:
            raise ValueError("no variable has a gradient: does the loss depend on the model's weights?")
        return indexed

    def _async_own_rate(self: Any) -> tf.Tensor:
        """This rank's learning rate now."""
        return tf.cast(raw(self._get_current_learning_rate()), tf.float32) + 0.0

    # -- the Python side of a step ----------------------------------------------------------------------------

    def _async_give(self: Any, scaled: bool, bucket: int, vector: tf.Tensor) -> np.int32:
        state = self._async
        state.feed.give(bucket, vector, state.met, scaled)
        return np.int32(0)

    def _async_step(self: Any, scaled: bool, frozen: list[int], digest: int, *rate: tf.Tensor) -> Any:
        """Returns int32 of shape (2,): how many rounds are to be applied, whether this rank's gradients were finite."""
        state = self._async
        group: dict[str, Any] = {"frozen": frozen, "settings": digest}
        if rate:
            group["learning_rate"] = float(rate[0])
        rounds, finite = state.feed.take(self._async_worker, [group], scaled)
        state.waiting = deque(rounds)
        self._async_pass_empty()
        return np.array([sum(round_.gradients > 0 for round_ in state.waiting), finite], np.int32)

    def _async_fetch(self: Any, update: Update, _: Any = None) -> list[Any]:
        """The next round of this step, as ``update`` takes it."""
        state = self._async
        round_ = state.waiting.popleft()
        state.worker.begin(round_)
        state.put_back = update.keep(round_)
        return list(update.parts(round_))

    def _async_applied(self: Any, _: Any = None) -> np.int32:
        """The round that was fetched last is applied: one more is done."""
        state = self._async
        state.put_back()
        state.worker.end()
        self._async_pass_empty()
        return np.int32(1)

    def _async_pass_empty(self: Any) -> None:
        """Leave rounds alone in which there is nothing."""
        waiting = self._async.waiting
        while waiting and not waiting[0].gradients:
            with self._async.worker.applying(waiting.popleft()):
                pass


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
