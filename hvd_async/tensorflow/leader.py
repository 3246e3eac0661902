"""``LeaderOptimizer`` for Keras 3 on TensorFlow: each rank trains by itself and is pulled towards whoever does best."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd

from hvd_async.algorithms.leader.config import LeaderOptions
from hvd_async.algorithms.leader.selection import Strength
from hvd_async.algorithms.option import documented
from hvd_async.optimizers.driver import made_by
from hvd_async.optimizers.factories import leader_driver
from hvd_async.tensorflow.backend import check_backend
from hvd_async.tensorflow.loss_scaling import LeaderScaleMethods
from hvd_async.tensorflow.methods import LeaderMethods
from hvd_async.tensorflow.wrapping import BINDING, weight_replica, wrap


@documented(LeaderOptions)
def LeaderOptimizer(  # noqa: N802  a factory named like a class, as Horovod's
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = hvd.Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = hvd.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = hvd.global_process_set,
    scale_local_gradients: bool = True,
    *,
    algorithm: str = "lsgd",
    local_period: int | None = None,
    global_period: int | None = None,
    local_pull: Strength | None = None,
    global_pull: Strength | None = None,
    local_prox: Strength | None = None,
    global_prox: Strength | None = None,
    alpha: float | None = None,
    beta: float | None = None,
    group: str | int | Sequence[Any] | None = None,
    loss_window: int | None = None,
    lr_spread: str = "none",
    model: Any = None,
    buffers: str = "average",
) -> Any:
    """Wrap a Keras 3 optimizer so that each rank trains by itself and is pulled towards a leader, or a centre.

    Gradients and the optimizer's state stay on their rank. Constructing it does not communicate. Training losses reach
    it by themselves in Keras' ``fit()``, by ``record_loss()`` elsewhere. Compile the model with ``jit_compile=False``
    (XLA cannot call the engine).

    Args:
        optimizer: any Keras optimizer on the TensorFlow backend. What is returned shares its variables and takes its
            place; do not use both. With ``mixed_float16`` pass a ``LossScaleOptimizer``; a step that overflows is none.
        name: of the optimizer, as in Horovod.
        device_dense: nothing to do: the vector of all weights is put together in the CPU's memory.
        device_sparse: where sparse gradients are made dense if ``backward_passes_per_step`` adds them up.
        compression: of gradients that travel; refused here, as are ``gradient_predivide_factor``, ``num_groups`` and
            ``groups``.
        sparse_as_dense: nothing to do: gradients do not travel.
        op: ``hvd.Average``.
        backward_passes_per_step: so many ``apply()`` calls are added up on this rank and make one step.
        average_aggregated_gradients: divide their sum by their number.
        process_set: the ranks that share it. Every rank of the job wraps the optimizer with it: those outside step by
            themselves.
        scale_local_gradients: divide gradients of variables of ``register_local_var()``, which are not pulled, by the
            number of ranks, as Horovod does.
        Own options: see ``LeaderOptions``.
        model: the model that is trained, so that its batch-norm statistics agree.

    Returns:
        An instance of the wrapped optimizer's class with the methods of ``LeaderMethods``.

    Raises:
        ValueError: an argument that cannot be, or Keras on another backend than TensorFlow; the message says what can.
        NotInitializedError: ``hvd.init()`` was not called.
    """
    given = dict(locals())  # before any other name: all arguments, and nothing else
    check_backend()
    averages = buffers == "average"
    driver = made_by(lambda: leader_driver(BINDING, given, lambda ranks: weight_replica(given, ranks, averages)))
    return wrap(optimizer, driver, LeaderMethods, LeaderScaleMethods, name)
