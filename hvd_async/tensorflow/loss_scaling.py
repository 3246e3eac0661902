"""Loss scaling around our optimizers: ``EagerOptimizer(keras.optimizers.LossScaleOptimizer(...))``, and the others'.

Keras leaves a step out when a gradient overflows. Under partial allreduce the other ranks would wait for it; there the
scale is this rank's own: gradients are unscaled before anybody else sees them, and an overflowing step is handed over
empty. A rank with weights of its own takes as many steps as it likes, so Keras' own ``apply`` is right.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from hvd_async.optimizers import methods
from hvd_async.tensorflow import gradient_step
from hvd_async.tensorflow.variables import own_name, raw


class ScaleMethods(methods.OptimizerMethods):
    """Methods of every ``LossScaleOptimizer`` whose ``inner_optimizer`` is one of ours: they call that one's driver.
    Under partial allreduce overflows are in ``stats().gradients_skipped``."""

    inner_optimizer: Any

    @property
    def _async(self) -> Any:
        return self.inner_optimizer._async

    def register_local_var(self, variable: Any) -> None:
        """The inner optimizer's."""
        self.inner_optimizer.register_local_var(variable)

    def get_state(self: Any) -> dict[str, np.ndarray[Any, Any]]:
        """The inner optimizer's, and this rank's scale."""
        return self.inner_optimizer.get_state() | {name: raw(v).numpy() for name, v in _scale(self).items()}

    def set_state(self: Any, state: dict[str, np.ndarray[Any, Any]]) -> None:
        """Take back what ``get_state`` gave; raises as the inner optimizer's."""
        own = _scale(self)
        self.inner_optimizer.set_state({name: value for name, value in state.items() if name not in own})
        for name, variable in own.items():
            if name in state:
                variable.assign(state[name])


class EagerScaleMethods(ScaleMethods, methods.EagerMethods):
    """Methods of ``EagerOptimizer`` on a ``LossScaleOptimizer`` whose inner one is an EagerOptimizer too."""

    built: bool

    def record_samples(self, samples: Any) -> None:
        """The inner optimizer's."""
        self.inner_optimizer.record_samples(samples)

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
        loss_scale = raw(self.dynamic_scale) + 0.0
        finite = gradient_step.take(self.inner_optimizer, list(grads), trainable_variables, loss_scale)
        scale, counter = raw(self.dynamic_scale), raw(self.step_counter)
        grown = tf.equal(counter, tf.cast(self.dynamic_growth_steps - 1, counter.dtype))
        factor = tf.where(finite, tf.where(grown, 2.0, 1.0), 0.5)
        scale.assign(scale * tf.cast(factor, scale.dtype))
        counter.assign(tf.where(tf.logical_and(finite, tf.logical_not(grown)), counter + 1, tf.zeros_like(counter)))


class GossipScaleMethods(ScaleMethods, methods.GossipMethods):
    """Methods of ``GossipOptimizer`` on a ``LossScaleOptimizer`` whose inner one is a GossipOptimizer too. A
    step that overflows on a rank is none of its steps."""


class LeaderScaleMethods(ScaleMethods, methods.LeaderMethods):
    """Methods of ``LeaderOptimizer`` on a ``LossScaleOptimizer`` whose inner one is a LeaderOptimizer too. A
    step that overflows on a rank is none of its steps."""

    _wrapped_class: ClassVar[type[Any]]

    def record_loss(self, loss: Any) -> None:
        """The inner optimizer's."""
        self.inner_optimizer.record_loss(loss)

    def scale_loss(self: Any, loss: Any) -> Any:
        """Take the loss of each training step, which Keras gives it."""
        self.inner_optimizer.record_loss(loss)
        return self._wrapped_class.scale_loss(self, loss)


def _scale(optimizer: Any) -> dict[str, Any]:
    """Return what the scale consists of, by name."""
    return {own_name(v): v for v in (optimizer.dynamic_scale, optimizer.step_counter)}
