"""``GossipOptimizer`` for torch: each rank trains its own weights and mixes them with those of a few others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import horovod.torch as hvd
import torch

from hvd_async.optimizers.gossip import GossipDriver
from hvd_async.optimizers.horovod_options import check_gossip_options, compression_name, host_size
from hvd_async.runtime.process_sets import sharers_of
from hvd_async.torch.base import check_optimizer, parameter_names, wrap
from hvd_async.torch.collectives import LIFECYCLE
from hvd_async.torch.compression import Compression
from hvd_async.torch.methods import GossipMethods
from hvd_async.torch.weight_replica import WeightReplica


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
    hierarchical: bool | int = False,
    max_local_steps: int = 4,
    average_every: int = 0,
    schedule: Mapping[int, str] | None = None,
    named_buffers: Iterable[tuple[str, torch.Tensor]] | None = None,
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
            to what the neighbour knows already, with error feedback (CHOCO-SGD, Koloskova et al., 2019). What
            compression leaves out stays with the sender, so the ranks' mean does not change.
        backward_passes_per_step: how many times backward() is called before step(); gradients add up.
        op: ``hvd.Average``.
        gradient_predivide_factor, num_groups, groups: of gradients that travel; refused here.
        sparse_as_dense: nothing to do: gradients do not travel.
        process_set: the ranks that gossip. Every rank of the job wraps the optimizer with it: those outside step by
            themselves.
        algorithm: "sgp" (stochastic gradient push, Assran et al., ICML 2019), "osgp" (the same, with messages up to
            ``max_staleness`` steps late), "dpsgd" (Lian et al., NeurIPS 2017), "adpsgd" (Lian et al., ICML 2018: pairs
            of ranks are averaged while they compute, and no rank waits for a slow one) or "allreduce" (weights are
            averaged over all ranks after every step).
        topology: a name (``hvd_async.topology.NAMED``), a ``Topology`` or a networkx graph; None: "exponential" for
            sgp and osgp, "bipartite-exponential" for dpsgd and adpsgd.
        peers: how many ranks a rank sends to each step, where the topology leaves it open; or {epoch: peers}.
        mixing: "uniform" or "metropolis" weights, a matrix ``W[receiver, sender]`` whose columns sum to 1, or a list of
            such, one a step in turn.
        max_staleness: steps a message of osgp may be late; None: 1.
        hierarchical: average the ranks of a host first, then gossip between hosts, one partner a host. True for
            Horovod's local ranks, or so many ranks, numbered host by host.
        max_local_steps: steps that a rank of adpsgd may take between two averagings.
        average_every: average all ranks each so many steps (Gossip-PGA, Chen et al., 2021); 0: never.
        schedule: {epoch: algorithm}, in place of ``algorithm`` from that epoch on; ``set_epoch`` makes it so.
        named_buffers: ``model.named_buffers()``, so that ``drain()`` and ``consensus()`` make batch-norm statistics
            agree.
        buffers: how: "average" them, keep each rank's own ("local"), or take rank 0's ("root").

    Returns:
        An instance of the wrapped optimizer's class (schedulers, ``state_dict`` and so on work) with the methods of
        ``GossipMethods``.

    Raises:
        ValueError: an argument that cannot be; the message says what can.
        NotInitializedError: ``hvd.init()`` was not called.
    """
    sharers = sharers_of(process_set, hvd.global_process_set, *LIFECYCLE.world())
    check_gossip_options(
        op, hvd.Average, gradient_predivide_factor, groups or num_groups, backward_passes_per_step, buffers
    )
    known = {name: getattr(Compression, name) for name in ("none", "fp16", "bf16", "int8")}
    local = host_size(hierarchical, hvd, sharers.process_set is None)
    check_optimizer(optimizer, "GossipOptimizer")
    options = {
        "algorithm": algorithm,
        "graph": topology,
        "peers": peers,
        "weights": mixing,
        "max_staleness": max_staleness,
        "max_local_steps": max_local_steps,
        "average_every": average_every,
        "compression": compression_name(compression, known),
        "local_size": local,
    }
    names = parameter_names([p for group in optimizer.param_groups for p in group["params"]], named_parameters)
    replica = WeightReplica(names, named_buffers)
    driver = GossipDriver(LIFECYCLE, sharers, replica, buffers, options, schedule)
    return driver.attach(wrap(optimizer, GossipMethods))
