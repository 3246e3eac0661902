"""Gossip in every binding: one interface of a rank, runs that are recorded, and what they must equal."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import hvd_async.tensorflow.keras as hvd_keras
import hvd_async.torch as hvd_torch
from hvd_async import mixing, topology
from hvd_async.algorithms.gossip.config import ALGORITHMS
from hvd_async.algorithms.gossip.plan import make_plan
from hvd_async.stats import GossipStats
from hvd_async.testing import Cluster
from tests.conformance import gossip_reference as reference
from tests.conformance import keras_gossip_ranks, outer_reference, torch_gossip_ranks
from tests.conformance.cases import CASES, Case
from tests.conformance.exact_diffusion_reference import exact_diffusion
from tests.conformance.gossip_reference import Outcome, Problem
from tests.conformance.host_pairs_reference import adpsgd_of_hosts
from tests.conformance.noloco_reference import noloco
from tests.conformance.outer_reference import Outer
from tests.conformance.reference import Array

SGD, MOMENTUM, NESTEROV, ADAM = CASES[0], CASES[1], CASES[5], CASES[6]
STILL = Case("still", "sgd", 0.0)
STAR = {"algorithm": "sgp", "topology": "star"}
"""The graph on which push-sum weights are not 1."""
LATE = {"algorithm": "osgp", "topology": "star", "max_staleness": 2}
RING = {"algorithm": "dpsgd", "topology": "ring"}
EXACT = {"algorithm": "exact-diffusion", "topology": "ring"}
PAIRED = {"algorithm": "noloco", "topology": "random-pairs", "gossip_every": 3}
PAIRS = {"algorithm": "adpsgd", "topology": "ring"}
LOCAL = {"algorithm": "local", "average_every": 4}
SLOWMO = {"algorithm": "slowmo", "average_every": 5, "max_staleness": 2, "fragments": 3}
DILOCO = {"algorithm": "diloco", "average_every": 3, "max_staleness": 0, "fragments": 2}


Rank = torch_gossip_ranks.GossipTrainer | keras_gossip_ranks.GossipTrainer
"""One rank of a binding: least squares on six weights in two tensors. Both have the same methods."""


@dataclass(frozen=True)
class Binding:
    """A framework, and how its steps are taken.

    Attributes:
        hvd: the module that a script imports.
        make: makes a rank of (problem, rank, options of it and of ``GossipOptimizer``).
    """

    name: str
    framework: str
    hvd: Any
    make: Callable[..., Rank]

    def problem(self, size: int, case: Case = MOMENTUM) -> Problem:
        """Return the training problem of so many ranks."""
        return reference.least_squares(size, case, self.framework)


TORCH = Binding("torch", "torch", hvd_torch, torch_gossip_ranks.GossipTrainer)
KERAS = Binding("keras", "keras", hvd_keras, keras_gossip_ranks.GossipTrainer)
GRAPH = Binding("keras-graph", "keras", hvd_keras, functools.partial(keras_gossip_ranks.GossipTrainer, graph=True))
BINDINGS = [pytest.param(one, id=one.name) for one in (TORCH, KERAS)]
both = pytest.mark.parametrize("binding", BINDINGS)
also_graph = pytest.mark.parametrize("binding", [*BINDINGS, pytest.param(GRAPH, id=GRAPH.name)])


def name(one: Any) -> str:
    """How a parameter shows in a test's name: options by their values."""
    return "-".join(map(str, one.values())) if isinstance(one, dict) else str(getattr(one, "name", one))


def by_options(*options: dict[str, Any]) -> Any:
    """Parametrize a test over options of ``GossipOptimizer``."""
    return pytest.mark.parametrize("options", options, ids=name)


def graph(name: str, size: int, scheme: str = "uniform") -> list[Array]:
    """Mixing matrices of a named graph."""
    return mixing.matrices(topology.named(name, size), scheme)


@dataclass
class Seen:
    """Record of one rank.

    Attributes:
        path: what the model held after each step.
        moved: by what each local update changed this rank's (biased) weights.
        log: the worker's.
        weight: the push-sum weight after the last step.
        drained: what the model held at the end.
        stats: at the end.
    """

    path: list[Array] = field(default_factory=list)
    moved: list[Array] = field(default_factory=list)
    log: list[Any] = field(default_factory=list)
    weight: float = 1.0
    drained: Array = field(default_factory=lambda: np.zeros(0))
    stats: GossipStats = field(default_factory=GossipStats)


def watch(rank: Rank) -> Seen:
    """Meet the other ranks, and record from now on what this one does."""
    worker, seen = rank.opt._async.worker_now(), Seen()
    mix = worker.mix

    def spied_mix(before: Any, after: Any) -> Any:
        seen.moved.append(np.asarray(after).astype(np.float64) - worker.weight * rank.before)
        return mix(before, after)

    worker.mix = spied_mix
    seen.log = worker.log = []
    return seen


def train(rank: Rank, seen: Seen, steps: int) -> None:
    """Take steps, and record the model after each."""
    for _ in range(steps):
        seen.path.append(rank.train(1).weights())
    seen.weight = rank.opt.stats().push_sum_weight


def drain(rank: Rank, seen: Seen) -> Seen:
    """Drain, and record the end."""
    rank.opt.drain()
    seen.drained, seen.stats = rank.weights(), rank.opt.stats()
    return seen


def run(
    binding: Binding, problem: Problem, steps: int | Sequence[int], cluster: Cluster | None = None, **options: Any
) -> list[Seen]:
    """Train on all ranks.

    Args:
        steps: of each rank; or of all: then none is done while others still step, which send less then.
        cluster: another one than the plain.
        options: of the rank and of ``GossipOptimizer``.
    """
    size = len(problem.start)
    together = threading.Barrier(size)

    def work(rank: int) -> Seen:
        trainer = binding.make(problem, rank, **options)
        seen = watch(trainer)
        together.wait(30)  # (a message is logged from the first on)
        train(trainer, seen, steps if isinstance(steps, int) else steps[rank])
        if isinstance(steps, int):
            together.wait(60)
        return drain(trainer, seen)

    return (Cluster(size) if cluster is None else cluster).run(work)


def expected(problem: Problem, seen: Sequence[Seen], options: dict[str, Any]) -> Outcome:
    """Replay by the reference the messages that a run took in; ``options`` of ``GossipOptimizer``."""
    algorithm, steps = options.get("algorithm", "sgp"), len(seen[0].path)
    if algorithm == "allreduce":
        return reference.allreduce(problem, steps)
    if ALGORITHMS[algorithm].outer is not None:
        return outer_reference.train(problem, [len(own.path) for own in seen], outer_of(len(seen), options))
    if algorithm == "adpsgd":
        logs, hosts = [own.log[: own.log.index(("drained",))] for own in seen], options.get("hierarchical", 1)
        counts = [len(own.path) for own in seen]
        return reference.adpsgd(problem, logs) if hosts == 1 else adpsgd_of_hosts(problem, logs, hosts, counts)
    if algorithm == "exact-diffusion":
        (weights,) = mixing.matrices(topology.named(options["topology"], len(seen)), options.get("mixing", "uniform"))
        own = {"every": options.get("gossip_every", 1), "average_every": options.get("average_every", 0)}
        return exact_diffusion(problem, (weights + np.eye(len(seen))) / 2, [len(one.path) for one in seen], **own)
    if algorithm == "noloco":
        plan = make_plan(len(seen), algorithm, options["topology"], gossip_every=options.get("gossip_every"))
        return noloco(problem, plan.matrices, [len(one.path) for one in seen], plan.config)
    hosts, late = options.get("hierarchical", 1), options.get("max_staleness", int(algorithm == "osgp"))
    takes = [[list(messages) for _, messages in own.log[:steps]] for own in seen]
    matrices = options.get("mixing", "uniform")
    if isinstance(matrices, str):
        chosen = topology.named(options["topology"], len(seen) // hosts, options.get("peers", 1))
        matrices = mixing.matrices(chosen, matrices)
    return reference.gossip(
        problem,
        matrices,
        steps,
        takes if hosts == 1 else None,
        algorithm="dpsgd" if algorithm == "dpsgd" else "sgp",
        max_staleness=late,
        overlap=late,
        every=options.get("gossip_every", 1),
        average_every=options.get("average_every", 0),
        local_size=hosts,
    )


def outer_of(size: int, options: dict[str, Any]) -> Outer:
    """Return the outer optimizer of these options, without momentum yet."""
    given = {name: value for name, value in options.items() if name != "compression"}
    return outer_reference.of_config(make_plan(size, **given).config)


def check(outcome: Outcome, seen: Sequence[Seen]) -> None:
    """Models after each step, push-sum weights, and what a drain makes of them; the same bits everywhere. (Late
    messages under momentum may swing weights far out, by chance; hence a tolerance relative to them as well.)"""
    for rank, own in enumerate(seen):
        np.testing.assert_allclose(own.path, outcome.path[rank], rtol=1e-6, atol=1e-5, err_msg=f"rank {rank}")
        assert own.weight == pytest.approx(outcome.w[rank], abs=1e-9)
        np.testing.assert_allclose(own.drained, outcome.drained(), rtol=1e-6, atol=1e-5)
        assert own.drained.tobytes() == seen[0].drained.tobytes()


def check_mean(start: Array, seen: Sequence[Seen]) -> None:
    """Check that the ranks end with what they began with and all that local updates did to it: nothing is lost."""
    moved = sum((sum(own.moved) for own in seen if own.moved), np.zeros(start.shape[1]))
    np.testing.assert_allclose(seen[0].drained, start.mean(axis=0) + moved / len(seen), rtol=0, atol=2e-5)
    assert len({own.drained.tobytes() for own in seen}) == 1
    stats = [own.stats for own in seen]
    assert {own.push_sum_weight for own in stats} == {1.0}
    assert sum(s.messages_sent for s in stats) == sum(s.messages_taken + s.messages_left for s in stats)


def alike(work: Callable[[int], Any], size: int = 3) -> Any:
    """Return the result of all ranks of a new cluster, which must be the same."""
    first, *others = Cluster(size).run(work)
    assert others == [first] * (size - 1)
    return first
