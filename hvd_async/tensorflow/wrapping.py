"""How a Keras optimizer is wrapped, which cannot be, and what this binding supplies to its factories."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import horovod.tensorflow as hvd
import keras

from hvd_async.optimizers.driver import Driver, derived
from hvd_async.optimizers.factories import Binding
from hvd_async.optimizers.methods import OptimizerMethods
from hvd_async.runtime.process_sets import RankGroup
from hvd_async.tensorflow.collectives import LIFECYCLE
from hvd_async.tensorflow.compression import Compression
from hvd_async.tensorflow.horovod_names import check_not_horovods
from hvd_async.tensorflow.weight_replica import WeightReplica

BINDING = Binding(hvd, LIFECYCLE, Compression)


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


def weight_replica(given: Mapping[str, Any], rank_group: RankGroup, averages_statistics: bool = False) -> WeightReplica:
    """Return the replica of an optimizer whose ranks have weights of their own.

    Args:
        given: a factory's arguments.
        rank_group: the ranks that share the optimizer.
        averages_statistics: whether pulls average batch-norm statistics.

    Raises:
        ValueError: as ``check_optimizer``.
    """
    check_optimizer(given["optimizer"])
    return WeightReplica(
        rank_group.size,
        passes=given["backward_passes_per_step"],
        average_passes=given["average_aggregated_gradients"],
        device_sparse=given["device_sparse"],
        scale_local=given["scale_local_gradients"],
        model=given["model"],
        buffers=given["buffers"],
        averages_statistics=averages_statistics,
    )


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
