"""LARS for Keras: SGD with momentum whose learning rate follows each layer's ratio of weights to gradient."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops


@keras.saving.register_keras_serializable("hvd_async")
class LARS(keras.optimizers.Optimizer):
    """Layer-wise adaptive rate scaling (You, Gitman, Ginsburg, 2017, arXiv:1708.03888, algorithm 1).

    For a layer's weights w with gradient g, velocity v, learning rate gamma, momentum m, decay beta, trust eta:
    ``local = eta |w| / (|g| + beta |w|)``, ``v <- m v + gamma local (g + beta w)``, ``w <- w - v``. Where |w| or |g| is
    0 local is 1. Variables of one dimension (biases, batch norm) have neither local rate nor decay.

    Args:
        learning_rate: gamma, a number or a schedule. momentum: m. decay: beta. trust: eta. options: of every Keras
            optimizer; not its own ``weight_decay``, which would go past the local rate.

    Raises:
        ValueError: a number below 0, or a momentum of 1 or more.
    """

    def __init__(
        self,
        learning_rate: Any,
        momentum: float = 0.9,
        decay: float = 0.0,
        trust: float = 0.001,
        name: str = "lars",
        **options: Any,
    ) -> None:
        if min(momentum, decay, trust) < 0 or momentum >= 1:
            raise ValueError("LARS wants decay and trust of 0 or more, and a momentum in [0, 1)")
        super().__init__(learning_rate=learning_rate, name=name, **options)
        self.momentum, self.decay, self.trust = momentum, decay, trust

    def build(self, variables: list[Any]) -> None:
        """Make the velocities."""
        if self.built:
            return
        super().build(variables)
        self.momentums = [
            self.add_variable_from_reference(reference_variable=variable, name="momentum") for variable in variables
        ]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """One update of one variable."""
        rate = ops.cast(learning_rate, variable.dtype)
        change = ops.cast(gradient, variable.dtype)
        if len(variable.shape) > 1:
            weights, size = (ops.sqrt(ops.sum(ops.square(x))) for x in (variable, change))  # ops.norm: 2-D at most
            local = self.trust * weights / (size + self.decay * weights)
            rate = rate * ops.where(ops.logical_and(weights > 0, size > 0), local, ops.ones_like(local))
            change = change + self.decay * variable
        velocity = self.momentums[self._get_variable_index(variable)]
        self.assign(velocity, ops.cast(self.momentum, variable.dtype) * velocity + rate * change)
        self.assign_sub(variable, velocity)

    def get_config(self) -> dict[str, Any]:
        """Return the optimizer's settings, for saving."""
        return {**super().get_config(), "momentum": self.momentum, "decay": self.decay, "trust": self.trust}
