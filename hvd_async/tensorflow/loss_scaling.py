"""Loss scaling around our optimizers: ``EagerOptimizer(keras.optimizers.LossScaleOptimizer(...))``, and the others'.

Keras leaves a step out when a gradient overflows. Under partial allreduce the other ranks would wait for it; there the
scale is this rank's own: gradients are unscaled before anybody else sees them, and an overflowing step is handed over
empty. A rank with weights of its own takes as many steps as it likes, so Keras' own ``apply`` is right.
"""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from hvd_async.tensorflow.buffers import own_name, raw


class OuterMixin:
    """What every ``LossScaleOptimizer`` gets whose ``inner_optimizer`` is one of ours: that one's methods."""

    inner_optimizer: Any

    @property
    def _async(self) -> Any:
        return self.inner_optimizer._async

    @property
    def rounds(self) -> int:
        """As the inner optimizer's."""
        return int(self.inner_optimizer.rounds)

    def drain(self) -> int:
        """As the inner optimizer's."""
        return int(self.inner_optimizer.drain())

    def cut(self) -> None:
        """As the inner optimizer's."""
        self.inner_optimizer.cut()

    def stats(self) -> Any:
        """As the inner optimizer's; under partial allreduce overflows are in ``gradients_skipped``."""
        return self.inner_optimizer.stats()

    def consensus(self) -> contextlib.AbstractContextManager[None]:
        """As the inner optimizer's."""
        context: contextlib.AbstractContextManager[None] = self.inner_optimizer.consensus()
        return context

    def consensus_distance(self) -> float:
        """As the inner optimizer's."""
        return float(self.inner_optimizer.consensus_distance())

    def register_local_var(self, variable: Any) -> None:
        """As the inner optimizer's."""
        self.inner_optimizer.register_local_var(variable)

    def get_state(self: Any) -> dict[str, np.ndarray[Any, Any]]:
        """The inner optimizer's, and this rank's scale."""
        return self.inner_optimizer.get_state() | {name: raw(v).numpy() for name, v in self._async_scale().items()}

    def set_state(self: Any, state: dict[str, np.ndarray[Any, Any]]) -> None:
        """Take back what ``get_state`` gave; raises as the inner optimizer's."""
        own = self._async_scale()
        self.inner_optimizer.set_state({name: value for name, value in state.items() if name not in own})
        for name, variable in own.items():
            if name in state:
                variable.assign(state[name])

    def _async_scale(self: Any) -> dict[str, Any]:
        """What the scale consists of, by name."""
        return {own_name(v): v for v in (self.dynamic_scale, self.step_counter)}


class LossScaleMixin(OuterMixin):
    """What ``EagerOptimizer`` adds to a ``LossScaleOptimizer``, whose ``inner_optimizer`` is an EagerOptimizer too."""

    built: bool

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        """Unscale the gradients and take a step with them; move the scale.

        Args:
            grads: of the scaled loss, one a variable.
            trainable_variables: as in Keras.
        """
        if not self.built:
            with tf.init_scope():
                self.build(list(trainable_variables))
                self.built = True
        finite = self.inner_optimizer._async_take(list(grads), trainable_variables, raw(self.dynamic_scale) + 0.0)
        scale, counter = raw(self.dynamic_scale), raw(self.step_counter)
        grown = tf.equal(counter, tf.cast(self.dynamic_growth_steps - 1, counter.dtype))
        factor = tf.where(finite, tf.where(grown, 2.0, 1.0), 0.5)
        scale.assign(scale * tf.cast(factor, scale.dtype))
        counter.assign(tf.where(tf.logical_and(finite, tf.logical_not(grown)), counter + 1, tf.zeros_like(counter)))


class LeaderScaleMixin(OuterMixin):
    """What ``LeaderOptimizer`` adds to a ``LossScaleOptimizer``, whose ``inner_optimizer`` is a LeaderOptimizer too. A
    step that overflows on a rank is none of its steps."""

    _wrapped_class: ClassVar[type[Any]]

    def record_loss(self, loss: Any) -> None:
        """As the inner optimizer's."""
        self.inner_optimizer.record_loss(loss)

    def scale_loss(self: Any, loss: Any) -> Any:
        """As Keras', which gives it the loss of each training step."""
        self.inner_optimizer.record_loss(loss)
        return self._wrapped_class.scale_loss(self, loss)


class GossipScaleMixin(OuterMixin):
    """What ``GossipOptimizer`` adds to a ``LossScaleOptimizer``, whose ``inner_optimizer`` is a GossipOptimizer too. A
    step that overflows on a rank is none of its steps."""

    def switch(self, **changes: Any) -> None:
        """As the inner optimizer's."""
        self.inner_optimizer.switch(**changes)

    def set_epoch(self, epoch: int) -> None:
        """As the inner optimizer's."""
        self.inner_optimizer.set_epoch(epoch)
