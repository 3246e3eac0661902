"""Horovod's own names in a script where only the optimizer's wrapper was swapped, or that is half migrated.

On Keras 3 its callbacks end in errors about Keras' inside, and its ``broadcast_variables`` does not know Keras'
variables; its ``join`` would silence this rank's engine, and its ``shutdown`` ends Horovod under it. Here the callbacks
say which import to change, and the others work, as long as they are called by module (``hvd.join()``).
"""

from __future__ import annotations

from typing import Any, NoReturn

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import keras
from horovod.tensorflow.keras import callbacks

from hvd_async.errors import ReplicaStateError
from hvd_async.tensorflow.functions import broadcast_variables, join, shutdown

BROKEN = (
    callbacks.BroadcastGlobalVariablesCallback,
    callbacks.MetricAverageCallback,
    callbacks.LearningRateScheduleCallback,
    callbacks.LearningRateWarmupCallback,
)
IMPORT = "'import hvd_async.tensorflow.keras as hvd' in place of 'import horovod.tensorflow.keras as hvd'"
_horovods_broadcast = hvd.broadcast_variables


def _refuse(self: Any, model: Any) -> NoReturn:
    raise ReplicaStateError(
        f"Horovod's own {type(self).__name__} does not work on Keras 3. Change the import: {IMPORT} has one that does"
    )


def _broadcast_variables(variables: Any, root_rank: int, **options: Any) -> Any:
    """Horovod's, which takes Keras variables too."""
    listed = list(variables)
    known = not any(isinstance(one, keras.Variable) for one in listed)
    return (_horovods_broadcast if known else broadcast_variables)(listed, root_rank, **options)


def mend() -> None:
    """From now on Horovod's names do so, in this process."""
    for broken in BROKEN:
        if issubclass(broken, keras.callbacks.Callback):  # (with Keras 2 in TensorFlow's place of Keras they work)
            broken.set_model = _refuse
    hvd.broadcast_variables, hvd.join = _broadcast_variables, join
    hvd.shutdown = hvd_keras.shutdown = shutdown


def check_not_horovods(optimizer: Any) -> None:
    """Refuse Horovod's ``DistributedOptimizer``.

    Raises:
        ValueError: it is one.
    """
    if type(optimizer).__module__ == "horovod._keras":
        raise ValueError(
            "this is Horovod's own DistributedOptimizer, which does not average on Keras 3: wrap the plain Keras "
            "optimizer in its place"
        )
