"""A torch model trained under one of the arms: a rival's, or ours with a quorum, by gossip, after a leader.

Rivals other than Horovod go through torch's process groups on Gloo: DDP, its post-local SGD, decent-dp, torchft's two.
Each is imported when it is asked for: torch.distributed.optim alone takes a core 1 s.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed

import hvd_async.torch as hvd
from hvd_async.algorithms.eager.config import StartRound
from hvd_async.algorithms.eager.rank import EagerWorker
from hvd_async.runtime.interfaces import Vector
from hvd_async.runtime.protocol import Command
from hvd_async.testing import stop_engine
from scripts.benchmarks.support.names import (
    IN_STEP,
    LEADERS,
    LOCAL_PERIOD,
    LOCAL_RIVALS,
    RIVALS,
    gossip_of,
    quorum_of,
    read_name,
)

from ..support.arms import IN_BACKWARD, MUTANT, PLAIN
from .rank import Job, counted

Loss = Callable[[torch.nn.Module], torch.Tensor]
POLL = 0.0005
"""Seconds between two looks at what Horovod has done: its own waiting keeps a core busy, which others need here."""
TOPOLOGY = "one-peer-exp"
"""The graph of decent-dp."""
POWER_SGD_START = 2
"""Steps before PowerSGD's first: torch allows no fewer, and all of them are within a warm-up."""
ONE_BUCKET = 25
"""MB, said and not left to DDP, so that there is no smaller first one: PowerSGD's hook waits for its second reduction
on a thread of Gloo's, and with two buckets both wait on the two threads that there are, for ever."""
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
"""DiLoCo's outer SGD, of its paper and of torchft's example."""


# -- ranks -------------------------------------------------------------------------------------------------------------


def begin() -> tuple[Any, Callable[[], None]]:
    """Initialize Horovod; return the binding's module, and a barrier."""
    hvd.init()
    torch.set_num_threads(1)
    return hvd, barrier


def barrier() -> None:
    """Wait for all ranks."""
    handle = hvd.allreduce_async(torch.zeros(1), name="bench.barrier")
    sleep_until_done([handle])
    hvd.synchronize(handle)


def sleep_until_done(handles: Iterable[int]) -> None:
    """Wait for Horovod's collectives. Its ``synchronize()`` asks without end whether they are done; where ranks share
    cores this takes them from ranks that still compute, and from the threads that send."""
    for handle in handles:
        while not hvd.poll(handle):
            time.sleep(POLL)


@torch.no_grad()
def average(model: torch.nn.Module) -> None:
    """Make a model's weights the mean of all ranks'. Collective."""
    for number, parameter in enumerate(model.parameters()):
        hvd.allreduce_(parameter.data, name=f"bench.parameter.{number}")


# -- an arm ------------------------------------------------------------------------------------------------------------


class Contiguous:
    """Horovod compression of contiguous copies where gradients are not (channels last), which Horovod refuses."""

    def __init__(self, compression: Any) -> None:
        self._compression = compression

    def compress(self, tensor: torch.Tensor) -> Any:
        return self._compression.compress(tensor.contiguous())

    def decompress(self, tensor: torch.Tensor, context: Any) -> Any:
        return self._compression.decompress(tensor, context)


class Known(torch.autograd.Function):
    """Scalar whose gradients are known: its backward pass hands them over, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], *parameters: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, one: torch.Tensor) -> Any:
        return (None, *ctx.gradients)


class Arm:
    """A model and the optimizer of an arm.

    Args:
        name: of the arm.
        model: the same on all ranks.
        job: this rank.
        optimizer: of the model's parameters; not wrapped. None: SGD with momentum that hardly changes them.
        scaler: of gradients in half precision.
        own: further arguments of ``EagerOptimizer``, ``GossipOptimizer`` or ``LeaderOptimizer``.

    Attributes:
        model, optimizer: as the arm has them.
        gossip: what an arm that gossips does, else None.
        ours: whether it is an arm of hvd_async.
        computed: seconds of each step until the gradients were there, the sleep included.
    """

    def __init__(
        self,
        name: str,
        model: torch.nn.Module,
        job: Job,
        optimizer: torch.optim.Optimizer | None = None,
        scaler: Any = None,
        **own: Any,
    ) -> None:
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
        name = "solo" if name == MUTANT else name
        self.name, self.model, self.gossip = name, model, gossip_of(name)
        base, compression = read_name(name)[:2]
        self.ours, self._base = base not in (*RIVALS, PLAIN), base
        self.optimizer: Any = optimizer
        reduced = getattr(hvd.Compression, compression) if self.ours or base == "horovod" else None
        self.computed: list[float] = []
        self._job, self._waited, self._buffers, self._scaler = job, 0.0, dict(model.named_buffers()), scaler
        self._ends = contextlib.ExitStack()
        named = {"named_parameters": model.named_parameters()}
        if base == "horovod":
            self.optimizer = hvd.DistributedOptimizer(optimizer, compression=Contiguous(reduced), **named)
        elif not self.ours and base != PLAIN:
            self.model, self.optimizer = wrap(base, compression, model, optimizer, job, self._ends)
        elif self.ours:
            own |= named | {"named_buffers": model.named_buffers()}
            if name in LEADERS:
                self.optimizer = hvd.LeaderOptimizer(optimizer, algorithm=name, **own)
            elif self.gossip is None:
                own |= {} if scaler is None else {"scaler": scaler}
                self.optimizer = hvd.EagerOptimizer(optimizer, quorum=quorum_of(base), compression=reduced, **own)
            else:
                own |= {**self.gossip._asdict(), "compression": reduced}
                self.optimizer = hvd.GossipOptimizer(optimizer, **own)

    def train(self, loss: Loss, seconds: float = 0.0, exact: bool = False, reads_loss: bool = False) -> None:
        """Take a step.

        Args:
            loss: of the model.
            seconds: of sleep after the forward pass, before the gradients are there.
            exact: the seconds are those of the whole computation: gradients are computed first, the rest is slept, and
                the backward pass hands them over. (An arm hands gradients over during the backward pass.)
            reads_loss: whether the script reads its loss after the step, as a progress bar does.
        """
        began = time.perf_counter()
        self.optimizer.zero_grad()
        value = loss(self.model)
        if self.name in LEADERS:
            self.optimizer.record_loss(value.detach())
        if exact:
            parameters = list(self.model.parameters())
            value = Known.apply(torch.autograd.grad(value, parameters), *parameters)
            seconds -= time.perf_counter() - began
        if seconds > 0:
            time.sleep(seconds)
        started = time.perf_counter()
        self.computed.append(started - began)
        (value if self._scaler is None else self._scaler.scale(value)).backward()
        if self._base in IN_BACKWARD:
            self._waited += time.perf_counter() - started
        started = time.perf_counter()
        if self._base == "horovod":
            if self._job.size > len(os.sched_getaffinity(0)):  # ranks share cores
                sleep_until_done(handle for handle, _ in self.optimizer._handles.values())
            self.optimizer.synchronize()
            self._waited += time.perf_counter() - started
            with self.optimizer.skip_synchronize():
                self._update()
        else:
            self._update()
            if self._base in IN_STEP:
                self._waited += time.perf_counter() - started
        if reads_loss:
            value.item()

    def _update(self) -> None:
        if self._scaler is None:
            self.optimizer.step()
        else:
            self._scaler.step(self.optimizer)
            self._scaler.update()

    @property
    def waited(self) -> float:
        """Seconds that the training thread has waited for others. (DDP and decent-dp wait in the backward pass, local
        SGD in the optimizer's step; their computation counts too.)"""
        return float(self.optimizer.stats().wait_s) if self.ours else self._waited

    def distance(self) -> float | None:
        """Return how far the ranks' weights are from their mean (root mean square); None unless it gossips.
        Collective."""
        return self.optimizer.consensus_distance() if self.gossip else None

    def norm(self) -> float:
        return math.sqrt(sum(float(p.detach().double().square().sum()) for p in self.model.parameters()))

    def drain(self) -> None:
        """Apply every gradient everywhere, or end with the consensus; let batch-norm statistics agree. Collective."""
        if self.ours:
            self.optimizer.drain()
            return
        if self._base in LOCAL_RIVALS:
            average(self.model)
        for name, buffer in self._buffers.items():
            if buffer.is_floating_point():
                hvd.allreduce_(buffer, name=f"bench.buffer.{name}")

    def close(self) -> None:
        """Stop the engine, so that the next arm starts with its own; a rival's threads too. Collective."""
        self._ends.close()
        if self.ours:
            stop_engine(self.optimizer)

    def stats(self) -> dict[str, Any]:
        """Return ``stats()`` as JSON; nothing of a rival."""
        return counted(self.optimizer.stats()) if self.ours else {}

    def identical(self) -> bool:
        """Return whether all ranks have the same weights, bit for bit. Collective."""
        flat = torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])
        return self._job.same(flat.cpu().numpy().tobytes())


# -- rivals ------------------------------------------------------------------------------------------------------------


def wrap(
    name: str,
    compression: str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    job: Job,
    ends: contextlib.ExitStack,
) -> tuple[torch.nn.Module, Any]:
    """Return a rival's model and optimizer.

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
    if not torch.distributed.is_initialized():
        where = f"file://{job.folder / 'ddp'}"
        torch.distributed.init_process_group("gloo", init_method=where, rank=job.rank, world_size=job.size)
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
    """decent-dp's optimizer: it updates during the backward pass, so there is no step to take.

    Args:
        model: decent-dp's. It makes its optimizers in the second step.
        optimizer: they are made with its learning rate of then.
    """

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        own = [group for optimizer in self._model._optims for group in optimizer.param_groups]
        return own or self._optimizer.param_groups

    def zero_grad(self) -> None: ...

    def step(self) -> None: ...


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
    """Make each rank a group of its own to torchft, whose managers ask a lighthouse, on rank 0, before each average."""
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


# -- the mutant --------------------------------------------------------------------------------------------------------


class Forgetful(EagerWorker):
    """Rank that is broken on purpose: a gradient that comes too late for its own round is lost, as in the code
    published with the paper, where it goes into a buffer that is emptied, or written over, before the next round.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._gone: dict[int, int] = {}

    def on_command(self, command: Command) -> None:
        if isinstance(command, StartRound):
            self._gone.update(dict.fromkeys(command.buckets, command.round))
        super().on_command(command)

    def hand_over(self, bucket: int, vector: Vector | None) -> None:
        super().hand_over(bucket, self._kept(bucket, vector))

    def step(self, vectors: Mapping[int, Vector | None], *args: Any, **kwargs: Any) -> Any:
        kept = {bucket: self._kept(bucket, vector) for bucket, vector in vectors.items()}
        return super().step(kept, *args, **kwargs)

    def _kept(self, bucket: int, vector: Vector | None) -> Vector | None:
        late = self._gone.get(bucket, 0) >= self._steps + self._base + 1
        return None if late else vector


@contextlib.contextmanager
def forgetful(wanted: bool) -> Iterator[None]:
    """Context in which optimizers that take their first step lose what is late, if this is wanted."""
    if not wanted:
        yield
        return
    with mock.patch("hvd_async.optimizers.eager.EagerWorker", Forgetful):
        yield
