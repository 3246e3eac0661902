"""``LeaderOptimizer`` for torch: each rank trains by itself and is pulled towards whoever does best."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import horovod.torch as hvd
import torch

from hvd_async.following import Strengths
from hvd_async.leader_wrapping import leader_config
from hvd_async.leaders import Strength, spread
from hvd_async.options import check_leader_options, host_size
from hvd_async.sharers import sharers_of
from hvd_async.torch.base import check_optimizer, parameter_names, wrap
from hvd_async.torch.collectives import LIFECYCLE
from hvd_async.torch.compression import Compression
from hvd_async.torch.leader_mixin import LeaderMixin, Settings


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
    local_period: int = 4,
    global_period: int = 16,
    local_pull: Strength = 0.1,
    global_pull: Strength = 0.1,
    local_prox: Strength = 0.1,
    global_prox: Strength = 0.1,
    alpha: float | None = None,
    beta: float = 0.43,
    group: str | int | Sequence[Sequence[int]] = "host",
    loss_window: int = 10,
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
        local_period, global_period: steps of each rank, on the average, between two pulls of a group, and of all
            (easgd: the second). Steps of all ranks count together: fast ranks do more.
        local_pull, global_pull: strengths of these pulls, from 0 up to 1, or functions of the rank's own step.
        local_prox, global_prox: of the steps between them, a period's together.
        alpha, beta: easgd's: of a rank towards the centre (None: beta over the number of ranks), and of the centre
            towards the ranks' mean.
        group: "host" (Horovod's local ranks), ranks per group, or the groups of ranks themselves.
        loss_window: how many of the losses given to ``record_loss()`` count.
        lr_spread: "linear": rank i's learning rate is i + 1 times the optimizer's; "power": 2^i times; "none".
        named_buffers: ``model.named_buffers()``, so that batch-norm statistics agree.
        buffers: how: "average", or each rank's own ("local").

    Returns:
        An instance of the wrapped optimizer's class with the methods of ``LeaderMixin``.

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
    own_alpha = beta / sharers.size if alpha is None else alpha
    strengths = Strengths(local_pull, global_pull, local_prox, global_prox, own_alpha, beta)
    config = leader_config(
        sharers.size,
        lambda: host_size(True, hvd, sharers.process_set is None),
        algorithm=algorithm,
        local_period=local_period,
        global_period=global_period,
        group=group,
        strengths=strengths,
        loss_window=loss_window,
        buffers=buffers,
    )
    names = parameter_names([p for g in optimizer.param_groups for p in g["params"]], named_parameters)
    settings = Settings(LIFECYCLE, sharers, config, strengths, loss_window, spread(lr_spread, sharers.index))
    settings.named, settings.named_buffers, settings.buffer_policy = names, list(named_buffers or []), buffers
    wrapped = wrap(optimizer, LeaderMixin)
    wrapped._async = settings
    wrapped._async_check_parameters()
    LIFECYCLE.add(wrapped)
    return wrapped
