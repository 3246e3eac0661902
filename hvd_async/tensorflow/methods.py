"""Methods that a wrapped Keras optimizer's class gains: public ones, and those that Keras calls by name; no state."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from hvd_async.errors import ReplicaStateError
from hvd_async.optimizers import methods
from hvd_async.optimizers.local import LocalDriver
from hvd_async.tensorflow import checkpoint, weight_step
from hvd_async.tensorflow.variables import own_name, raw, signature

Arrays = dict[str, np.ndarray[Any, Any]]


class WeightMethods(methods.OptimizerMethods):
    """Methods of a wrapped Keras optimizer whose ranks have weights of their own."""

    _async: LocalDriver
    _wrapped_class: ClassVar[type[Any]]

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
            FloatingPointError: the step has made a weight NaN or infinite; it was not sent.
        """
        grads = list(grads)
        if grads:
            given = self._trainable_variables if trainable_variables is None else trainable_variables
            weight_step.apply(self, grads, list(given))

    def register_local_var(self, variable: Any) -> None:
        """Leave a variable out of the mixing: each rank trains its own. Call it before the first step, on all ranks.

        Raises:
            ReplicaStateError: the ranks have met already.
        """
        if self._async.worker is not None:
            raise ReplicaStateError(
                f"{signature(variable)} has been mixed with other ranks' already: register local variables before the "
                f"first step"
            )
        self._async.replica.keep_local(variable)  # type: ignore[attr-defined]

    def get_state(self: Any) -> Arrays:
        """The wrapped optimizer's variables (iterations, learning rate, velocities ...) by name, and this rank's share
        of what goes on between the ranks: little more than a count after a ``drain()``, all that is this rank's own
        after a ``cut()``.

        Raises:
            ReplicaStateError: a step was taken since the last drain or cut.
        """
        self._async.replica.prepare()
        own = {own_name(v): raw(v).numpy() for v in self.variables}
        return own | checkpoint.pack_local(self._async.share())

    def set_state(self: Any, state: Arrays) -> None:
        """Take back what ``get_state`` gave; the optimizer must be built. Load the model's weights too: before the next
        step, in either order.

        Raises:
            ValueError: the state is of another optimizer, or of another rank after a cut.
            ReplicaStateError: messages of this run are on their way.
        """
        self._async.replica.prepare()
        share = checkpoint.unpack_local(state)
        own = checkpoint.own_variables(self, state)
        if share is not None:
            self._async.take_share(share)
        for name, variable in own.items():
            variable.assign(state[name])

    # -- what Keras calls by name -------------------------------------------------------------------------------

    def build(self, variables: Any) -> None:
        """Make the wrapped optimizer's variables, and what adds up several passes, before a step is traced."""
        self._wrapped_class.build(self, variables)
        self._async.replica.make_sums()  # type: ignore[attr-defined]

    def finalize_variable_values(self: Any, var_list: Any) -> None:
        """Keras calls this at the end of ``fit()``: with ``use_ema`` it puts the averaged weights in place, the same on
        all ranks."""
        begun = self._async.worker is not None
        if self.use_ema and begun:
            self.drain()
        self._wrapped_class.finalize_variable_values(self, var_list)
        if self.use_ema and begun:
            self._async.on_weights_replaced()

    def _update_model_variables_moving_average(self: Any, trainable_variables: Any) -> None:
        replica = self._async.replica
        if replica.weight is not None:
            trainable_variables = [
                v if replica.is_local(v) else raw(v) / tf.cast(replica.weight, raw(v).dtype)
                for v in trainable_variables
            ]
        self._wrapped_class._update_model_variables_moving_average(self, trainable_variables)

    def _overwrite_model_variables_with_average_value(self: Any, trainable_variables: Any) -> None:
        replica = self._async.replica
        self._wrapped_class._overwrite_model_variables_with_average_value(self, trainable_variables)
        if replica.weight is not None:
            replica.flat.scale(replica.weight)


class GossipMethods(WeightMethods, methods.GossipMethods):
    """Methods that ``GossipOptimizer`` adds to the class of the Keras optimizer it wraps."""


class LeaderMethods(WeightMethods, methods.LeaderMethods):
    """Methods that ``LeaderOptimizer`` adds to the class of the Keras optimizer it wraps."""

    def record_loss(self: Any, loss: Any) -> None:
        """Say what this step's training loss was, before ``apply()``: the lowest mean of the last ones leads. Keras'
        ``fit()`` does it by itself.

        Args:
            loss: a number, or a tensor of one; also while a ``tf.function`` is traced.

        Raises:
            ValueError: it is several numbers.
        """
        weight_step.record_loss(self._async, loss)

    def scale_loss(self: Any, loss: Any) -> Any:
        """Take the loss of each training step, which Keras gives it."""
        self.record_loss(loss)
        return self._wrapped_class.scale_loss(self, loss)

    def _get_current_learning_rate(self: Any) -> Any:
        """Within an update this rank's; schedules, callbacks and checkpoints see, and set, what all ranks have."""
        rate, factor = self._wrapped_class._get_current_learning_rate(self), self._async.lr_factor
        return tf.convert_to_tensor(rate) * factor if self._async.replica.updates and factor != 1.0 else rate
