"""A torch model trained under one of the arms: a rival's, or ours with a quorum, by gossip, after a leader."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import hvd_async.torch as hvd
from hvd_async.simulation.names import IN_STEP, LEADERS, LOCAL_RIVALS, RIVALS, compression_of, gossip_of, quorum_of
from hvd_async.testing import distance_to_leader, stop_engine

from ...support.arms import IN_BACKWARD, PLAIN, WARM_UP
from . import rivals
from .rank import Job, counted
from .torch_ranks import share_cores, sleep_until_done

Loss = Callable[[torch.nn.Module], torch.Tensor]


@torch.no_grad()
def average(model: torch.nn.Module) -> None:
    """Collective: make a model's weights the mean of all ranks'."""
    for number, parameter in enumerate(model.parameters()):
        hvd.allreduce_(parameter.data, name=f"bench.parameter.{number}")


def mean_square(inputs: torch.Tensor) -> Loss:
    """Return the mean square of a model's outputs as a loss."""
    return lambda model: model(inputs).square().mean()


def resnet50(classes: int = 10) -> torch.nn.Module:
    """The runner's own ResNet-50."""
    sys.path.append(str(Path(__file__).resolve().parents[4] / "torch_models"))
    import vision

    model: torch.nn.Module = vision.build("resnet50", classes, 0.9)
    return model


class Contiguous:
    """A Horovod compression of contiguous copies where gradients are not (channels last), which Horovod refuses."""

    def __init__(self, compression: Any) -> None:
        self._compression = compression

    def compress(self, tensor: torch.Tensor) -> Any:
        """Return what is sent, and what decompressing needs."""
        return self._compression.compress(tensor.contiguous())

    def decompress(self, tensor: torch.Tensor, context: Any) -> Any:
        """Return what came, in its own type."""
        return self._compression.decompress(tensor, context)


class Arm:
    """A model and the optimizer that an arm stands for.

    Args:
        name: of the arm.
        model: the same on all ranks.
        job: this rank.
        optimizer: of the model's parameters; not wrapped. None: SGD with momentum that hardly changes them.
        own: further arguments of ``EagerOptimizer``, ``GossipOptimizer`` or ``LeaderOptimizer``.

    Attributes:
        gossip: what an arm that gossips does, else None.
        sleeps: whether to wait for Horovod's collectives asleep also where each rank has a core.
        waited: seconds that this rank's training thread has waited for others, in all. (DDP and decent-dp wait in the
            backward pass, local SGD in the optimizer's step; their computation counts too.)
    """

    def __init__(
        self, name: str, model: torch.nn.Module, job: Job, optimizer: torch.optim.Optimizer | None = None, **own: Any
    ) -> None:
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
        self.name, self.model, self.gossip = name, model, gossip_of(name)
        base, compression = compression_of(name)
        self.ours, self._base = base not in (*RIVALS, PLAIN), base
        self.optimizer: Any = optimizer
        reduced = getattr(hvd.Compression, compression) if self.ours or base == "horovod" else None
        self.sleeps = False
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
                own |= {**self.gossip._asdict(), "compression": reduced}
                self.optimizer = hvd.GossipOptimizer(optimizer, **own)

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
            if self.sleeps or share_cores(self._job.size):
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

    def warm_up(self, loss: Loss, steps: int = WARM_UP) -> None:
        """Take the steps that are not timed, and drain."""
        for _ in range(steps):
            self.train(loss)
        self.drain()

    @property
    def waited(self) -> float:
        """Seconds waited so far; see the class."""
        return float(self.optimizer.stats().wait_s) if self.ours else self._waited

    def distance(self) -> float | None:
        """Collective: how far the ranks' weights are from their mean (root mean square); None unless it gossips."""
        return self.optimizer.consensus_distance() if self.gossip else None

    def apart(self) -> float | None:
        """How far this rank's weights are from those of the leader of all that it knows, or from the center; None where
        it knows none, leads itself or follows none."""
        return distance_to_leader(self.optimizer) if self.name in LEADERS else None

    def norm(self) -> float:
        """The norm of this rank's weights."""
        return math.sqrt(sum(float(p.detach().double().square().sum()) for p in self.model.parameters()))

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        """Collective: in it the model is what stands for all ranks. Where they share one it is that, after a drain;
        ranks whose weights differ go on from their own."""
        if hasattr(self.optimizer, "consensus"):
            with self.optimizer.consensus():
                yield
            return
        own = [p.detach().clone() for p in self.model.parameters()] if self._base in LOCAL_RIVALS else []
        self.drain()
        yield
        with torch.no_grad():
            for parameter, weights in zip(self.model.parameters(), own, strict=False):
                parameter.copy_(weights)

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
            stop_engine(self.optimizer)

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
