"""How a Keras optimizer is wrapped, and which cannot be."""

from __future__ import annotations

from typing import Any

import keras

from hvd_async.optimizers.driver import Driver, derived
from hvd_async.optimizers.methods import OptimizerMethods
from hvd_async.tensorflow.horovod_names import check_not_horovods


def check_optimizer(optimizer: Any) -> None:
    """Refuse what cannot be wrapped.

    Raises:
        ValueError: with a hint.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise ValueError(f"{type(optimizer).__name__} is no Keras 3 optimizer: pass one of keras.optimizers")
    check_not_horovods(inner)
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
