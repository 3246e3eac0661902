"""Horovod's API for torch on torch.distributed: the names of ``horovod.torch``, where Horovod is absent.

``hvd_async.torch`` exports them. Optimizers of this library do not use these collectives, but process groups of their
own, see ``hvd_async.torch.torch_collectives``.
"""

from __future__ import annotations

import atexit
import os
from typing import Any

import torch
import torch.distributed as dist

from hvd_async.torch.distributed import elastic, process_sets, world
from hvd_async.torch.distributed.calls import Adasum, Average, Max, Min, Product, Sum
from hvd_async.torch.distributed.collectives import (
    Compression,
    DistributedOptimizer,
    SyncBatchNorm,
    allgather,
    allgather_async,
    allgather_object,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    broadcast_object,
    broadcast_optimizer_state,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    join,
    poll,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
    synchronize,
)
from hvd_async.torch.distributed.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from hvd_async.torch.distributed.world import HorovodInternalError, is_initialized, no_counterpart, refusal

__all__ = [
    "Adasum", "Average", "Compression", "DistributedOptimizer", "HorovodInternalError", "Max", "Min", "ProcessSet",
    "Product", "Sum", "SyncBatchNorm", "add_process_set", "allgather", "allgather_async", "allgather_object",
    "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "alltoall", "alltoall_async", "barrier",
    "broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "broadcast_object", "broadcast_optimizer_state",
    "ccl_built", "cross_rank", "cross_size", "cuda_built", "ddl_built", "elastic",
    "global_process_set", "gloo_built", "gloo_enabled", "grouped_allgather", "grouped_allgather_async",
    "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_",
    "grouped_reducescatter", "grouped_reducescatter_async", "init", "is_homogeneous", "is_initialized", "join",
    "local_rank", "local_size", "mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built", "poll", "rank",
    "reducescatter", "reducescatter_async", "remove_process_set", "rocm_built", "shutdown", "size",
    "sparse_allreduce_async", "start_timeline", "stop_timeline", "synchronize",
]  # fmt: skip


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Meet the other ranks of the job; does nothing if they have met. A collective.

    The ranks are those of torch.distributed's default process group if there is one; else the environment of torchrun
    (or compatible: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), of mpirun or of srun says which rank this is; else it
    is alone, if nothing says that there are more.

    Args:
        comm: must be None.
        process_sets: list of ``ProcessSet`` to make, or "dynamic".

    Raises:
        NotImplementedError: ``comm`` is given.
        ValueError: the environment is incomplete or impossible, or ``process_sets`` is wrong.
        HorovodInternalError: a rank did not come within ``HVD_ASYNC_INIT_TIMEOUT`` seconds (300).
    """
    if comm is not None:
        no_counterpart("hvd.init(comm=...)", "Call hvd.init(), and pass process_set= for some of the ranks.")
    if world.is_due():
        world.init()
        # (Gloo's threads have to be gone when the interpreter ends: they may still release a tensor of Python's)
        atexit.register(shutdown)
        doors = world.current().doors
        _process_sets.initialize(process_sets)
        doors.all = [world.Door(*one) for one in allgather_object(tuple(doors.own), "hvd_async.doors")]


_process_sets = process_sets


def shutdown() -> None:
    """Undo ``init``; all ranks call it."""
    if is_initialized():
        atexit.unregister(shutdown)
        _process_sets.forget_all()
        world.forget()


os.register_at_fork(after_in_child=lambda: atexit.unregister(shutdown))


def rank() -> int:
    """Return this rank.

    Raises:
        NotInitializedError: ``hvd.init()`` was not called; so for the functions below.
    """
    return world.current().rank


def size() -> int:
    """Return the number of ranks."""
    return world.current().size


def local_rank() -> int:
    """Return this rank's place among those of its host."""
    return world.current().place.local_rank


def local_size() -> int:
    """Return the number of ranks of this host."""
    return world.current().place.local_size


def cross_rank() -> int:
    """Return this host's place among the hosts that have a rank of this local rank."""
    return world.current().place.cross_rank


def cross_size() -> int:
    """Return the number of hosts that have a rank of this local rank."""
    return world.current().place.cross_size


def is_homogeneous() -> bool:
    """Return whether all hosts have the same number of ranks."""
    return world.current().place.is_homogeneous


def gloo_built() -> bool:
    """Return whether tensors on a CPU can travel."""
    return bool(dist.is_gloo_available())


gloo_enabled = gloo_built


def nccl_built() -> bool:
    """Return whether torch has NCCL."""
    return bool(dist.is_nccl_available())


def cuda_built() -> bool:
    """Return whether torch has CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether torch has ROCm."""
    return torch.version.hip is not None


def _absent() -> bool:
    """Return False: there is no MPI, DDL or oneCCL here."""
    return False


mpi_built = mpi_enabled = mpi_threads_supported = ddl_built = ccl_built = _absent
start_timeline, stop_timeline = (
    refusal(f"hvd.{name}", "Use torch.profiler, or hvd.record(optimizer, folder).")
    for name in ("start_timeline", "stop_timeline")
)
