"""``LeaderOptimizer`` for Keras 3 on TensorFlow: each rank trains by itself and is pulled towards whoever does best."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd

from hvd_async.algorithms.leader.selection import Strength
from hvd_async.optimizers.horovod_options import check_leader_options, local_ranks
from hvd_async.optimizers.leader import LeaderDriver
from hvd_async.runtime.process_sets import sharers_of
from hvd_async.tensorflow.collectives import LIFECYCLE
from hvd_async.tensorflow.loss_scaling import LeaderScaleMethods
from hvd_async.tensorflow.methods import LeaderMethods
from hvd_async.tensorflow.weight_replica import WeightReplica
from hvd_async.tensorflow.wrapping import check_optimizer, wrap


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
        device_dense, device_sparse: where the vector of all weights is put together, and where sparse gradients are
            made dense if ``backward_passes_per_step`` adds them up.
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
        algorithm: "lsgd" (leader stochastic gradient descent, Teng et al., NeurIPS 2019): the rank with the lowest mean
            training loss leads its group, and another all; or "easgd" (Zhang et al., NeurIPS 2015): ranks and a centre
            are pulled towards each other.
        local_period: of lsgd: steps of each rank of a group, on the average, between two pulls towards its leader.
            Steps of all ranks count together: fast ranks do more. None: a quarter of ``global_period``.
        global_period: the same between two pulls of all ranks; None: 16.
        local_pull, global_pull: of lsgd: strengths of these pulls, from 0 up to 1, or functions of the rank's own step;
            None: 0.1.
        local_prox, global_prox: of lsgd: of the steps between them, a period's together; None: 0.1.
        alpha, beta: of easgd: of a rank towards the centre, and of the centre towards the ranks' mean. None: beta is
            0.43, and alpha beta over the number of ranks.
        group: of lsgd: "host" (Horovod's local ranks; also None), ranks per group, or the groups themselves: lists of
            ranks, or process sets. Groups other than all ranks need Horovod process sets: those that ``hvd.init()`` was
            given, or ``hvd.init(process_sets="dynamic")``.
        loss_window: of lsgd: how many of the last losses count; None: 10.
        lr_spread: "linear": rank i's learning rate is i + 1 times the optimizer's; "power": 2^i times; "none".
        model: the model that is trained, so that its batch-norm statistics agree.
        buffers: how: "average" them at each pull, or each rank's own ("local").

    Returns:
        An instance of the wrapped optimizer's class with the methods of ``LeaderMethods``.

    Raises:
        ValueError: an argument that cannot be; the message says what can.
        NotInitializedError: ``hvd.init()`` was not called.
    """
    sharers = sharers_of(process_set, hvd.global_process_set, *LIFECYCLE.world())
    check_leader_options(
        op, hvd.Average, gradient_predivide_factor, groups or num_groups, backward_passes_per_step, buffers,
        compression is hvd.Compression.none,
    )  # fmt: skip
    check_optimizer(optimizer)
    options = {
        "local_period": local_period,
        "global_period": global_period,
        "local_pull": local_pull,
        "global_pull": global_pull,
        "local_prox": local_prox,
        "global_prox": global_prox,
        "alpha": alpha,
        "beta": beta,
        "group": group,
        "loss_window": loss_window,
    }
    replica = WeightReplica(
        sharers.size,
        passes=backward_passes_per_step,
        average_passes=average_aggregated_gradients,
        devices=(device_dense, device_sparse),
        scale_local=scale_local_gradients,
        model=model,
        buffers=buffers,
        averages_statistics=buffers == "average",
    )
    driver = LeaderDriver(
        LIFECYCLE,
        sharers,
        replica,
        buffers,
        lambda: local_ranks(hvd, sharers.process_set is None, "group='host'", "pass group=[[0, 1], ...]"),
        algorithm,
        lr_spread,
        options,
    )
    return wrap(optimizer, driver, LeaderMethods, LeaderScaleMethods, name)
