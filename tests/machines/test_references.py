"""Gossip on least squares, in drawn orders: every step equals the float64 reference's, cuts change nothing.

One table crosses algorithms and graphs with ranks, hosts, ends, compression, averages, periods and staleness. That
threads take the same steps is in ``tests/threads/test_gossip``; laws without values are in ``test_orders``.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_async import mixing, topology
from hvd_async.algorithms.gossip.config import ALGORITHMS, COMPRESSIONS
from hvd_async.algorithms.gossip.error_feedback import SHARED, SavedState
from hvd_async.algorithms.gossip.rank import PushSumWorker
from hvd_async.runtime.interfaces import Wait
from hvd_async.topology import Topology
from tests.conformance.cases import CASES
from tests.conformance.exact_diffusion_reference import exact_diffusion, published
from tests.conformance.gossip_reference import dpsgd, least_squares, on_time
from tests.conformance.outer_reference import TwoStages, of_config, train
from tests.conftest import LONG_RUN, examples
from tests.covering import covering
from tests.machines.least_squares import EXACT, MOMENTUM, Job, Record, compress_of, job, run

OUTER = [name for name, algorithm in ALGORITHMS.items() if algorithm.outer is not None]
KINDS: list[tuple[str, Any, int]] = [
    *((name, graph, 1) for name in ("sgp", "osgp") for graph in ("ring", "exponential", "star", "complete", "base")),
    *(("dpsgd", graph, 1) for graph in ("ring", "bipartite-exponential", "star", "complete", "base")),
    *((name, "base", 2) for name in ("sgp", "osgp", "dpsgd")),
    *(("adpsgd", graph, 1) for graph in ("ring", "bipartite-exponential", "star", "complete")),
    *(("exact-diffusion", graph, 1) for graph in ("ring", "star", "mesh", "complete", "symmetric-exponential")),
    *(("noloco", graph, 1) for graph in ("random-pairs", "bipartite-exponential", "ring", "star", "base")),
    ("allreduce", None, 1),
    *((name, None, 1) for name in OUTER),
]
"""An algorithm, a graph, and its peers."""
HOSTED = [kind for kind in KINDS if kind[1] in (None, "star") and "hierarchical" in ALGORITHMS[kind[0]].options]
RANKS = ((1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (7, 1))
HOSTS = ((1, 2), (2, 2), (2, 3), (3, 2))
"""Hosts, and ranks of each. (On a star of 3 hosts push-sum weights are not 1.)"""
ENDS: dict[str, tuple[list[tuple[int, ...]], frozenset[int]]] = {
    "even": ([(9,), (6,)], frozenset()),
    "uneven": ([(5, 0, 3, 11)], frozenset()),
    "drains": ([(0,), (6, 2, 2, 1), (0, 3, 0, 0)], frozenset()),
    "cuts": ([(4,), (5, 0, 3, 8), (2, 6, 1), (6, 6, 2, 2, 4)], frozenset({0, 1})),
    "often cut": ([(1,)] * 7, frozenset(range(6))),
    "resumed": ([(9,), (7,)], frozenset({0})),
    "resumed, uneven": ([(3, 6, 4, 0, 13), (9,)], frozenset({0})),
}
"""Steps of the ranks before each end, repeated for further ranks, and which ends are cuts."""


def as_late_as_allowed(worker: Any) -> None:
    """Have a host take in each message as many steps late as it may."""
    with_others, late = worker._with_others, worker.config.max_staleness
    worker._with_others = lambda total, number, until: with_others(total, number, min(until, number - late))


def of_ranks(size: int, ends: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the steps of each rank before each end."""
    return [tuple(counts[rank % len(counts)] for rank in range(size)) for counts in ends]


def crossed(
    kind: tuple[str, Any, int],
    ranks: tuple[int, int],
    ends: tuple[Sequence[tuple[int, ...]], frozenset[int]],
    compression: str,
    average_every: int,
    gossip_every: int,
    late: int,
) -> tuple[Job, dict[str, Any]]:
    """Return a job, without what its algorithm has not, and options of ``run``; 7 weights cannot be shared out evenly
    in a host."""
    (algorithm, graph, peers), (hosts, local) = kind, ranks
    found, (steps, cuts), outer = ALGORITHMS[algorithm], ends, algorithm in OUTER
    local = local if "hierarchical" in found.options else 1
    if compression not in found.compressions:
        compression = "none"
    more: dict[str, Any] = {"average_every": average_every, "gossip_every": gossip_every, "max_staleness": late}
    more = {name: value for name, value in more.items() if name in found.options}
    if outer:
        more |= {"average_every": 4, "fragments": gossip_every, "max_staleness": min(late, 3)}
    if algorithm == "allreduce":
        more["average_every"] = max(1, average_every)
    if algorithm == "adpsgd":
        more["max_local_steps"] = gossip_every
    if algorithm == "osgp":
        more["max_staleness"] = max(1, late)
    metropolis = algorithm in ("dpsgd", "exact-diffusion") or (algorithm, graph) == ("noloco", "star")
    one = job(
        of_ranks(hosts * local, steps),
        algorithm,
        graph,
        weights="metropolis" if metropolis and graph != "base" else "uniform",
        peers=min(peers, max(1, hosts - 1)),
        compression=compression,
        local_size=local,
        elements=7,
        cuts=cuts,
        saves=local == 1 or ends == ENDS["resumed"],  # (messages of other hosts may wait for the next step)
        **more,
    )
    if outer or (local == 1 and not found.pairs):
        return one, {}
    if found.pairs:
        return one, {"replays": compression == "none"}
    even = all(len(set(counts)) == 1 for counts in one.steps)
    return one, {"replays": even, "tweak": as_late_as_allowed if even else lambda worker: None}


def options(number: int) -> tuple[Any, ...]:
    """Return a compression, ``average_every``, ``gossip_every`` (or the like) and ``max_staleness``: 7 successive
    numbers have all values, 12 any two of compression and period."""
    return COMPRESSIONS[number % 4], (0, 3)[number // 4 % 2], (1, 2, 3)[number % 3], number // 3 % 3


def table() -> list[Any]:
    """Return cells in which any two of algorithm, ranks and ends meet, and each algorithm meets all options."""
    rows = covering((KINDS, RANKS, tuple(ENDS)), 3 if LONG_RUN else 2)
    rows += covering((HOSTED, HOSTS, tuple(ENDS)[:-1]), 3 if LONG_RUN else 2)
    seen = Counter[Any]()
    cells = []
    for kind, ranks, ends in rows:
        number = seen[kind] + KINDS.index(kind)
        seen[kind] += 1
        cells.append(pytest.param(kind, ranks, ends, options(number), id=f"{kind}-{ranks}-{ends}-{options(number)}"))
    return cells


@pytest.mark.parametrize(("kind", "ranks", "ends", "chosen"), table())
def test_every_step_equals_the_reference(kind: Any, ranks: tuple[int, int], ends: str, chosen: Any) -> None:
    one, more = crossed(kind, ranks, ENDS[ends], *chosen)
    for seed in range(2) if LONG_RUN else [sum(map(ord, str((kind, ranks, ends))))]:
        records = run(one, seed, **more)
        if kind[0] in ("osgp", "adpsgd"):
            continue  # what is mixed when depends on the order
        if kind[0] in ("sgp", "dpsgd") and ends == "even" and ranks[1] == 1:
            assert all(set(record.stats.staleness) <= {0} for record in records), "something is left to chance"
        if ends == "often cut" and (kind[0], chosen[0]) != ("dpsgd", "int8"):  # (what none takes is in estimates)
            once = dataclasses.replace(one, steps=((7,) * one.size,), cuts=frozenset())
            assert list(map(path, records)) == list(map(path, run(once, seed + 1, **more)))
        if ends.startswith("resumed"):
            check_resumed(one, records, seed + 1, more)


def path(record: Record, first: int = 0) -> list[bytes]:
    """Return what a rank's model held after each step, and after the last end."""
    segments = record.segments[first:]
    return [z.tobytes() for segment in segments for z in segment.path] + [segments[-1].z.tobytes()]


def check_resumed(one: Job, records: list[Record], seed: int, more: dict[str, Any]) -> None:
    """Check that a job that is resumed after its first end, a cut, continues as if it had not stopped."""
    saved = [record.saved[0] for record in records]
    rest = run(dataclasses.replace(one, steps=one.steps[1:], cuts=frozenset()), seed, resumed=saved, **more)
    assert [path(record, 1) for record in records] == list(map(path, rest))
    assert all(record.saved == [None] for record in rest), "after a drain there is nothing but the weights"
    if ALGORITHMS[one.plan.config.algorithm].outer is not None:
        assert len({each.kept.copies["outer anchor"].tobytes() for each in saved if each is not None}) == 1


SEGMENTS = st.lists(st.tuples(*[st.integers(0, 9)] * 5), min_size=1, max_size=3)


@settings(max_examples=examples(60))
@given(
    st.sampled_from(KINDS), st.sampled_from(RANKS[:5]), SEGMENTS, st.booleans(), st.integers(0, 71), st.integers(0, 999)
)
def test_any_job_equals_the_reference(
    kind: Any, ranks: tuple[int, int], steps: list[tuple[int, ...]], cut: bool, number: int, seed: int
) -> None:
    cuts = frozenset(range(len(steps) - 1)) if cut else frozenset[int]()
    one, more = crossed(kind, ranks, (steps, cuts), *options(number))
    run(one, seed, **more)


# -- push-sum and AD-PSGD ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("algorithm", "last"), [("dpsgd", 7), ("exact-diffusion", 6)])
@pytest.mark.parametrize("seed", range(4))
def test_differences_for_no_step_are_read_after_those_for_one(algorithm: str, last: int, seed: int) -> None:
    """Rank 0 stops one step early, and is sent messages of the step after its last one before others know: they add to
    what it has not read yet."""
    one = job(((5, 6, 6, 6), (6, 6, 6, 6)), algorithm, "ring", compression="int8", weights="metropolis")

    def wait_for_more(worker: Any) -> None:
        if worker._place == 0:
            drain = worker.drain_program

            def late(flush: bool) -> Any:
                senders = {sender for sender, _ in worker._into(0, last)} if worker._before == 0 else set()
                yield Wait(lambda: all((sender, last) in worker._receive_buffer.received for sender in senders))
                yield from drain(flush)

            worker.drain_program = late

    assert run(one, seed, tweak=wait_for_more)[0].stats.messages_left > 0


@pytest.mark.parametrize(
    ("graph", "hosts", "compression"),
    [
        (networkx.path_graph(4), (1, 1), "int8"),
        ("exponential", (1, 1), "none"),
        ("star", (4, 1), "int8"),
        ("star", (1, 2), "int8"),
        ("star", (2, 1), "none"),
    ],
    ids=str,
)
def test_a_job_may_be_resumed_on_another_graph_and_with_another_compression(
    graph: Any, hosts: tuple[int, int], compression: str
) -> None:
    """Each rank has weights and a push-sum weight of its own; what is known of them must fit at both ends."""
    first = job((4, 4, 4, 4), graph="star", compression=compression, cuts=frozenset({0}), local_size=hosts[0])
    saved = [record.saved[0] for record in run(first)]
    weights = [each.kept.weight for each in saved if each is not None]
    assert len(weights) == 4
    assert len(set(weights)) > 1 or hosts[0] > 1
    mean = sum(each.z * each.kept.weight for each in saved if each is not None) / 4

    def nothing_of_other_graphs(worker: PushSumWorker) -> None:
        assert worker._known.saved_state().keys() <= ({SHARED} if hosts == (1, 1) else set())

    for other in ("none", "int8"):
        second = job((5, 5, 5, 5), graph=graph, compression=other, local_size=hosts[1])
        segments = [record.segments[0] for record in run(second, resumed=saved, tweak=nothing_of_other_graphs)]
        expected = mean + sum(segment.moved for segment in segments) / 4
        for segment in segments:
            np.testing.assert_allclose(segment.z, expected, **EXACT)


IN_TURN = Topology("in turn", 3, (frozenset({(1, 2)}), frozenset({(2, 0)}), frozenset({(0, 1)})))
"""A one-way ring, of which one edge is there at each step."""


@pytest.mark.parametrize(("graph", "steps"), [("ring-right", [2, 40, 40, 40]), (IN_TURN, [2, 120, 120])], ids=str)
def test_a_rank_that_no_rank_gives_to_any_more_does_not_give_itself_away(graph: Any, steps: list[int]) -> None:
    """Its push-sum weight would halve with every step, and z = x / w run away."""
    records = run(job(steps, "sgp", graph))
    assert all(np.abs(np.array(record.segments[0].path)).max() < 20 for record in records)


# -- outer optimizers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["fp16", "bf16", "int8"])
def test_several_chunks_and_parts_that_are_not_full_equal_the_reference(compression: str) -> None:
    """A rank finishes early and still adds up its part."""
    more = {"average_every": 4, "fragments": 3, "max_staleness": 2, "elements": 6500}
    run(job(((9, 9, 9), (9, 4, 9)), "slowmo", None, compression=compression, **more))


@pytest.mark.parametrize("compression", ["bf16", "int8"])
def test_what_a_rank_that_has_finished_leaves_out_does_not_pile_up(compression: str) -> None:
    """It adds up its part of all that the others do, and has no difference any more that could carry its errors."""
    one = job((4, 160, 160), "local", None, average_every=4, compression=compression, elements=12)
    run(one)
    compress = compress_of(one)
    assert isinstance(compress, TwoStages)
    train(one.problem, one.steps[0], of_config(one.plan.config), compress)
    gone, *others = np.abs(compress.errors).reshape(3, 3, 4)[[0, 1, 2], [0, 1, 2]].max(axis=1)
    assert gone <= 2 * max(others)


def test_slow_momentum_is_in_units_of_a_whole_periods_gradients() -> None:
    """A rate that is nearly 0 just where ranks send, as at the end of a cosine, does not make a huge momentum."""

    def rate(step: int) -> float:
        return 1e-9 if step % 4 == 0 else 0.05

    def tweak(worker: Any) -> None:
        worker.learning_rates = lambda: [(6, rate(worker._base + worker._step))]

    more = {"average_every": 4, "fragments": 2}
    one = job(((6,) * 3, (7,) * 3, (9,) * 3), "slowmo", None, cuts=frozenset({0}), **more)
    outer = of_config(one.plan.config)
    outer.rate = lambda step: float(np.mean([rate(k) for k in range(max(1, step - 3), step + 1)]))
    records, problem = run(one, tweak=tweak), one.problem
    for ends, count in ((slice(0, 2), 13), (slice(2, 3), 9)):
        outcome = train(problem, (count,) * 3, outer)
        for record, path in zip(records, outcome.path, strict=True):
            np.testing.assert_allclose([z for each in record.segments[ends] for z in each.path], path, **EXACT)
        problem = problem.after(outcome)
    resumed = run(job((7,) * 3, "slowmo", None, **more), tweak=tweak, resumed=[record.saved[0] for record in records])
    for record, again in zip(records, resumed, strict=True):
        assert [z.tobytes() for z in record.segments[1].path] == [z.tobytes() for z in again.segments[0].path]
    assert np.abs(outer.momentum_of).max() < 1e3


def test_bytes_are_those_of_two_stages() -> None:
    """Each stage sends all parts but a rank's own."""
    for compression, part in (("none", 8 * 2), ("bf16", 2 * 2), ("int8", 2048 + 4)):
        for record in run(job((8, 8, 8), "local", None, average_every=4, compression=compression)):
            assert record.stats.bytes_sent == 2 * 2 * 2 * (part + (16 if compression != "none" else 0))
            assert record.stats.averagings == 2


# -- exact diffusion ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("name", ["ring", "star", "mesh", "complete", "symmetric-exponential"])
def test_edge_by_edge_is_as_published(name: str, case: Any) -> None:
    problem, lazy = least_squares(6, case), (metropolis(name, 6) + np.eye(6)) / 2
    one, other = exact_diffusion(problem, lazy, [9] * 6), published(problem, lazy, 9)
    np.testing.assert_allclose(one.path, other.path, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(one.x, other.x, rtol=1e-10, atol=1e-10)


def metropolis(name: str, size: int) -> Any:
    """Return a graph's weights."""
    (weights,) = mixing.matrices(topology.named(name, size), "metropolis")
    return weights


def test_it_converges_to_the_minimizer_of_the_mean_where_gossip_does_not() -> None:
    """At a constant learning rate, with local steps between the ones that send, by the references: ranks equal them."""
    random = np.random.default_rng(3)
    curvature, centre, weights = random.uniform(0.2, 1.5, (5, 6)), random.normal(size=(5, 6)), metropolis("ring", 5)
    problem = dataclasses.replace(
        least_squares(5, MOMENTUM), gradient=lambda z, rank, step: curvature[rank] * (z - centre[rank])
    )
    minimizer = (curvature * centre).sum(axis=0) / curvature.sum(axis=0)
    exact = exact_diffusion(problem, (weights + np.eye(5)) / 2, [700] * 5, every=4)
    plain = dpsgd(problem, [weights], 700, on_time([weights], 700, 0, 4), every=4)
    far = [max(np.abs(path[-1] - minimizer).max() for path in each.path) for each in (exact, plain)]
    assert far[0] < 2e-3
    assert far[1] > 0.02 > 10 * far[0]


def test_a_state_with_a_push_sum_weight_is_refused() -> None:
    saved = [record.saved[0] for record in run(job([5] * 3, "sgp", "star", cuts=frozenset({0})))]
    assert any(isinstance(each.kept, SavedState) and each.kept.weight != 1.0 for each in saved if each is not None)
    with pytest.raises(ValueError, match=r"push-sum weight .*, which exact-diffusion does not support"):
        run(job([2] * 3, "exact-diffusion", "ring"), resumed=saved)
