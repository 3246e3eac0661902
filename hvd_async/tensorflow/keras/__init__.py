"""``import hvd_async.tensorflow.keras as hvd``: all of ``horovod.tensorflow.keras``, plus this library's optimizers."""

from importlib import import_module as _import_module
from typing import Any

import horovod.tensorflow.keras as _horovods
import keras
from horovod.tensorflow.keras import *  # noqa: F403

from hvd_async.monitor import Monitor
from hvd_async.optimizers.public_names import public_names as _public_names
from hvd_async.tensorflow.apply_round import clip_by_global_norm
from hvd_async.tensorflow.checkpoint import share_in_file as _share_in_file
from hvd_async.tensorflow.checkpoint import take_share as _take_share
from hvd_async.tensorflow.eager_methods import EagerMethods as _EagerMethods
from hvd_async.tensorflow.factories import DistributedOptimizer, EagerOptimizer, GossipOptimizer, LeaderOptimizer
from hvd_async.tensorflow.factories import check_backend as _check_backend
from hvd_async.tensorflow.functions import broadcast_variables, init, join, shutdown
from hvd_async.tensorflow.gradient_format import Compression
from hvd_async.tensorflow.keras.fit import MonitorCallback, RecordCallback
from hvd_async.tensorflow.keras.fit import our_optimizer as _our_optimizer

_check_backend(ImportError)
# Any import statement could find Horovod's: here by the star, and by the parent's "keras" if Horovod's came first.
callbacks = _import_module("hvd_async.tensorflow.keras.callbacks")
elastic = _import_module("hvd_async.tensorflow.keras.elastic")


def load_model(
    filepath: Any, custom_objects: dict[str, Any] | None = None, wrapper: Any = EagerOptimizer, **options: Any
) -> Any:
    """Load a Keras model and wrap its optimizer, with the state that was saved.

    Rounds and, after a drain, all that the algorithm keeps continue; see ``set_state`` for a file after ``cut()``. From
    the file of a plain optimizer, rounds of an ``EagerOptimizer`` continue from ``iterations``.

    Args:
        filepath: a ``.keras`` file.
        custom_objects: as in ``keras.models.load_model``.
        wrapper: ``EagerOptimizer``, ``GossipOptimizer`` or ``LeaderOptimizer``.
        options: of the wrapper, e.g. ``quorum``.
    """
    model = keras.models.load_model(filepath, custom_objects=custom_objects)
    if getattr(model, "optimizer", None) is not None:
        options.setdefault("model", model)
        model.optimizer = wrapper(model.optimizer, **options)
        ours, share = _our_optimizer(model), _share_in_file(filepath)
        if isinstance(ours, _EagerMethods):
            ours._async.count_from(int(model.optimizer.iterations))
        _take_share(ours, share)
    return model


_ours = (
    Compression,
    DistributedOptimizer,
    EagerOptimizer,
    GossipOptimizer,
    LeaderOptimizer,
    Monitor,
    MonitorCallback,
    RecordCallback,
    broadcast_variables,
    callbacks,
    clip_by_global_norm,
    elastic,
    init,
    join,
    shutdown,
)
__all__ = _public_names(globals(), _horovods, _ours)
