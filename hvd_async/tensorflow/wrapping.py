"""Wrapping of Keras optimizers, optimizers that cannot be wrapped, and this binding's part of the factories.

A ``LossScaleOptimizer`` stays around a wrapped optimizer: ``ScaleMethods`` and its subclasses have the methods of that.
"""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from hvd_async.optimizers import methods
from hvd_async.optimizers.driver import Driver, derived
from hvd_async.optimizers.factories import Binding
from hvd_async.optimizers.methods import OptimizerMethods
from hvd_async.tensorflow.collectives import LIFECYCLE
from hvd_async.tensorflow.eager_methods import take_step
from hvd_async.tensorflow.gradient_format import Compression
from hvd_async.tensorflow.methods import LeaderMethods
from hvd_async.tensorflow.variables import own_name, raw


def check_backend(error: type[Exception] = ValueError) -> None:
    """Refuse Keras on another backend than TensorFlow.

    Args:
        error: the class of the error: ``ImportError`` while a module is imported.

    Raises:
        Exception: of the class ``error``, if Keras runs on another backend.
    """
    backend = keras.config.backend()
    if backend != "tensorflow":
        raise error(
            f"Keras' backend must be 'tensorflow' for hvd_async's Keras optimizers and callbacks, got {backend!r}. Set "
            f"KERAS_BACKEND=tensorflow in the environment before Keras is imported (or 'backend' in "
            f"~/.keras/keras.json); a torch model in a loop of its own takes hvd_async.torch"
        )


BINDING = Binding(hvd, LIFECYCLE, Compression)


def check_optimizer(optimizer: Any) -> None:
    """Check that an optimizer can be wrapped.

    Raises:
        ValueError: it cannot be wrapped.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise ValueError(
            f"optimizer must be a Keras 3 optimizer, got {type(optimizer).__name__}. Pass one of keras.optimizers"
        )
    if type(inner).__module__ == "horovod._keras":
        raise ValueError(
            "this is Horovod's own DistributedOptimizer, which does not average on Keras 3: wrap the plain Keras "
            "optimizer instead"
        )
    if isinstance(optimizer, OptimizerMethods) or isinstance(inner, OptimizerMethods):
        raise ValueError("this optimizer averages over ranks already: wrap the plain one")


def wrap(optimizer: Any, driver: Driver, methods: type, scale_methods: type, name: str | None) -> Any:
    """Return an optimizer of a class that has the methods; a ``LossScaleOptimizer`` goes around it again.

    Args:
        optimizer: as the user gave it.
        driver: of the new one.
        methods: of its class.
        scale_methods: of that of a ``LossScaleOptimizer`` around it.
        name: of the outermost; None: as it was.
    """
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    outer = wrapped = derived(optimizer.inner_optimizer if scaled else optimizer, methods)
    if scaled:
        outer = derived(optimizer, scale_methods)
        vars(outer)["inner_optimizer"] = wrapped
    if name is not None:
        vars(outer)["name"] = name
    driver.attach(wrapped)
    return outer


# -- loss scaling ------------------------------------------------------------------------------------------------------
# Keras skips a step when a gradient overflows. Under partial allreduce the other ranks would wait for it; so there each
# rank has its own scale: gradients are unscaled before other ranks see them, and a step that overflows is handed over
# empty. A rank with weights of its own may take any number of steps, so Keras' own ``apply`` is right.


class ScaleMethods(methods.OptimizerMethods):
    """Methods of every ``LossScaleOptimizer`` whose ``inner_optimizer`` is wrapped: they call that optimizer's driver.
    Under partial allreduce overflows are in ``stats().gradients_skipped``."""

    inner_optimizer: Any

    @property
    def _async(self) -> Any:
        return self.inner_optimizer._async

    def register_local_var(self, variable: Any) -> None:
        """Call the inner optimizer's method."""
        self.inner_optimizer.register_local_var(variable)

    def get_state(self: Any) -> dict[str, np.ndarray[Any, Any]]:
        """Return the inner optimizer's state, and this rank's scale."""
        return self.inner_optimizer.get_state() | {name: raw(v).numpy() for name, v in _scale(self).items()}

    def set_state(self: Any, state: dict[str, np.ndarray[Any, Any]]) -> None:
        """Restore what ``get_state`` returned; raises as the inner optimizer's."""
        own = _scale(self)
        self.inner_optimizer.set_state({name: value for name, value in state.items() if name not in own})
        for name, variable in own.items():
            if name in state:
                variable.assign(state[name])


class EagerScaleMethods(ScaleMethods, methods.EagerMethods):
    """Methods of ``EagerOptimizer`` on a ``LossScaleOptimizer`` whose inner one is an EagerOptimizer too."""

    built: bool

    def record_samples(self, samples: Any) -> None:
        """Call the inner optimizer's method."""
        self.inner_optimizer.record_samples(samples)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        """Unscale the gradients and take a step with them; adjust the scale.

        Args:
            grads: of the scaled loss, one a variable.
            trainable_variables: as in Keras.
        """
        if not self.built:
            with tf.init_scope():
                self.build(list(trainable_variables))
                self.built = True
        loss_scale = raw(self.dynamic_scale) + 0.0
        finite = take_step(self.inner_optimizer, list(grads), trainable_variables, loss_scale)
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

    record_loss, scale_loss = LeaderMethods.record_loss, LeaderMethods.scale_loss


def _scale(optimizer: Any) -> dict[str, Any]:
    """Return the variables of the loss scale by name."""
    return {own_name(v): v for v in (optimizer.dynamic_scale, optimizer.step_counter)}
