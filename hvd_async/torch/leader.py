"""``LeaderOptimizer`` for torch: each rank trains by itself and is pulled towards whoever does best."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import horovod.torch as hvd
import torch

from hvd_async.algorithms.leader.selection import Strength
from hvd_async.optimizers.horovod_options import check_leader_options, local_ranks
from hvd_async.optimizers.leader import LeaderDriver
from hvd_async.runtime.process_sets import sharers_of
from hvd_async.torch.base import check_optimizer, parameter_names, wrap
from hvd_async.torch.collectives import LIFECYCLE
from hvd_async.torch.compression import Compression
from hvd_async.torch.methods import LeaderMethods
from hvd_async.torch.weight_replica import WeightReplica


def LeaderOptimizer(  # noqa: N802  a factory named like a class, as Horovod's
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: Any = hvd.global_process_set,
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
    named_buffers: Iterable[tuple[str, torch.Tensor]] | None = None,
    buffers: str = "average",
) -> Any:
    """Wrap a torch optimizer so that each rank trains by itself and is pulled towards a leader, or a centre.

    Gradients and the optimizer's state stay on their rank. Constructing it does not communicate.

    Args:
        optimizer: any torch optimizer (not LBFGS). It is not changed; what is returned shares its parameter groups and
            state and takes its place.
        named_parameters: ``model.named_parameters()``; names appear in error messages.
        compression: of gradients that travel; refused here, as are ``gradient_predivide_factor``, ``num_groups`` and
            ``groups``.
        backward_passes_per_step: how many times backward() is called before step(); gradients add up.
        op: ``hvd.Average``.
        sparse_as_dense: nothing to do: gradients do not travel.
        process_set: the ranks that share it. Every rank of the job wraps the optimizer with it: those outside step by
            themselves.
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
        loss_window: of lsgd: how many of the losses given to ``record_loss()`` count; None: 10.
        lr_spread: "linear": rank i's learning rate is i + 1 times the optimizer's; "power": 2^i times; "none".
        named_buffers: ``model.named_buffers()``, so that batch-norm statistics agree.
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
        compression is Compression.none,
    )  # fmt: skip
    check_optimizer(optimizer, "LeaderOptimizer")
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
    names = parameter_names([p for g in optimizer.param_groups for p in g["params"]], named_parameters)
    replica = WeightReplica(names, named_buffers, averages_statistics=buffers == "average")
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
    return driver.attach(wrap(optimizer, LeaderMethods))
