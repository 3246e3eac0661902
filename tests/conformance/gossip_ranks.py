"""Ranks that gossip: options of every algorithm, runs that are recorded, and what they must equal."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from hvd_async import mixing, topology
from hvd_async.algorithms.gossip.config import ALGORITHMS
from hvd_async.algorithms.gossip.plan import make_plan
from hvd_async.testing import Cluster
from tests.conformance import gossip_reference as reference
from tests.conformance import leader_drive, outer_reference
from tests.conformance.exact_diffusion_reference import exact_diffusion
from tests.conformance.gossip_reference import Outcome, Problem
from tests.conformance.leader_drive import Seen
from tests.conformance.noloco_reference import noloco
from tests.conformance.outer_reference import Outer
from tests.conformance.quasi_global_reference import Corrected
from tests.conformance.reference import Array
from tests.conformance.weight_ranks import KerasRank, TorchRank
from tests.conftest import LONG_RUN

STAR = {"algorithm": "sgp", "topology": "star"}
"""The graph on which push-sum weights are not 1."""
LATE = {"algorithm": "osgp", "topology": "star", "max_staleness": 2}
RING = {"algorithm": "dpsgd", "topology": "ring"}
BASE = {"algorithm": "dpsgd", "topology": "base"}
EXACT = {"algorithm": "exact-diffusion", "topology": "ring"}
PAIRED = {"algorithm": "noloco", "topology": "random-pairs", "gossip_every": 3}
PAIRS = {"algorithm": "adpsgd", "topology": "ring"}
LOCAL = {"algorithm": "local", "average_every": 4}
SLOWMO = {"algorithm": "slowmo", "average_every": 5, "max_staleness": 2, "fragments": 3}
DILOCO = {"algorithm": "diloco", "average_every": 3, "max_staleness": 0, "fragments": 2}
ON = {"quasi_global": True}
FEW = (STAR, LATE, RING | ON, EXACT, PAIRED, PAIRS, LOCAL, SLOWMO, DILOCO)
"""Options of every mechanism."""


def name(one: Any) -> str:
    """How a parameter shows in a test's name: options by their values."""
    if isinstance(one, dict):
        return "-".join(str(getattr(value, "algorithm", value)) for value in one.values())
    return str(getattr(one, "name", getattr(one, "__name__", one)))


def by_options(*options: dict[str, Any]) -> Any:
    """Parametrize a test over options of ``GossipOptimizer``."""
    return pytest.mark.parametrize("options", options, ids=name)


def by_turns(argument: str, *values: Any) -> Any:
    """Parametrize a test over values, each in one of the bindings by turns; in a long run in both."""
    bindings = (TorchRank, KerasRank)
    rows = [(bindings[place % 2], value) for place, value in enumerate(values)]
    if LONG_RUN:
        rows = list(itertools.product(bindings, values))
    return pytest.mark.parametrize(("binding", argument), rows, ids=name)


def graph(name: str, size: int) -> list[Array]:
    """Mixing matrices of a named graph."""
    return mixing.matrices(topology.named(name, size), "uniform")


def run(
    binding: Any, problem: Problem, steps: int | Sequence[int], cluster: Cluster | None = None, **options: Any
) -> list[Seen]:
    """Train on all ranks.

    Args:
        steps: of each rank; or of all: then none is done while others still step, which send less then.
        cluster: another one than the plain.
        options: of the rank and of ``GossipOptimizer``.
    """
    cluster = Cluster(len(problem.start)) if cluster is None else cluster
    return leader_drive.run(lambda rank: binding(problem, rank, **options), steps, cluster, isinstance(steps, int))


def expected(problem: Any, seen: Sequence[Seen], options: dict[str, Any]) -> Outcome:
    """Replay by the reference the messages that a run took in; ``options`` of ``GossipOptimizer``."""
    algorithm, counts = options.get("algorithm", "sgp"), [len(own.path) for own in seen]
    hosts, late = options.get("hierarchical", 1), options.get("max_staleness", int(algorithm == "osgp"))
    problem = Corrected(problem) if options.get("quasi_global") else problem
    if algorithm == "allreduce":
        return reference.allreduce(problem, counts[0])
    if ALGORITHMS[algorithm].outer is not None:
        return outer_reference.train(problem, counts, outer_of(len(seen), options), local_size=hosts)
    if algorithm == "adpsgd":
        logs = [own.log[: own.log.index(("drained",))] for own in seen]
        return reference.adpsgd(problem, logs, hosts, counts)
    if algorithm == "exact-diffusion":
        (weights,) = mixing.matrices(topology.named(options["topology"], len(seen)), options.get("mixing", "uniform"))
        own = {"every": options.get("gossip_every", 1), "average_every": options.get("average_every", 0)}
        return exact_diffusion(problem, (weights + np.eye(len(seen))) / 2, counts, **own)
    if algorithm == "noloco":
        plan = make_plan(len(seen), algorithm, options["topology"], gossip_every=options.get("gossip_every"))
        return noloco(problem, plan.matrices, counts, plan.config)
    takes = [[list(messages) for _, messages in own.log[: counts[0]]] for own in seen]
    matrices = options.get("mixing", "uniform")
    if isinstance(matrices, str):
        chosen = topology.named(options["topology"], len(seen) // hosts, options.get("peers", 1))
        matrices = mixing.matrices(chosen, matrices)
    return reference.gossip(
        problem,
        matrices,
        counts[0],
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
    given = {name: value for name, value in options.items() if name not in ("compression", "hierarchical")}
    return outer_reference.of_config(make_plan(size, **given).config)


def check(outcome: Outcome, seen: Sequence[Seen], within: float = 1e-5) -> None:
    """Models after each step, push-sum weights, and what a drain makes of them; the same bits everywhere. (Late
    messages under momentum may swing weights far out, by chance; hence a tolerance relative to them as well.)"""
    close = {"rtol": within / 10, "atol": within}
    for rank, own in enumerate(seen):
        np.testing.assert_allclose(own.path, outcome.path[rank] or np.zeros(0), **close, err_msg=f"rank {rank}")
        np.testing.assert_allclose(own.drained, outcome.drained(), **close)
        assert own.drained.tobytes() == seen[0].drained.tobytes()
        if len({len(one.path) for one in seen}) == 1:  # (who is done first gives its weight to the others)
            assert own.weight == pytest.approx(outcome.w[rank], abs=1e-9)


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
