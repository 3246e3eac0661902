"""Names of ``horovod.tensorflow`` that would break or mislead beside our optimizers or Keras 3, made right."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import horovod.tensorflow as hvd

from hvd_async import timeline
from hvd_async.errors import ReplicaStateError
from hvd_async.tensorflow.buffers import raw
from hvd_async.tensorflow.collectives import LIFECYCLE

timeline.watch_exit(hvd.shutdown)

BROADCASTABLE = ("bool", "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16")


def broadcast_variables(variables: Iterable[Any], root_rank: int = 0, **options: Any) -> Any:
    """Give every rank the variables of ``root_rank``; takes Keras variables too (Horovod's own fails on them).

    Random seeds of dropout layers (uint32) are left alone: they ought to differ.
    """
    plain = [raw(v) for v in variables]
    return hvd.broadcast_variables([v for v in plain if v.dtype.name in BROADCASTABLE], root_rank=root_rank, **options)


def DistributedGradientTape(*args: Any, **kwargs: Any) -> NoReturn:  # noqa: N802  Horovod's name
    """Refused: with ``EagerOptimizer`` gradients would be averaged twice.

    Raises:
        ReplicaStateError: always.
    """
    raise ReplicaStateError(
        "DistributedGradientTape averages gradients, and so does EagerOptimizer: use tf.GradientTape with "
        "EagerOptimizer. (horovod.tensorflow.DistributedGradientTape is still there, for a plain optimizer.)"
    )


def join() -> int:
    """Say that this rank has no more batches: drains every one of our optimizers of this process.

    Horovod's ``join`` would silence this rank's engine; it is called only in a job that has none of our optimizers.

    Returns:
        The last rank to join.
    """
    last = LIFECYCLE.join()
    return int(hvd.join()) if last is None else last


def shutdown() -> None:
    """Drain our optimizers, stop the engine, then shut Horovod down. All ranks call it."""
    LIFECYCLE.shutdown()
    hvd.shutdown()
    timeline.merge()  # now, since hvd.init() would begin Horovod's timeline anew
