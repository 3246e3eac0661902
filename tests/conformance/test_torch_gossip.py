"""torch: gossip equals the float64 reference, for every algorithm and graph, on the messages that each rank took in."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hvd_async.testing import Cluster
from tests.conformance import gossip_reference as reference
from tests.conformance.cases import CASES, Case
from tests.conformance.choco_reference import Choco
from tests.conformance.gossip_reference import Outcome, Problem, least_squares, on_time
from tests.conformance.reference import Array
from tests.conformance.torch_gossip_ranks import Seen, graph, holding, run

STEPS = 50
SIZES = (1, 2, 3, 4, 5, 8)
GRAPHS = ("ring", "exponential", "star", "complete")
ALGORITHMS = (("sgp", None), ("dpsgd", None), ("osgp", 0), ("osgp", 1), ("osgp", 2), ("adpsgd", None))
SPREAD = dict(zip(itertools.product(GRAPHS, SIZES), itertools.cycle(CASES), strict=False))
"""Each optimizer with every algorithm, on three graphs of other sizes."""
NESTEROV, MOMENTUM, ADAM = CASES[5], CASES[1], CASES[6]


def chosen(algorithm: str, name: str) -> dict[str, Any]:
    """Options for an algorithm on a graph, or on its symmetric form."""
    symmetric = algorithm in ("dpsgd", "adpsgd")
    name = "bipartite-exponential" if symmetric and name == "exponential" else name
    return {
        "algorithm": algorithm,
        "topology": name,
        "mixing": "metropolis" if name == "star" and algorithm == "dpsgd" else "uniform",
    }


def matrices(options: dict[str, Any], size: int) -> list[Array]:
    return graph(options["topology"], size, options["mixing"])


def check(outcome: Outcome, seen: Sequence[Seen], tolerance: float = 1e-5) -> None:
    """Models after each step, push-sum weights, and what a drain makes of them; the same bits everywhere. (Late
    messages under momentum may swing weights far out, by chance; hence a tolerance relative to them as well.)"""
    for rank, own in enumerate(seen):
        np.testing.assert_allclose(own.path, outcome.path[rank], rtol=1e-6, atol=tolerance, err_msg=f"rank {rank}")
        assert own.weights[-1] == pytest.approx(outcome.w[rank], abs=1e-9)
        assert own.drained.tobytes() == seen[0].drained.tobytes()
        assert own.stats.push_sum_weight == 1.0
    np.testing.assert_allclose(seen[0].drained, outcome.drained(), rtol=1e-6, atol=tolerance)
    stats = [own.stats for own in seen]
    assert sum(s.messages_sent for s in stats) == sum(s.messages_taken + s.messages_left for s in stats)


def replayed(problem: Problem, options: dict[str, Any], seen: Sequence[Seen], **more: Any) -> Outcome:
    """What the reference makes of the messages that a run took in."""
    if options["algorithm"] == "adpsgd":
        return reference.adpsgd(problem, [own.log[: own.log.index(("drained",))] for own in seen])
    weights, takes = matrices(options, len(seen)), [own.taken() for own in seen]
    late = options.get("max_staleness", 1 if options["algorithm"] == "osgp" else 0)
    return reference.gossip(
        problem,
        weights,
        max(map(len, takes)),
        takes,
        sends=[own.receivers(rank, weights, max(1, late)) for rank, own in enumerate(seen)],
        algorithm="dpsgd" if options["algorithm"] == "dpsgd" else "sgp",
        max_staleness=late,
        overlap=late,
        **more,
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize(("algorithm", "late"), ALGORITHMS)
def test_every_algorithm_on_every_graph(algorithm, late, name, size):
    problem = least_squares(size, SPREAD[name, size])
    options = chosen(algorithm, name) | ({} if late is None else {"max_staleness": late})
    seen = run(problem, STEPS, Cluster(size, jitter=0.001 if late else 0.0, seed=size), **options)
    check(replayed(problem, options, seen), seen)
    assert {own.stats.steps for own in seen} == {STEPS}
    if algorithm in ("sgp", "dpsgd"):
        assert [own.taken() for own in seen] == on_time(matrices(options, size), STEPS)
    if algorithm == "adpsgd" and size > 1:
        assert sum(own.stats.averagings for own in seen) > 0
    if name == "star" and size > 2 and algorithm in ("sgp", "osgp"):
        assert max(abs(weight - 1.0) for own in seen for weight in own.weights) > 0.1


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_optimizer_works_on_biased_weights(case):
    """On a star the push-sum weights are not 1: momentum, decay and moments are of z x w."""
    problem, options = least_squares(3, case), chosen("sgp", "star")
    seen = run(problem, STEPS, **options)
    check(replayed(problem, options, seen), seen)


# -- messages that come late, each at a step that is known before ---------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("late", [1, 2])
def test_osgp_in_a_fixed_schedule(late, size):
    """Nobody sees a message before ``late`` steps later, and then the rank waits for it."""
    options = {"algorithm": "osgp", "topology": "ring-right", "max_staleness": late, "mixing": "uniform"}
    problem, schedule = least_squares(size, NESTEROV), on_time(matrices(options, size), STEPS, late, late)
    cluster = holding(size, lambda worker, keys: max(keys, default=0) <= worker._step - late)
    seen = run(problem, STEPS, cluster, in_step=True, **options)
    assert [own.taken() for own in seen] == schedule
    for own in seen:
        sent = range(1, STEPS + 1, late)
        assert own.stats.staleness == Counter(min(late, STEPS - step) for step in sent)
    outcome = reference.sgp(problem, matrices(options, size), STEPS, schedule, max_staleness=late, overlap=late)
    assert len(outcome.flying) == size
    check(outcome, seen)


# -- hosts, averages ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "name", "hosts", "local"),
    [("sgp", "exponential", 1, 2), ("sgp", "exponential", 4, 2), ("sgp", "exponential", 2, 3), ("sgp", "star", 3, 2),
     ("sgp", "star", 3, 3), ("dpsgd", "ring", 2, 2), ("dpsgd", "star", 3, 2), ("dpsgd", "ring", 2, 3)],
)  # fmt: skip
def test_hosts_gossip(algorithm, name, hosts, local):
    options = chosen(algorithm, name)
    problem = least_squares(hosts * local, SPREAD[name, hosts])
    seen = run(problem, STEPS, hierarchical=local, **options)
    outcome = reference.gossip(
        problem, matrices(options, hosts), STEPS, algorithm=algorithm, local_size=local, max_staleness=0
    )
    check(outcome, seen)
    for rank, own in enumerate(seen):
        assert np.array_equal(own.path, seen[rank - rank % local].path)  # a host's ranks hold the same


@pytest.mark.parametrize("every", [1, 3, 7])
@pytest.mark.parametrize(("algorithm", "late"), [("sgp", 0), ("dpsgd", 0), ("osgp", 1)])
def test_an_average_of_all_ranks_every_few_steps(algorithm, late, every):
    problem = least_squares(3, MOMENTUM)
    options = chosen(algorithm, "star") | {"max_staleness": late}
    seen = run(problem, STEPS, Cluster(3, jitter=0.001 * late), average_every=every, **options)
    check(replayed(problem, options, seen, average_every=every), seen)
    assert {own.stats.averagings for own in seen} == {STEPS // every}
    for step in range(every, STEPS + 1, every):
        assert len({own.path[step - 1].tobytes() for own in seen}) == 1


@pytest.mark.parametrize("size", SIZES)
def test_allreduce_is_an_average_after_every_step(size):
    problem = least_squares(size, SPREAD["ring", size])
    seen = run(problem, STEPS, algorithm="allreduce")
    check(reference.allreduce(problem, STEPS), seen)
    assert {own.stats.messages_sent for own in seen} == {0}


# -- compressed messages --------------------------------------------------------------------------------------


class Rounded:
    """The messages that a run sent, each of which must be its weights but for rounding: an ``encode``."""

    def __init__(self, seen: Sequence[Seen], relative: float) -> None:
        self.seen, self.relative = seen, relative

    def __call__(self, x: Array, receiver: int, sender: int, step: int) -> Array:
        sent = self.seen[sender].sent[step]
        np.testing.assert_allclose(sent, x, rtol=self.relative, atol=1e-5)
        assert step < 3 or np.abs(sent - x).max() > 1e-6, "was not rounded"
        return sent


def differences(problem: Problem, seen: Sequence[Seen], weights: Sequence[Array], every: int = 1) -> Choco:
    """What a run sent of 8 bits, for the reference; both ends of an edge begin with the first weights."""
    recorded: dict[tuple[int, int, int], Array] = {}
    copies: dict[tuple[int, int], Array] = {}
    for sender, own in enumerate(seen):
        before = dict.fromkeys(range(len(weights)), problem.start[0])
        for step, sent in own.sent.items():
            phase = (step - 1) // every % len(weights)
            for receiver in np.flatnonzero(weights[phase][:, sender]):
                recorded[int(receiver), sender, step] = sent - before[phase]
                copies.setdefault((int(receiver), sender), problem.start[0])
            before[phase] = sent
    choco = Choco(recorded)
    choco.copies = copies
    return choco


@pytest.mark.parametrize("compression", ["fp16", "bf16", "int8"])
@pytest.mark.parametrize(
    ("algorithm", "name", "late"),
    [("sgp", "star", 0), ("osgp", "exponential", 2), ("dpsgd", "ring", 0)],
)
def test_compressed_messages(algorithm, name, late, compression):
    size = 5
    problem, options = least_squares(size, MOMENTUM), chosen(algorithm, name) | {"max_staleness": late}
    seen = run(problem, STEPS, Cluster(size, jitter=0.001 * bool(late)), compression=compression, **options)
    weights = matrices(options, size)
    if compression == "int8":
        encode: Any = differences(problem, seen, weights, max(1, late))
    else:
        encode = Rounded(seen, 2.0 ** (-11 if compression == "fp16" else -8))
    check(replayed(problem, options, seen, encode=encode), seen)
    plain = replayed(problem, options, seen).drained()
    assert np.abs(seen[0].drained - plain).max() < {"fp16": 2e-3, "bf16": 2e-2, "int8": 2e-2}[compression]
    assert len(seen[0].sent) == len(range(1, STEPS + 1 + (algorithm == "dpsgd"), max(1, late)))


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_compressed_pairs_keep_their_sum(compression):
    problem = Problem(least_squares(4, ADAM).start, least_squares(4, ADAM).gradient, Case("sgd", "sgd", 0.1))
    seen = run(problem, STEPS, algorithm="adpsgd", topology="ring", compression=compression)
    moved = sum(sum(own.moved) for own in seen)
    np.testing.assert_allclose(seen[0].drained, problem.start[0] + moved / 4, rtol=0, atol=1e-5)
    exact = reference.adpsgd(problem, [own.log[: own.log.index(("drained",))] for own in seen])
    assert 1e-6 < np.abs(seen[0].path[-1] - exact.path[0][-1]).max() < 0.05
