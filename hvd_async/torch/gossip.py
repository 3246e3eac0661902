"""``GossipOptimizer`` for torch: each rank trains its own weights and mixes them with those of a few others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from hvd_async.algorithms.gossip.config import GossipOptions
from hvd_async.algorithms.option import documented
from hvd_async.optimizers.driver import made_by
from hvd_async.optimizers.factories import gossip_driver
from hvd_async.torch.base import BINDING, listed, weight_replica, wrap
from hvd_async.torch.buffers import Pairs
from hvd_async.torch.compression import Compression
from hvd_async.torch.horovod_api import hvd
from hvd_async.torch.methods import GossipMethods


@documented(GossipOptions)
def GossipOptimizer(  # noqa: N802  a factory named like a class, as Horovod's
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
    named_buffers: Pairs | Callable[[], Pairs] | None = None,
    buffers: str = "average",
) -> Any:
    """Wrap a torch optimizer so that each rank steps by itself and mixes its weights with its neighbours'.

    Gradients and the optimizer's state stay on their rank; after each local step weights travel, to a few ranks and not
    to all. Constructing it does not communicate.

    Args:
        optimizer: any torch optimizer (not LBFGS). It is not changed; what is returned shares its parameter groups and
            state and takes its place.
        named_parameters: ``model.named_parameters()``; names appear in error messages.
        compression: how messages travel: ``hvd.Compression.none``, ``fp16``, ``bf16``, or ``int8``: 8-bit differences
            to what the neighbour knows already (CHOCO-SGD, Koloskova et al., 2019), of local, slowmo and diloco to the
            anchor. What compression leaves out stays with the sender, and goes with a later message.
        backward_passes_per_step: how many times backward() is called before step(); gradients add up.
        op: ``hvd.Average``.
        gradient_predivide_factor: of gradients that travel; refused here.
        num_groups: likewise.
        groups: likewise.
        sparse_as_dense: nothing to do: gradients do not travel.
        process_set: the ranks that gossip. Every rank of the job wraps the optimizer with it: those outside step by
            themselves.
        Own options: see ``GossipOptions``.
        named_buffers: ``model.named_buffers()``, so that ``drain()`` and ``consensus()`` make batch-norm statistics
            and other buffers agree; or the function ``model.named_buffers``, for a model that adds buffers later.

    Returns:
        An instance of the wrapped optimizer's class (schedulers, ``state_dict`` and so on work) with the methods of
        ``GossipMethods``.

    Raises:
        ValueError: an argument that cannot be; the message says what can.
        NotInitializedError: ``hvd.init()`` was not called.
    """
    given = listed(locals())  # before any other name: all arguments, and nothing else
    driver = made_by(lambda: gossip_driver(BINDING, given, lambda _: weight_replica(given, "GossipOptimizer")))
    return driver.attach(wrap(optimizer, GossipMethods))
