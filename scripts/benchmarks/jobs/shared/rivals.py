"""Rivals that go through torch's process groups on Gloo: DDP, its post-local SGD, decent-dp, torchft's two.

Each is imported when it is asked for: all jobs import this module, and torch.distributed.optim takes a core 1 s.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any

import torch
import torch.distributed

from hvd_async.simulation.names import LOCAL_PERIOD

from .rank import Job

TOPOLOGY = "one-peer-exp"
"""The graph of decent-dp."""
POWER_SGD_START = 2
"""Steps before PowerSGD's first: torch allows no fewer, and all of them are within a warm-up."""
ONE_BUCKET = 25
"""MB, said and not left to DDP, so that there is no smaller first one: PowerSGD's hook waits for its second reduction
on a thread of Gloo's, and with two buckets both wait on the two threads that there are, for ever."""
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
"""DiLoCo's outer SGD, of its paper and of torchft's example."""


def wrap(
    name: str,
    compression: str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    job: Job,
    ends: contextlib.ExitStack,
) -> tuple[torch.nn.Module, Any]:
    """A rival's model and optimizer.

    Args:
        name: ``ddp``, ``post-local-sgd``, ``decent-dp``, ``torchft`` or ``torchft-diloco``.
        compression: of DDP's gradients: "none", "fp16", "bf16" or "powersgd".
        model: the same on all ranks.
        optimizer: of its parameters, in one group.
        job: this rank.
        ends: takes what is to be ended with the arm, on all ranks.
    """
    if name.startswith("torchft"):
        _average_by_torchft(name, model, optimizer, job, ends)
        return model, optimizer
    join_process_group(job)
    if name == "decent-dp":
        return _decent_dp(model, optimizer)
    bucket = ONE_BUCKET if compression == "powersgd" else None
    wrapped = torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=False, bucket_cap_mb=bucket)
    if name == "post-local-sgd":
        return _post_local_sgd(wrapped, optimizer)
    if compression != "none":
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        hooks = {
            "fp16": default_hooks.fp16_compress_hook,
            "bf16": default_hooks.bf16_compress_hook,
            "powersgd": powerSGD_hook.powerSGD_hook,
        }
        state = None
        if compression == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=POWER_SGD_START)
        wrapped.register_comm_hook(state, hooks[compression])
    return wrapped, optimizer


def join_process_group(job: Job) -> None:
    """Collective: make torch's process group of all ranks, on Gloo, unless there is one."""
    if not torch.distributed.is_initialized():
        where = f"file://{job.folder / 'ddp'}"
        torch.distributed.init_process_group("gloo", init_method=where, rank=job.rank, world_size=job.size)


def _post_local_sgd(
    wrapped: torch.nn.parallel.DistributedDataParallel, optimizer: torch.optim.Optimizer
) -> tuple[torch.nn.Module, Any]:
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    state = post_localSGD_hook.PostLocalSGDState(None, None, 0, post_local_gradient_allreduce=False)
    wrapped.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    return wrapped, PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(LOCAL_PERIOD))


class _InBackward:
    """decent-dp updates during the backward pass: there is no step to take, and its optimizers are made in the second.

    Args:
        model: decent-dp's.
        optimizer: they are made with its learning rate of then.
    """

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all its optimizers; before there are any, that which they are made after."""
        own = [group for optimizer in self._model._optims for group in optimizer.param_groups]
        return own or self._optimizer.param_groups

    def zero_grad(self) -> None:
        """It has done so."""

    def step(self) -> None:
        """It has done so."""


def _decent_dp(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[torch.nn.Module, Any]:
    from decent_dp.ddp import DecentralizedDataParallel

    def make(named: list[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
        rate = optimizer.param_groups[0]["lr"]  # (its default is the highest, which a warm-up comes to later)
        return type(optimizer)([p for _, p in named], **optimizer.defaults | {"lr": rate})

    wrapped = DecentralizedDataParallel(model, make, topology=TOPOLOGY, _local_world_size=1)
    return wrapped, _InBackward(wrapped, optimizer)


def _average_by_torchft(
    name: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer, job: Job, ends: contextlib.ExitStack
) -> None:
    """Each rank is a group of its own to torchft, whose managers ask a lighthouse, on rank 0, before each average."""
    os.environ.setdefault("RUST_LOG", "error")  # it tells every request otherwise
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo, LocalSGD

    host = socket.gethostbyname(socket.gethostname())
    store = torch.distributed.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    ends.callback(lambda _: None, store)  # others use it until all managers have ended
    address = None
    if job.rank == 0:
        lighthouse = LighthouseServer(bind=f"{host}:0", min_replicas=job.size)
        ends.callback(lighthouse.shutdown)
        address = lighthouse.address()
    ends.callback(job.barrier)  # all managers end before the lighthouse and the stores
    address = job.agree(address)
    group = ProcessGroupGloo()
    ends.callback(group.shutdown)
    manager = Manager(
        pg=group,
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=job.size,
        use_async_quorum=False,
        init_sync=False,  # all begin with the same weights
        max_retries=0,  # an average that fails is an error
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=store.port,
        lighthouse_addr=address,
        hostname=host,
    )
    ends.callback(manager.shutdown)
    if name == "torchft":
        ends.enter_context(LocalSGD(manager, model, optimizer, sync_every=LOCAL_PERIOD))
    else:
        outer = torch.optim.SGD(model.parameters(), **OUTER)
        ends.enter_context(DiLoCo(manager, [model], optimizer, outer, sync_every=LOCAL_PERIOD))
