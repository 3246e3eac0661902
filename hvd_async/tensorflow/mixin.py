"""What ``EagerOptimizer`` adds to a Keras optimizer: stepping, draining, checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from hvd_async.algorithms.eager.gradient_format import GradientFormat, ReducedRound
from hvd_async.algorithms.eager.worker import EagerWorker
from hvd_async.errors import ReplicaStateError
from hvd_async.optimizers.eager import EagerWrapped
from hvd_async.runtime.compatibility import STATE
from hvd_async.runtime.engine import Engine
from hvd_async.runtime.messages import Hyper
from hvd_async.tensorflow import checkpoint
from hvd_async.tensorflow.apply_round import settings
from hvd_async.tensorflow.buffers import checksum, consensus_distance, own_name, raw, signature, unify_buffers
from hvd_async.tensorflow.gradient_step import Stepping
from hvd_async.tensorflow.state import State


class EagerMixin(Stepping, EagerWrapped):
    """What ``EagerOptimizer`` adds to the class of the optimizer it wraps."""

    _async: State
    _wrapped_class: ClassVar[type[Any]]

    def __setattr__(self: Any, name: str, value: Any) -> None:
        if name == "loss_scale_factor" and value is None:
            # LossScaleOptimizer's constructor takes it away: there is no other sign of being wrapped in one.
            raise ReplicaStateError(
                "a LossScaleOptimizer cannot be around an EagerOptimizer (compile() puts one there under "
                "mixed_float16): it leaves steps out when a gradient overflows, and other ranks would wait for them. "
                "Write EagerOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))"
            )
        super().__setattr__(name, value)

    def register_local_var(self, variable: Any) -> None:
        """Refused: a variable that each rank trains alone.

        Raises:
            ReplicaStateError: always.
        """
        raise ReplicaStateError(
            f"{signature(variable)} cannot be local: a rank applies rounds that other ranks lead, at their pace and "
            f"with their hyperparameters, so that all replicas stay the same, and a local variable is none. Leave it "
            f"out of this optimizer and give it a plain Keras optimizer of its own."
        )

    def finalize_variable_values(self: Any, var_list: Any) -> None:
        """Keras calls this at the end of ``fit()``: with ``use_ema`` it puts the averaged weights in place."""
        if self.use_ema and self._async.worker is not None:
            self.drain()  # rounds that came later would be applied on top
        self._wrapped_class.finalize_variable_values(self, var_list)

    def consensus_distance(self: Any) -> float:
        """Root mean square distance of the ranks' weights from their mean (0: identical). A collective."""
        return consensus_distance(self._async_worker(), self._trainable_variables)

    def get_state(self: Any) -> dict[str, np.ndarray[Any, Any]]:
        """The wrapped optimizer's variables (iterations, learning rate, velocities ...) by name, and this rank's share
        of what the ranks have on their way: nothing after a ``drain()``, what is pending here after a ``cut()``.

        Raises:
            ReplicaStateError: gradients may be on their way, on some rank or other.
        """
        self._async_need_built()
        own = {own_name(v): raw(v).numpy() for v in self.variables}
        return own | checkpoint.pack(self._async_share(self._async.layout.nbytes))

    def set_state(self: Any, state: dict[str, np.ndarray[Any, Any]]) -> None:
        """Take back what ``get_state`` gave, before the first step; the optimizer must be built.

        Raises:
            ValueError: the state is of another optimizer, or holds gradients of another rank.
        """
        self._async_need_built()
        share = checkpoint.unpack(state, self._async.layout.dtypes)
        state = {name: value for name, value in state.items() if not checkpoint.is_share(name)}
        own = {own_name(v): v for v in self.variables}
        if own.keys() != state.keys():
            differing = ", ".join(sorted(own.keys() ^ state.keys())[:3])
            raise ValueError(f"the state is of another optimizer, or this one is not built: {differing} ...")
        if share is not None:
            self._async_take_share(share, self._async.layout.nbytes)
        for name, variable in own.items():
            variable.assign(state[name])

    def _async_need_built(self: Any) -> None:
        state = self._async
        if not self.built and state.model is not None:
            self.build(state.model.trainable_variables)
        if not self.built:
            raise ValueError("the optimizer is not built yet: call optimizer.build(model.trainable_variables) first")
        self._async_prepare(self._trainable_variables)

    def _async_new_worker(
        self: Any, engine: Engine, finish: Callable[[bool], object], apply: Callable[[ReducedRound], None]
    ) -> EagerWorker:
        self._async_need_built()
        state = self._async
        layout, codec, sharers = state.layout, state.codec, state.sharers
        wire = GradientFormat(
            zeros=layout.zeros,
            nbytes=layout.nbytes,
            slots=codec.slots,
            encode=codec.encode,
            decode=lambda vector, bucket: codec.decode(vector, layout.dtypes[bucket]),
            sent=tuple(n * codec.nbytes(dtype) for n, dtype in zip(layout.elements, layout.dtypes, strict=True)),
            scale=codec.scale,
            process_set=sharers.process_set,
            members=sharers.members,
            process_set_id=sharers.id,
        )
        return EagerWorker(engine, state.config_for(layout.nbytes), wire, finish, apply)

    def _async_fingerprint(self: Any) -> tuple[list[str], list[int]]:
        state = self._async
        own_rate = id(self._learning_rate)
        held = [v for v in self.variables if id(v) != own_rate]
        kinds = [f"optimizer {self._wrapped_class.__name__}", *(f"setting {one}" for one in settings(self))]
        kinds.append(f"buckets {[list(b.indices) for b in state.layout.buckets]}")
        wire = [dtype.name for dtype in state.codec.wire.values()]
        kinds.append(f"gradients x {state.scales}, {state.passes} passes {state.average_passes}, as {wire}")
        if self.weight_decay is not None:
            kinds.append(f"decayed {[self._use_weight_decay(v) for v in self._trainable_variables]}")
        names = [*kinds, *(signature(v) for v in self._trainable_variables)]
        names += [f"{STATE}{own_name(v)} {tuple(v.shape)}" for v in held]
        return names, [0] * len(kinds) + [checksum(v) for v in [*self._trainable_variables, *held]]

    def _async_hyper(self: Any) -> Hyper:
        update = self._async.update
        group: dict[str, Any] = {"frozen": [], "settings": update.digest}
        if not update.scheduled:
            group["learning_rate"] = float(self._async_own_rate())
        return [group]

    def _async_apply(self: Any, round_: ReducedRound) -> None:
        """Apply a round outside of a step."""
        update = self._async.update
        if round_.gradients:
            with tf.init_scope():
                put_back = update.keep(round_)
                update(*update.parts(round_))
                put_back()

    def _async_finish(self: Any, worker: EagerWorker, flush: bool) -> None:
        state = self._async
        with tf.init_scope():
            if flush and state.feed.done:
                warnings.warn(
                    f"drain(): {state.feed.done} backward pass(es) short of a step of {state.passes} "
                    f"(backward_passes_per_step) stay on this rank and go on with its next ones",
                    stacklevel=6,
                )
            if flush and state.model is not None and state.buffer_policy != "local":
                variables, root = state.model.non_trainable_variables, state.sharers.ranks[0]
                unify_buffers(worker, variables, state.buffer_policy, root)
            if flush:
                self._async_check_replicas(worker)
