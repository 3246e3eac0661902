"""Replacements of names of ``horovod.tensorflow`` that do not work with this library's optimizers or with Keras 3."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, NoReturn

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import keras
import tensorflow as tf
from horovod.tensorflow.functions import allgather_object
from horovod.tensorflow.keras import callbacks

from hvd_async.algorithms.eager import timeline
from hvd_async.errors import ReplicaMismatchError, ReplicaStateError
from hvd_async.optimizers import elastic
from hvd_async.runtime.descriptors import closed_in_children
from hvd_async.runtime.log import warn
from hvd_async.tensorflow.collectives import LIFECYCLE, refuse_alone
from hvd_async.tensorflow.variables import is_seed, raw

PATIENCE = 30.0
"""Seconds before the notice."""


@contextlib.contextmanager
def notice_if_long(what: str) -> Iterator[None]:
    """Return a context for a collective that prints one notice if the collective waits for long.

    Args:
        what: the call, for the notice.
    """
    rank = hvd.rank()

    def notify() -> None:
        warn(
            f"rank {rank} has waited {PATIENCE:.0f} s in {what} for ranks that have not called it: every rank must, "
            f"with the same callbacks in the same order. Waiting on."
        )

    timer = threading.Timer(PATIENCE, notify)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


_horovods_init, _horovods_join, _horovods_shutdown = (
    hvd.init,
    hvd.join,
    hvd.shutdown,
)  # (``install`` replaces these names)
timeline.watch_exit(_horovods_shutdown)

HOROVODS = ("bool", "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16")
"""Dtypes that Horovod broadcasts."""
AS_BYTES = ("bfloat16", "complex64", "complex128", "uint32", "uint64")
"""Other dtypes, whose values are broadcast as bytes."""


def is_sent(variable: Any) -> bool:
    """Return whether a variable is sent to other ranks: random seeds and strings are not."""
    return raw(variable).dtype.name in HOROVODS + AS_BYTES and not is_seed(variable)


def broadcast_value(value: Any, root: int, name: str, process_set: Any = hvd.global_process_set) -> tf.Tensor:
    """Return rank ``root``'s value of a tensor or variable for which ``is_sent`` holds. A collective."""
    tensor = tf.convert_to_tensor(value)
    if tensor.dtype.name in HOROVODS:
        return hvd.broadcast(tensor, root, name=name, process_set=process_set)
    received = hvd.broadcast(tf.bitcast(tensor, tf.uint8), root, name=name, process_set=process_set)
    return tf.bitcast(received, tensor.dtype)


def broadcast_variables(
    variables: Iterable[Any], root_rank: int = 0, process_set: Any = hvd.global_process_set, inplace: bool = False
) -> None:
    """Send the variables of ``root_rank`` to every rank; takes Keras variables too (Horovod's own fails on them).

    The states of ``keras.random.SeedGenerator`` are not sent: with them all ranks would drop the same units and flip
    the same images. Variables are matched by position: names differ between ranks where one has made more layers or
    optimizers, since Keras numbers them, and Horovod's function would wait without end.

    Args:
        variables: the same on all ranks, in one order. Strings are not sent.
        root_rank: the rank whose variables are sent.
        process_set: the ranks that take part.
        inplace: as in Horovod; it has no effect here.

    Raises:
        ReplicaMismatchError: the ranks have different variables.
    """
    plain = [raw(one) for one in variables if is_sent(one)]
    if tf.executing_eagerly():
        with notice_if_long("hvd.broadcast_variables()"):
            _check_alike(plain, process_set)
            values = broadcast_tensors(plain, root_rank, "hvd_async.broadcast_variables", process_set)
    else:
        values = _broadcast(plain, root_rank, "hvd_async.broadcast_variables", process_set)
    for variable, value in zip(plain, values, strict=True):
        variable.assign(value)


def broadcast_tensors(
    tensors: Sequence[Any], root_rank: int, name: str, process_set: Any = hvd.global_process_set
) -> list[tf.Tensor]:
    """Return the values that ``root_rank`` has of tensors or variables. A collective, not in a graph.

    The graph that sends them is traced once for tensors of the same shapes and dtypes: the next ``fit()`` of a model,
    or of another like it, takes the same one. (It is a graph because Horovod's eager operator ignores its name.)

    Args:
        tensors: the same shapes and dtypes on all ranks, in one order.
        root_rank: the rank whose values are returned.
        name: of the collectives; each has its place appended.
        process_set: the ranks that take part.
    """
    given = [tf.convert_to_tensor(tensor) for tensor in tensors]
    settings = (root_rank, name, process_set, process_set.process_set_id)  # (the id: a set may be registered again)
    # (not called directly: TensorFlow would warn of several models' graphs in turn as if they were one's)
    values: list[tf.Tensor] = _graph.get_concrete_function(given, *settings)(given, *settings)
    return values


@functools.partial(tf.function, autograph=False)
def _graph(tensors: Sequence[Any], root_rank: int, name: str, process_set: Any, process_set_id: int) -> list[tf.Tensor]:
    return _broadcast(tensors, root_rank, name, process_set)


def _broadcast(tensors: Sequence[Any], root_rank: int, name: str, process_set: Any) -> list[tf.Tensor]:
    return [broadcast_value(tensor, root_rank, f"{name}.{place}", process_set) for place, tensor in enumerate(tensors)]


def _check_alike(variables: Sequence[tf.Variable], process_set: Any) -> None:
    own = [f"{tuple(variable.shape)} {variable.dtype.name}" for variable in variables]
    everyone = allgather_object(own, name="hvd_async.broadcast_variables", process_set=process_set)
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            place = next(i for i, (a, b) in enumerate(zip_longest(everyone[0], other)) if a != b)
            name = variables[place].name if place < len(variables) else "(not here)"
            raise ReplicaMismatchError(
                f"broadcast_variables: the ranks have different variables: rank {rank} of them has {len(other)}, and "
                f"rank 0 has {len(everyone[0])}; first at place {place}, which is {name} on this rank. Build the same "
                f"model and the same optimizer on every rank before"
            )


def DistributedGradientTape(*args: Any, **kwargs: Any) -> NoReturn:  # noqa: N802  Horovod's name
    """Raise: with ``EagerOptimizer`` gradients would be averaged twice.

    Raises:
        ReplicaStateError: always.
    """
    raise ReplicaStateError(
        "DistributedGradientTape averages gradients, and so does EagerOptimizer: use tf.GradientTape with "
        "EagerOptimizer. (horovod.tensorflow.DistributedGradientTape is still there, for a plain optimizer.)"
    )


def join() -> int:
    """Announce that this rank has no more batches: drain every wrapped optimizer of this process.

    Horovod's ``join`` would silence this rank's engine; it is called only in a job without wrapped optimizers.

    Returns:
        The last rank to join.
    """
    last = LIFECYCLE.join()
    return int(_horovods_join()) if last is None else last


def init(*arguments: Any, **options: Any) -> None:
    """Call Horovod's ``init``. In an elastic job, repeat it if a rank dies meanwhile.

    Raises:
        ValueError: as Horovod's; or this process is the only rank while a variable says that there are more.
    """
    with closed_in_children():
        elastic.meet(_horovods_shutdown, lambda: _horovods_init(*arguments, **options))
    refuse_alone()
    LIFECYCLE.initialized()


def shutdown() -> None:
    """Drain wrapped optimizers, stop the engine, then shut Horovod down. All ranks call it."""
    LIFECYCLE.shutdown()
    _horovods_shutdown()
    timeline.merge()  # now, since hvd.init() would start Horovod's timeline again


# -- Horovod's own modules ---------------------------------------------------------------------------------------------
# A script may have replaced only the optimizer's wrapper, and use Horovod's names otherwise. On Keras 3 Horovod's
# callbacks end in errors about Keras' internals, and its ``broadcast_variables`` does not know Keras' variables; its
# ``join`` would silence this rank's engine, and its ``shutdown`` would end Horovod before the engine. After ``install``
# the callbacks name the import to change, and the others work, as long as they are called by module (``hvd.join()``).


BROKEN = (
    callbacks.BroadcastGlobalVariablesCallback,
    callbacks.MetricAverageCallback,
    callbacks.LearningRateScheduleCallback,
    callbacks.LearningRateWarmupCallback,
)
IMPORT = "'import hvd_async.tensorflow.keras as hvd' instead of 'import horovod.tensorflow.keras as hvd'"
_horovods_broadcast = hvd.broadcast_variables


def _refuse(self: Any, model: Any) -> NoReturn:
    raise ReplicaStateError(
        f"Horovod's own {type(self).__name__} does not work on Keras 3. Change the import: {IMPORT} has one that does"
    )


def _broadcast_variables(variables: Any, root_rank: int, **options: Any) -> Any:
    """Call Horovod's function, or this module's if there are Keras variables."""
    listed = list(variables)
    known = not any(isinstance(one, keras.Variable) for one in listed)
    return (_horovods_broadcast if known else broadcast_variables)(listed, root_rank, **options)


def install() -> None:
    """Put these functions into Horovod's modules, in this process."""
    for broken in BROKEN:
        if issubclass(broken, keras.callbacks.Callback):  # (with Keras 2 in TensorFlow's place of Keras they work)
            broken.set_model = _refuse
    hvd.broadcast_variables, hvd.join = _broadcast_variables, join
    hvd.shutdown = hvd_keras.shutdown = shutdown
