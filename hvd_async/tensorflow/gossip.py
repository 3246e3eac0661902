"""``GossipOptimizer`` for Keras 3 on TensorFlow: each rank trains its own weights and mixes them with a few others'."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import horovod.tensorflow as hvd

from hvd_async.algorithms.gossip.config import GossipOptions
from hvd_async.algorithms.option import documented
from hvd_async.optimizers.driver import made_by
from hvd_async.optimizers.factories import gossip_driver
from hvd_async.tensorflow.backend import check_backend
from hvd_async.tensorflow.loss_scaling import GossipScaleMethods
from hvd_async.tensorflow.methods import GossipMethods
from hvd_async.tensorflow.wrapping import BINDING, weight_replica, wrap


@documented(GossipOptions)
def GossipOptimizer(  # noqa: N802  a factory named like a class, as Horovod's
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
    algorithm: str = "sgp",
    topology: Any = None,
    peers: int | Mapping[int, int] = 1,
    mixing: Any = "uniform",
    max_staleness: int | None = None,
    gossip_every: int | None = None,
    hierarchical: bool | int = False,
    max_local_steps: int = 4,
    average_every: int | Mapping[int, int] = 0,
    fragments: int = 1,
    outer_lr: float | None = None,
    outer_momentum: float | None = None,
    schedule: Mapping[int, str] | None = None,
    quasi_global: bool = False,
    model: Any = None,
    buffers: str = "average",
) -> Any:
    """Wrap a Keras 3 optimizer so that each rank steps by itself and mixes its weights with its neighbours'.

    Gradients and the optimizer's state stay on their rank; after each local step weights travel, to a few ranks and not
    to all. So learning rates, schedules, clipping, weight decay and moving averages are each rank's own (``drain()``
    averages the moving averages of ``use_ema``). Constructing it does not communicate. Compile the model with
    ``jit_compile=False`` (XLA cannot wait for other ranks). The callbacks of ``hvd_async.tensorflow.keras`` call
    ``set_epoch``.

    Args:
        optimizer: any Keras optimizer on the TensorFlow backend. What is returned shares its variables and takes its
            place; do not use both. With ``mixed_float16`` pass a ``LossScaleOptimizer``, or have Keras put one around;
            a step that overflows is none. With Keras' own ``gradient_accumulation_steps`` the weights are mixed when
            they have moved.
        name: of the optimizer, as in Horovod.
        device_dense: nothing to do: the vector of all weights is put together in the CPU's memory.
        device_sparse: where sparse gradients are made dense if ``backward_passes_per_step`` adds them up.
        compression: how messages travel: ``hvd.Compression.none``, ``fp16``, ``bf16``, or ``int8``: 8-bit differences
            to what the neighbour knows already (CHOCO-SGD, Koloskova et al., 2019), of local, slowmo and diloco to the
            anchor. What compression leaves out stays with the sender, and goes with a later message.
        sparse_as_dense: nothing to do: gradients do not travel.
        gradient_predivide_factor: of gradients that travel; refused here.
        num_groups: likewise.
        groups: likewise.
        op: ``hvd.Average``.
        backward_passes_per_step: so many ``apply()`` calls are added up on this rank and make one step, whose weights
            are mixed; the others return at once. ``iterations`` counts steps.
        average_aggregated_gradients: divide their sum by their number.
        process_set: the ranks that gossip. Every rank of the job wraps the optimizer with it: those outside step by
            themselves.
        scale_local_gradients: divide gradients of variables of ``register_local_var()``, which are not mixed, by the
            number of ranks, as Horovod does.
        Own options: see ``GossipOptions``.
        model: the model that is trained, so that ``drain()`` and ``consensus()`` make its batch-norm statistics agree.

    Returns:
        An instance of the wrapped optimizer's class with the methods of ``GossipMethods``.

    Raises:
        ValueError: an argument that cannot be, or Keras on another backend than TensorFlow; the message says what can.
        NotInitializedError: ``hvd.init()`` was not called.
    """
    given = dict(locals())  # before any other name: all arguments, and nothing else
    check_backend()
    driver = made_by(lambda: gossip_driver(BINDING, given, lambda rank_group: weight_replica(given, rank_group)))
    return wrap(optimizer, driver, GossipMethods, GossipScaleMethods, name)
