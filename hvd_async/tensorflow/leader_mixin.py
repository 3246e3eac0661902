"""What ``LeaderOptimizer`` adds to the class of the Keras optimizer it wraps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_async.algorithms.leader.worker import LeaderWorker
from hvd_async.optimizers.leader import LeaderState, LeaderWrapped
from hvd_async.tensorflow.buffers import raw
from hvd_async.tensorflow.flat import Flat
from hvd_async.tensorflow.gradient_feed import is_finite
from hvd_async.tensorflow.local_mixin import LocalMixin, statistics
from hvd_async.tensorflow.local_state import LocalSettings
from hvd_async.tensorflow.weight_step import call_or_op

Array = np.ndarray[Any, Any]


class Settings(LocalSettings, LeaderState):
    """What the wrapper was given, and what it keeps between calls."""

    told: tf.Tensor | None = None
    """In a graph that is being built: that a loss was recorded which belongs to the next step."""
    statistics: Flat | None = None
    """What pulls average beside the weights."""
    updates = False
    """Whether the wrapped optimizer's update is traced, or done."""


class LeaderMixin(LocalMixin, LeaderWrapped):
    """Methods of a wrapped Keras optimizer."""

    _async: Settings

    def _async_make(self, engine: Any, finish: Callable[[bool], None]) -> LeaderWorker:
        self._async_need_built()
        return super()._async_make(engine, finish)

    # -- losses -----------------------------------------------------------------------------------------------

    def record_loss(self, loss: Any) -> None:
        """Say what this step's training loss was, before ``apply()``: the lowest mean of the last ones leads. Keras'
        ``fit()`` does it by itself.

        Args:
            loss: a number, or a tensor of one; also while a ``tf.function`` is traced.

        Raises:
            ValueError: it is several numbers.
        """
        if tf.is_tensor(loss):
            if loss.shape.num_elements() not in (1, None):
                raise ValueError(f"record_loss() takes one number, and this is a tensor of shape {loss.shape}")
            told = call_or_op(self._async_tell, [tf.stop_gradient(tf.reshape(loss, []))], tf.float64, [])
            self._async.told = None if tf.executing_eagerly() else told
        else:
            super().record_loss(float(loss))

    def scale_loss(self: Any, loss: Any) -> Any:
        """As Keras', which gives it the loss of each training step."""
        self.record_loss(loss)
        return self._wrapped_class.scale_loss(self, loss)

    def _async_tell(self, loss: tf.Tensor) -> np.ndarray[Any, Any]:
        self._async.losses.append(float(loss))
        return np.zeros([], np.float64)

    def _async_first(self) -> list[tf.Tensor]:
        told, self._async.told = self._async.told, None
        return [told] if told is not None and told.graph in _around(tf.compat.v1.get_default_graph()) else []

    def _async_begin(self) -> Any:
        self._async_losses(self._async_worker())
        return super()._async_begin()

    # -- steps ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _async_biased(self, weight: tf.Tensor | None) -> Iterator[None]:
        with super()._async_biased(weight):
            self._async.updates = True
            try:
                yield
            finally:
                self._async.updates = False

    def _get_current_learning_rate(self: Any) -> Any:
        """Within an update this rank's; schedules, callbacks and checkpoints see, and set, what all ranks have."""
        rate, state = self._wrapped_class._get_current_learning_rate(self), self._async
        return tf.convert_to_tensor(rate) * state.spread if state.updates and state.spread != 1.0 else rate

    def _async_prepare(self: Any, variables: list[Any]) -> None:
        super()._async_prepare(variables)
        state = self._async
        if state.statistics is None and state.model is not None and state.config.buffers == "average":
            frozen = {id(raw(v)) for layer in state.model._flatten_layers() for v in layer._trainable_variables}
            averaged = [v for v in statistics(state.model) if id(v) not in frozen]
            state.statistics = Flat(averaged) if averaged else None

    def _async_before_mix(self) -> list[tf.Tensor]:
        flat = self._async.statistics
        if flat is None:
            return []
        settled = call_or_op(self._async_settle, [flat.read()], flat.dtype, [flat.elements])
        flat.write(settled)
        return [settled]

    def _async_settle(self, own: tf.Tensor) -> Any:
        """Batch-norm statistics, shape (m,) -> those to go on with."""
        worker = self._async.worker
        assert worker is not None  # (the step has begun)
        averaged = worker.settle_statistics(_counted(own.numpy()), _clip)
        return own if averaged is None else averaged

    def _async_statistics(self) -> np.ndarray[Any, Any] | None:
        flat = self._async.statistics
        if flat is None:
            return None
        with tf.init_scope():
            return _counted(flat.array())

    # -- what stands for all ranks ----------------------------------------------------------------------------

    def _async_unite(self, vector: tf.Tensor, what: str) -> tf.Tensor:
        state, worker = self._async, self._async.worker
        if state.config.algorithm == "easgd" or worker is None:
            return super()._async_unite(vector, what)
        return worker.broadcast(vector, worker.leader, what)

    def _async_replaced(self) -> None:
        """No rank goes on before all have them: a pull of ranks that have not would move centres apart."""
        worker = self._async_worker()
        worker.receiver.start_from(self._async_read())
        worker.sum(tf.zeros([1]), "the start from other weights")

    def _async_copy_statistics(self, root: int) -> None:
        self._async_unify_by("root", root)


def _counted(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """With 1 at the end; all 0 if one is not finite."""
    counted = np.append(values, values.dtype.type(1))
    return counted if is_finite(counted) else np.zeros_like(counted)


def _around(graph: Any) -> list[Any]:
    """A graph and those in which it is being built."""
    graphs = []
    while graph is not None:
        graphs.append(graph)
        graph = getattr(graph, "outer_graph", None)
    return graphs


def _clip(vector: Array, one: Array, other: Array) -> Array:
    return np.clip(vector, np.minimum(one, other), np.maximum(one, other))
