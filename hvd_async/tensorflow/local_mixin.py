"""What Keras optimizers have in common whose ranks have weights of their own: stepping, draining, checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from hvd_async.errors import ReplicaStateError
from hvd_async.optimizers.driver import Wrapped, derived
from hvd_async.optimizers.local import LocalWrapped
from hvd_async.tensorflow import checkpoint
from hvd_async.tensorflow.buffers import checksum, consensus_distance, own_name, raw, signature, unify_buffers
from hvd_async.tensorflow.collectives import LIFECYCLE
from hvd_async.tensorflow.flat import Flat
from hvd_async.tensorflow.horovod_names import check_not_horovods
from hvd_async.tensorflow.local_state import LocalSettings
from hvd_async.tensorflow.loss_scaling import OuterMixin
from hvd_async.tensorflow.weight_step import LocalStepping


class LocalMixin(LocalStepping, LocalWrapped):
    """Methods of a wrapped Keras optimizer."""

    _async: LocalSettings
    _wrapped_class: ClassVar[type[Any]]

    def register_local_var(self, variable: Any) -> None:
        """Leave a variable out of the mixing: each rank trains its own. Call it before the first step, on all ranks.

        Raises:
            ReplicaStateError: the ranks have met already.
        """
        state = self._async
        if state.worker is not None:
            raise ReplicaStateError(
                f"{signature(variable)} has been mixed with other ranks' already: register local variables before the "
                f"first step"
            )
        state.local[id(raw(variable))] = raw(variable)
        state.flat = None

    def finalize_variable_values(self: Any, var_list: Any) -> None:
        """Keras calls this at the end of ``fit()``: with ``use_ema`` it puts the averaged weights in place, the same on
        all ranks."""
        worker = self._async.worker
        if self.use_ema and worker is not None:
            self.drain()
        self._wrapped_class.finalize_variable_values(self, var_list)
        if self.use_ema and worker is not None:
            self._async_replaced()

    def get_state(self: Any) -> dict[str, np.ndarray[Any, Any]]:
        """The wrapped optimizer's variables (iterations, learning rate, velocities ...) by name, and this rank's share
        of what goes on between the ranks: little more than a count after a ``drain()``, all that is this rank's own
        after a ``cut()``.

        Raises:
            ReplicaStateError: a step was taken since the last drain or cut.
        """
        self._async_need_built()
        own = {own_name(v): raw(v).numpy() for v in self.variables}
        return own | checkpoint.pack_local(self._async_share())

    def set_state(self: Any, state: dict[str, np.ndarray[Any, Any]]) -> None:
        """Take back what ``get_state`` gave; the optimizer must be built. Load the model's weights too: before the next
        step, in either order.

        Raises:
            ValueError: the state is of another optimizer, or of another rank after a cut.
            ReplicaStateError: messages of this run are on their way.
        """
        self._async_need_built()
        share = checkpoint.unpack_local(state)
        state = {name: value for name, value in state.items() if not checkpoint.is_share(name)}
        own = {own_name(v): v for v in self.variables}
        if own.keys() != state.keys():
            differing = ", ".join(sorted(own.keys() ^ state.keys())[:3])
            raise ValueError(f"the state is of another optimizer, or this one is not built: {differing} ...")
        if share is not None:
            self._async_take_share(share)
        for name, variable in own.items():
            variable.assign(state[name])

    def _async_replaced(self) -> None:
        """All ranks have the same other weights now, right after a drain."""
        self._async.worker.begin(self._async_read())

    # -- what the core asks for -------------------------------------------------------------------------------

    def _async_need_built(self: Any) -> None:
        state = self._async
        if not self.built and state.model is not None:
            self.build(state.model.trainable_variables)
        if not self.built:
            raise ValueError("the optimizer is not built yet: call optimizer.build(model.trainable_variables) first")
        self._async_prepare(self._trainable_variables)

    def _async_worker(self) -> Any:
        self._async_check_mixed()
        return super()._async_worker()

    def _async_read(self: Any) -> np.ndarray[Any, Any]:
        with tf.init_scope():
            weights: np.ndarray[Any, Any] = self._async.flat.array()
        return weights

    def _async_write(self: Any, weights: Any) -> None:
        with tf.init_scope():
            self._async.flat.write(weights)

    def _async_fingerprint(self: Any, resumed: bool) -> tuple[list[str], list[int]]:
        """(Hyperparameters and the optimizer's state are each rank's own.)"""
        state = self._async
        buffers = 0 if state.model is None else len(statistics(state.model))
        kinds = [
            f"optimizer {self._wrapped_class.__name__}, moving averages {self.use_ema}",
            f"{state.passes} backward passes per step",
            f"buffers {state.buffer_policy}, {buffers} of the model",
            *(f"local {signature(v)}" for v in self._trainable_variables if state.is_local(v)),
        ]
        mixed = [v for v in self._trainable_variables if not state.is_local(v)]
        sums = [0 if resumed else checksum(v) for v in mixed]
        return [*kinds, *(signature(v) for v in mixed)], [0] * len(kinds) + sums

    def _async_finish(self: Any, worker: Any, flush: bool) -> None:
        if flush:
            self._async_warn_of_passes()
        super()._async_finish(worker, flush)
        averages = self._async_averages() if flush and self.use_ema else []
        if averages:
            with tf.init_scope():
                flat = Flat(averages)
                flat.write(self._async_unite(flat.read(), "Keras' moving averages"))

    def _async_unite(self: Any, vector: tf.Tensor, what: str) -> tf.Tensor:
        """What stands for all ranks' vectors after a drain: their mean. A collective."""
        total, ranks, _ = self._async.worker.sum(vector, what)
        return total / len(ranks)

    def _async_averages(self: Any) -> list[Any]:
        """Keras' moving averages of the variables that are mixed."""
        pairs = zip(self._trainable_variables, self._model_variables_moving_average, strict=True)
        return [average for variable, average in pairs if not self._async.is_local(variable)]

    def _async_warn_of_passes(self) -> None:
        state = self._async
        done = 0 if state.done is None else int(state.done.numpy())
        if done:
            warnings.warn(
                f"drain(): {done} backward pass(es) short of a step of {state.passes} (backward_passes_per_step) stay "
                f"on this rank and go on with its next ones",
                stacklevel=7,
            )

    def _async_unify(self) -> None:
        if self._async.buffer_policy != "local":
            self._async_unify_by(self._async.buffer_policy, self._async.sharers.ranks[0])

    def _async_unify_by(self, policy: str, root: int) -> None:
        state = self._async
        if state.model is not None:
            with tf.init_scope():
                variables = state.model.non_trainable_variables
                unify_buffers(self._async_worker(), variables, policy, root)

    def _async_keep_buffers(self) -> Callable[[], None]:
        model = self._async.model
        kept = [(variable, variable.numpy()) for variable in ([] if model is None else statistics(model))]

        def put_back() -> None:
            for variable, value in kept:
                variable.assign(value)

        return put_back

    def _async_distance(self) -> float:
        state = self._async
        assert state.flat is not None
        return consensus_distance(self._async_worker(), state.flat.variables)


def statistics(model: Any) -> list[Any]:
    """What a model holds beside its weights: batch-norm statistics, not the random seeds of dropout layers."""
    return [v for v in map(raw, model.non_trainable_variables) if v.dtype.is_floating]


def check_optimizer(optimizer: Any) -> None:
    """Refuse what cannot be wrapped.

    Raises:
        ValueError: with a hint.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise ValueError(f"{type(optimizer).__name__} is no Keras 3 optimizer: pass one of keras.optimizers")
    check_not_horovods(inner)
    if isinstance(optimizer, OuterMixin) or isinstance(inner, Wrapped):
        raise ValueError("this optimizer averages over ranks already: wrap the plain one")


def wrap(optimizer: Any, settings: LocalSettings, mixin: type, outer_mixin: type, name: str | None) -> Any:
    """An optimizer of a class that has the mixin's methods; around it a ``LossScaleOptimizer`` with ``outer_mixin``'s,
    if one was given."""
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    wrapped = derived(optimizer.inner_optimizer if scaled else optimizer, mixin)
    vars(wrapped)["_async"] = settings
    LIFECYCLE.add(wrapped)
    if scaled:
        outer = derived(optimizer, outer_mixin)
        vars(outer)["inner_optimizer"] = wrapped
        wrapped = outer
    if name is not None:
        vars(wrapped)["name"] = name
    return wrapped
