"""``EagerOptimizer`` for torch: partial allreduce in place of Horovod's ``DistributedOptimizer``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from hvd_async.algorithms.eager.config import EagerOptions
from hvd_async.algorithms.eager.quorum import Quorum
from hvd_async.algorithms.option import documented
from hvd_async.optimizers.driver import made_by
from hvd_async.optimizers.factories import eager_driver
from hvd_async.runtime.process_sets import RankGroup
from hvd_async.torch.base import BINDING, listed, names_of, wrap
from hvd_async.torch.buffers import Pairs
from hvd_async.torch.compression import Compression
from hvd_async.torch.eager_methods import EagerMethods, TorchEagerDriver
from hvd_async.torch.gradient_replica import GradientReplica, RoundTransform
from hvd_async.torch.horovod_api import hvd


@documented(EagerOptions)
def EagerOptimizer(  # noqa: N802  a factory named like a class, as Horovod's
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
    quorum: Quorum = "solo",
    max_staleness: int = 16,
    grace: float | str = "auto",
    weight_prediction: float | str = "auto",
    seed: int = 0,
    bucket_cap_mb: float = 25.0,
    late_cap_mb: float = 4096.0,
    pace: str = "steps",
    hierarchical: bool | int = False,
    weighting: str = "ranks",
    scaler: Any = None,
    nonfinite: str = "skip",
    round_transform: RoundTransform | None = None,
    named_buffers: Pairs | Callable[[], Pairs] | None = None,
    buffers: str = "average",
) -> Any:
    """Wrap a torch optimizer so that its gradients are averaged by partial allreduce (eager-SGD, PPoPP 2020).

    Round t: every rank contributes what it has pending, ``r = (1/P) sum_i pending_i``, and applies ``x <- U(x, r)``;
    a rank that is late contributes nothing now and its gradient goes with the next round. Constructing it does not
    communicate.

    Args:
        optimizer: any torch optimizer whose step needs one gradient (not LBFGS). It is not changed; what is returned
            shares its parameter groups and state and takes its place.
        named_parameters: ``model.named_parameters()``; names appear in error messages.
        compression: how gradients travel: ``hvd.Compression.none``, ``fp16``, ``bf16`` (of ours, summed in float32), or
            a class with ``compress(tensor)`` and ``decompress(tensor, ctx)``, ``ctx`` depending on the dtype alone.
            What is pending stays float32.
        backward_passes_per_step: how many times backward() is called before step(); gradients add up, as in Horovod.
        op: ``hvd.Average`` or ``hvd.Sum``, over the ranks.
        gradient_predivide_factor: divide by it before the sum and multiply by it afterwards (with Average).
        groups: lists of parameters that travel together, or into how many groups to part all; ``num_groups`` is
            Horovod's older name for the latter. Parameters in no list are parted by ``bucket_cap_mb``.
        sparse_as_dense: nothing to do: sparse gradients always travel as dense tensors; SparseAdam gets them back
            sparse, without the rows that are zero.
        process_set: the ranks to average over. Every rank of the job wraps the optimizer with it: those outside step
            by themselves.
        Own options: see ``EagerOptions``.
        scaler: the ``torch.amp.GradScaler`` that scales the loss; then ``scaler.step(optimizer)`` steps, gradients are
            unscaled before others see them, and an overflow counts as a step without gradient.
        round_transform: called with the parameters whose ``p.grad`` holds a round's average, before it is applied; for
            gradient clipping and the like: ``lambda ps: torch.nn.utils.clip_grad_norm_(ps, 1.0)``.
        named_buffers: ``model.named_buffers()``, so that ``drain()`` makes batch-norm statistics and other buffers
            agree; or the function ``model.named_buffers``, for a model that adds buffers later.

    Returns:
        An instance of the wrapped optimizer's class (schedulers, ``state_dict`` and so on work) with the methods of
        ``EagerMethods``.

    Raises:
        ValueError: an argument that cannot be; the message says what can.
        NotInitializedError: ``hvd.init()`` was not called.
    """
    given = listed(locals())  # before any other name: all arguments, and nothing else

    def replica(
        options: EagerOptions, rank_group: RankGroup, factors: tuple[float, float], groups: Any
    ) -> GradientReplica:
        if scaler is not None and not callable(getattr(scaler, "is_enabled", None)):
            raise ValueError(f"scaler={scaler!r} does not scale losses: pass the torch.amp.GradScaler that does")
        own = {"scales": factors, "groups": 0 if groups is None else groups}
        return GradientReplica(rank_group, names_of(given, "EagerOptimizer"), options.config(), given | own)

    driver = made_by(lambda: eager_driver(BINDING, given, replica, TorchEagerDriver))
    return driver.attach(wrap(optimizer, EagerMethods))
