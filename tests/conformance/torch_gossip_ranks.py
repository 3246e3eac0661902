"""One rank that gossips in torch: least squares on two parameters, an optimizer by case. As ``torch_ranks``."""

from __future__ import annotations

import copy
import functools
import io
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

import hvd_async.torch as hvd
from hvd_async import mixing, topology
from hvd_async.algorithms.gossip.message_exchange import HEADER
from hvd_async.algorithms.gossip.worker import PushSumWorker
from hvd_async.runtime.interfaces import Handle
from hvd_async.stats import GossipStats
from hvd_async.testing import Cluster, MemoryCollectives
from tests.conformance.gossip_reference import Problem, batch
from tests.conformance.reference import Array
from tests.conformance.torch_ranks import flat, plain


def graph(name: str, size: int, scheme: str = "uniform") -> list[Array]:
    """Mixing matrices of a named graph."""
    return mixing.matrices(topology.named(name, size), scheme)


@functools.cache
def _data(rank: int, step: int, elements: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = batch(rank, step, elements)
    return torch.as_tensor(inputs, dtype=dtype), torch.as_tensor(targets, dtype=dtype)


@dataclass
class Seen:
    """What happened on one rank.

    Attributes:
        path: what the model held after each step.
        weights: the push-sum weight after each step.
        moved: by what each local update changed this rank's (biased) weights.
        sent: for each step that sent something what its receivers decoded.
        log: the worker's.
        drained: what the model held at the end.
        stats: at the end.
    """

    path: list[Array] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    moved: list[Array] = field(default_factory=list)
    sent: dict[int, Array] = field(default_factory=dict)
    log: list[Any] = field(default_factory=list)
    drained: Array = field(default_factory=lambda: np.zeros(0))
    stats: GossipStats = field(default_factory=GossipStats)

    def taken(self) -> list[list[tuple[int, int]]]:
        """What it took in at each step, without what it took in at the end."""
        return [list(messages) for _, messages in self.log[: len(self.path)]]

    def receivers(self, rank: int, weights: Sequence[Array], every: int = 1) -> list[list[int]]:
        """To whom it gave something at each step: to all of its neighbours, or at the end, when others were done and it
        had little left, to none."""
        others = [[int(i) for i in np.flatnonzero(phase[:, rank]) if i != rank] for phase in weights]
        return [
            others[step // every % len(others)] if step + 1 in self.sent else [] for step in range(len(self.path) + 1)
        ]


class GossipTrainer:
    """One rank.

    Args:
        problem: its weights, data and optimizer.
        rank: which.
        make: another optimizer than the problem's.
        dtype: of the parameters.
        options: of ``GossipOptimizer``.
    """

    wrapper = staticmethod(hvd.GossipOptimizer)

    def __init__(
        self,
        problem: Problem,
        rank: int,
        make: Callable[[Any], Any] | None = None,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        self.problem, self.rank, self.steps = problem, rank, 0
        first = torch.as_tensor(problem.start[rank], dtype=dtype)
        self.parameters = [torch.nn.Parameter(first[:2].clone()), torch.nn.Parameter(first[2:].clone().view(2, -1))]
        self.opt = self.wrapper(
            plain(problem.case, self.parameters) if make is None else make(self.parameters), **options
        )

    def gradient(self) -> None:
        """That of the next step. (By hand: backward would take half of the tests' time.)"""
        self.steps += 1
        self.before = self.weights()
        inputs, targets = _data(self.rank, self.steps, self.problem.start.shape[1], self.parameters[0].dtype)
        with torch.no_grad():
            weights = torch.cat([p.view(-1) for p in self.parameters])
            gradient = inputs.T @ (inputs @ weights - targets) / len(inputs)
            for parameter, part in zip(self.parameters, gradient.split((2, len(gradient) - 2)), strict=True):
                parameter.grad = part.view_as(parameter)

    def step(self) -> None:
        """One."""
        self.gradient()
        self.opt.step()

    def train(self, steps: int) -> GossipTrainer:
        """Several."""
        for _ in range(steps):
            self.step()
        return self

    def weights(self) -> Array:
        """Flat, float64."""
        return flat(self.parameters)

    def watch(self) -> Seen:
        """Meet the other ranks, and record from now on what this one does."""
        worker, seen = self.opt._async.worker_now(), Seen()
        mix = worker.mix

        def spied_mix(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
            held = worker.weight * self.before
            seen.moved.append(after.double().numpy() - held)
            mixed: torch.Tensor = mix(before, after)
            seen.path.append(mixed.double().numpy())
            seen.weights.append(worker.weight)
            return mixed

        worker.mix = spied_mix
        if isinstance(worker, PushSumWorker):
            _watch_messages(worker, seen)
        seen.log = worker.log = []
        return seen


def _watch_messages(worker: PushSumWorker, seen: Seen) -> None:
    """Record what receivers decode of each step's messages."""
    offer, encode, step = worker._offer, worker._known.encode, 0

    def spied_offer(of: int, x: torch.Tensor, weight: float) -> Any:
        nonlocal step
        step = of
        return offer(of, x, weight)

    def spied_encode(edge: str, vector: torch.Tensor) -> Any:
        data, decoded = encode(edge, vector)
        seen.sent[step] = decoded.double().numpy().copy()
        return data, decoded

    worker._offer, worker._known.encode = spied_offer, spied_encode  # type: ignore[method-assign]


T = TypeVar("T", bound=GossipTrainer)


def saved(trainer: GossipTrainer) -> dict[str, Any]:
    """What a script would save, through a file's format."""
    file = io.BytesIO()
    torch.save({"model": [p.detach() for p in trainer.parameters], "opt": trainer.opt.state_dict()}, file)
    file.seek(0)
    state: dict[str, Any] = torch.load(file, weights_only=True)
    return state


def resume(state: dict[str, Any], trainer: T, done: int) -> T:
    """A trainer that has taken up what was saved after so many steps."""
    with torch.no_grad():
        for parameter, values in zip(trainer.parameters, state["model"], strict=True):
            parameter.copy_(values)
    trainer.opt.load_state_dict(copy.deepcopy(state["opt"]))  # (torch keeps the tensors it is given)
    trainer.steps = done
    return trainer


def run(
    problem: Problem, steps: int | Sequence[int], cluster: Cluster | None = None, in_step: bool = False, **options: Any
) -> list[Seen]:
    """Train on all ranks.

    Args:
        steps: of each rank, or of all.
        cluster: another one than the plain.
        in_step: no rank begins a step before all have ended the one before.
        options: of ``GossipOptimizer``.
    """
    size = len(problem.start)
    together = threading.Barrier(size)

    def train(rank: int) -> Seen:
        trainer = GossipTrainer(problem, rank, **options)
        seen = trainer.watch()
        together.wait(30)  # (a message is logged from the first on)
        for _ in range(steps if isinstance(steps, int) else steps[rank]):
            trainer.step()
            if in_step:
                together.wait(30)
        assert not seen.path or flat(trainer.parameters).tolist() == seen.path[-1].tolist()
        trainer.opt.drain()
        seen.drained, seen.stats = trainer.weights(), trainer.opt.stats()
        return seen

    return (Cluster(size) if cluster is None else cluster).run(train)


class _Held:
    """A handle that is done only when ``open_`` says so of its result."""

    def __init__(self, handle: Handle, open_: Callable[[Any], bool]) -> None:
        self._handle, self._open = handle, open_

    def done(self) -> bool:
        return self._handle.done() and self._open(self._handle.result())

    def result(self) -> Any:
        return self._handle.result()

    def seconds_to_poll(self) -> float | None:
        return 0.002  # (nobody says when ``open_`` would)


def holding(size: int, lands: Callable[[Any, list[int]], bool], at_ends: bool = False) -> Cluster:
    """A cluster of one optimizer, on whose ranks an exchange lands when ``lands(worker, its messages' keys)``, or when
    the rank is done (not with ``at_ends``)."""

    def wrap(collectives: MemoryCollectives) -> MemoryCollectives:
        exchange = collectives.alltoall

        def held(rows: Any, splits: list[int], name: str, process_set: Any = None) -> Handle:
            def is_open(result: Any) -> bool:
                keys = [HEADER.unpack(row[-HEADER.size :].numpy().tobytes())[0] for row in result[0]]
                worker: Any = cluster.engines[collectives.rank].participants()[0]
                return (worker._announced and not at_ends) or lands(worker, keys)

            return _Held(exchange(rows, splits, name, process_set), is_open)

        collectives.alltoall = held  # type: ignore[method-assign]
        return collectives

    cluster = Cluster(size, wrap=wrap)
    return cluster
