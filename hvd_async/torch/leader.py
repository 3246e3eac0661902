"""``LeaderOptimizer`` for torch: each rank trains by itself and is pulled towards whoever does best."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hvd_async.algorithms.leader.config import LeaderOptions
from hvd_async.algorithms.leader.selection import Strength
from hvd_async.algorithms.option import documented
from hvd_async.optimizers.driver import made_by
from hvd_async.optimizers.factories import leader_driver
from hvd_async.torch.base import BINDING, listed, weight_replica, wrap
from hvd_async.torch.buffers import Pairs
from hvd_async.torch.compression import Compression
from hvd_async.torch.horovod_api import hvd
from hvd_async.torch.methods import LeaderMethods


@documented(LeaderOptions)
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
    named_buffers: Pairs | Callable[[], Pairs] | None = None,
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
        Own options: see ``LeaderOptions``.
        named_buffers: ``model.named_buffers()``, so that batch-norm statistics and other buffers agree; or the function
            ``model.named_buffers``, for a model that adds buffers later.

    Returns:
        An instance of the wrapped optimizer's class with the methods of ``LeaderMethods``.

    Raises:
        ValueError: an argument that cannot be; the message says what can.
        NotInitializedError: ``hvd.init()`` was not called.
    """
    given = listed(locals())  # before any other name: all arguments, and nothing else
    averages = buffers == "average"
    driver = made_by(
        lambda: leader_driver(BINDING, given, lambda _: weight_replica(given, "LeaderOptimizer", averages))
    )
    return driver.attach(wrap(optimizer, LeaderMethods))
