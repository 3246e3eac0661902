"""A torch model trained by one of the arms: a rival's, ours with a quorum, by gossip, after a leader."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

import hvd_async.torch as hvd
from hvd_async.algorithms.leader.messages import ALL_RANKS
from hvd_async.torch.collectives import LIFECYCLE

from ..schedule import IN_BACKWARD, IN_STEP, LEADERS, LOCAL_RIVALS, PLAIN, RIVALS, compression_of, gossip_of, quorum_of
from . import rivals
from .common import Job, counted

POLL = 0.0005
"""Seconds between two looks at what Horovod has done: its own waiting keeps a core busy, which others need here."""

Loss = Callable[[torch.nn.Module], torch.Tensor]


def start() -> Job:
    """This rank of a torch job."""
    hvd.init()
    torch.set_num_threads(1)
    return Job(hvd, barrier)


def finish(job: Job) -> None:
    """The job has come to its end: call it last."""
    job.finish()
    hvd.shutdown()


def barrier() -> None:
    """Wait for all ranks."""
    handle = hvd.allreduce_async(torch.zeros(1), name="bench.barrier")
    sleep_until_done([handle])
    hvd.synchronize(handle)


@torch.no_grad()
def average(model: torch.nn.Module) -> None:
    """Collective: make a model's weights the mean of all ranks'."""
    for number, parameter in enumerate(model.parameters()):
        hvd.allreduce_(parameter.data, name=f"bench.parameter.{number}")


def share_cores(ranks: int) -> bool:
    """Whether there are fewer cores than ranks."""
    return ranks > len(os.sched_getaffinity(0))


def sleep_until_done(handles: Iterable[int]) -> None:
    """Wait for Horovod's collectives. Its ``synchronize()`` does so by asking without end whether they are done; where
    ranks share cores this takes them from ranks that still compute, and from the threads that send."""
    for handle in handles:
        while not hvd.poll(handle):
            time.sleep(POLL)


def resnet50(classes: int = 10) -> torch.nn.Module:
    """The runner's own ResNet-50."""
    sys.path.append(str(Path(__file__).resolve().parents[3] / "torch_models"))
    import vision

    model: torch.nn.Module = vision.build("resnet50", classes, 0.9)
    return model


class Contiguous:
    """A Horovod compression of contiguous copies where gradients are not (channels last), which Horovod refuses."""

    def __init__(self, compression: Any) -> None:
        self._compression = compression

    def compress(self, tensor: torch.Tensor) -> Any:
        """As Horovod's."""
        return self._compression.compress(tensor.contiguous())

    def decompress(self, tensor: torch.Tensor, context: Any) -> Any:
        """As Horovod's."""
        return self._compression.decompress(tensor, context)


class Arm:
    """A model and the optimizer that an arm stands for.

    Args:
        name: of the arm.
        model: the same on all ranks.
        optimizer: of the model's parameters; not wrapped.
        job: this rank.
        own: further arguments of ``EagerOptimizer``, ``GossipOptimizer`` or ``LeaderOptimizer``.

    Attributes:
        gossip: (algorithm, compression) of an arm that gossips, else None.
        waited: seconds that this rank's training thread has waited for others, in all. (DDP and decent-dp wait in the
            backward pass, local SGD in the optimizer's step; their computation counts too.)
    """

    def __init__(
        self, name: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer, job: Job, **own: Any
    ) -> None:
        self.name, self.model, self.gossip = name, model, gossip_of(name)
        base, compression = compression_of(name)
        self.ours, self._base = base not in (*RIVALS, PLAIN), base
        self.optimizer: Any = optimizer
        reduced = getattr(hvd.Compression, compression) if self.ours or base == "horovod" else None
        self._job, self._waited, self._buffers = job, 0.0, dict(model.named_buffers())
        self._ends = contextlib.ExitStack()
        if base == "horovod":
            named = model.named_parameters()
            self.optimizer = hvd.DistributedOptimizer(
                optimizer, named_parameters=named, compression=Contiguous(reduced)
            )
        elif base in RIVALS:
            self.model, self.optimizer = rivals.wrap(base, compression, model, optimizer, job, self._ends)
        elif self.ours:
            own |= {"named_parameters": model.named_parameters(), "named_buffers": model.named_buffers()}
            if name in LEADERS:
                self.optimizer = hvd.LeaderOptimizer(optimizer, algorithm=name, **own)
            elif self.gossip is None:
                self.optimizer = hvd.EagerOptimizer(optimizer, quorum=quorum_of(base), compression=reduced, **own)
            else:
                self.optimizer = hvd.GossipOptimizer(optimizer, algorithm=base, compression=reduced, **own)

    def train(self, loss: Loss, delay: float = 0.0, recorded: Loss | None = None) -> None:
        """One step; ``delay`` s of sleep stand for computation, before the gradients are there. The leader is the rank
        with the least ``recorded``; None: with the least ``loss``."""
        self.optimizer.zero_grad()
        value = loss(self.model)
        if self.name in LEADERS:
            with torch.no_grad():
                self.optimizer.record_loss(value if recorded is None else recorded(self.model))
        if delay > 0:
            time.sleep(delay)
        started = time.perf_counter()
        value.backward()
        if self._base in IN_BACKWARD:
            self._waited += time.perf_counter() - started
        if self._base == "horovod":
            started = time.perf_counter()
            if share_cores(self._job.size):
                sleep_until_done(handle for handle, _ in self.optimizer._handles.values())
            self.optimizer.synchronize()
            self._waited += time.perf_counter() - started
            with self.optimizer.skip_synchronize():
                self.optimizer.step()
        else:
            started = time.perf_counter()
            self.optimizer.step()
            if self._base in IN_STEP:
                self._waited += time.perf_counter() - started

    @property
    def waited(self) -> float:
        """As above."""
        return float(self.optimizer.stats().wait_s) if self.ours else self._waited

    def distance(self) -> float | None:
        """Collective: how far the ranks' weights are from their mean (root mean square); None unless it gossips."""
        return self.optimizer.consensus_distance() if self.gossip else None

    def apart(self) -> float | None:
        """How far this rank's weights are from those of the leader of all that it knows, or from the centre; None where
        it knows none, leads itself or follows none."""
        if self.name not in LEADERS:
            return None
        receiver = self.optimizer._async.worker.receiver
        target = receiver.pending_results().targets.get(ALL_RANKS)
        return None if target is None else float((receiver.snapshot - target).norm())

    def norm(self) -> float:
        """The norm of this rank's weights."""
        return math.sqrt(sum(float(p.detach().double().square().sum()) for p in self.model.parameters()))

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        """Collective: in it the model is what stands for all ranks. Where they share one it is that, after a drain."""
        if hasattr(self.optimizer, "consensus"):
            with self.optimizer.consensus():
                yield
        else:
            self.drain()
            yield

    def drain(self) -> None:
        """Apply every gradient everywhere, or end with what stands for all ranks; let batch-norm statistics agree."""
        if self.ours:
            self.optimizer.drain()
            return
        if self._base in LOCAL_RIVALS:
            average(self.model)
        for name, buffer in self._buffers.items():
            if buffer.is_floating_point():
                hvd.allreduce_(buffer, name=f"bench.buffer.{name}")

    def close(self) -> None:
        """Collective: drain, and stop the engine, so that the next arm starts with its own; a rival's threads too."""
        self._ends.close()
        if self.ours:
            LIFECYCLE.shutdown()

    def stats(self) -> dict[str, Any]:
        """Ours: ``stats()``, as JSON, but for ``history``. Others: nothing."""
        own = counted(self.optimizer.stats()) if self.ours else {}
        own.pop("history", None)
        return own

    def history(self) -> list[tuple[float, int, int]]:
        """(Unix time in s, group or -1 for all, leader) of the last pulls; none where nobody leads."""
        return list(self.optimizer.stats().history) if self.name in LEADERS else []

    def identical(self) -> bool:
        """Collective: whether all ranks have the same weights, bit for bit."""
        flat = torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])
        return self._job.same(flat.numpy().tobytes())
