"""``import hvd_async.tensorflow.keras as hvd``: all of ``horovod.tensorflow.keras``, plus our optimizers."""

from typing import Any

import keras
from horovod.tensorflow.keras import *  # noqa: F403
from horovod.tensorflow.keras import elastic  # noqa: F401

import hvd_async.tensorflow.keras.callbacks as callbacks  # noqa: PLR0402  "from" would find Horovod's
from hvd_async.tensorflow.eager import DistributedOptimizer, EagerOptimizer
from hvd_async.tensorflow.functions import broadcast_variables, join, shutdown


def load_model(filepath: Any, custom_objects: dict[str, Any] | None = None, **options: Any) -> Any:
    """Load a Keras model and wrap its optimizer (with the state that was saved) in ``EagerOptimizer(**options)``.

    Args:
        filepath: a ``.keras`` file.
        custom_objects: as in ``keras.models.load_model``.
        options: of ``EagerOptimizer``, e.g. ``quorum``.
    """
    model = keras.models.load_model(filepath, custom_objects=custom_objects)
    if getattr(model, "optimizer", None) is not None:
        options.setdefault("model", model)
        model.optimizer = EagerOptimizer(model.optimizer, **options)
    return model


__all__ = [name for name in dir() if not name.startswith("_")]
_ours = (DistributedOptimizer, EagerOptimizer, broadcast_variables, callbacks, join, shutdown)
