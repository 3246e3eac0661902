"""Push-sum weights stay above what the matrices say, whatever comes late, so z = x / w does not run away."""

from __future__ import annotations

import random

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_async import mixing, topology
from hvd_async.algorithms.gossip.plan import LOW_WEIGHT, MIN_WEIGHT, GossipPlan, make_plan
from hvd_async.topology import Topology
from tests.conftest import LONG_RUN, examples
from tests.covering import covering

NAMES = ["exponential", "linear", "ring", "ring-right", "star", "mesh", "complete", "static-exponential"]
LR, MOMENTUM, STEPS = 0.1, 0.9, 120


def path_back(size: int) -> Topology:
    """A path whose every rank also sends to the first: all flows back, and little reaches the end."""
    edges = {(rank, rank + 1) for rank in range(size - 1)} | {(rank, 0) for rank in range(1, size)}
    return Topology("path and back", size, (frozenset(edges),))


class Push:
    """Push-sum on the unit quadratic, each rank at its own pace: it waits as a plan says, and takes in what is there.

    Attributes:
        least: the lowest push-sum weight at which a gradient was computed.
        farthest: max |z|.
    """

    def __init__(self, plan: GossipPlan, seed: int) -> None:
        self.plan, self.random = plan, random.Random(seed)
        size = len(plan.matrices[0])
        self.x, self.w, self.v = np.ones(size), np.ones(size), np.zeros(size)
        self.steps = [0] * size
        self.paces = [10 ** self.random.uniform(-2, 0) for _ in range(size)]
        self.flying: dict[tuple[int, int, int], tuple[float, float]] = {}
        """(receiver, sender, its step) -> x and w."""
        self.least, self.farthest = 1.0, 1.0

    def run(self) -> Push:
        while min(self.steps) < STEPS:
            ready = [rank for rank, step in enumerate(self.steps) if step < STEPS and self._may_begin(rank, step + 1)]
            assert ready, "a deadlock"
            self._step(self.random.choices(ready, [self.paces[rank] for rank in ready])[0])
            total = self.w.sum() + sum(w for _, w in self.flying.values())
            assert total == pytest.approx(len(self.w), abs=1e-9)
        return self

    def _may_begin(self, rank: int, step: int) -> bool:
        """Whether the messages were sent that come in before this step: SGP's end the step before, OSGP's this one."""
        due = step - max(1, self.plan.config.max_staleness)
        return due < 1 or all(self.steps[sender] >= due for sender, _ in self.plan.in_edges(rank, due))

    def _step(self, rank: int) -> None:
        late = self.plan.config.max_staleness
        self.steps[rank] += 1
        step = self.steps[rank]
        if not late:
            self._take(rank, step - 1)
        z = self.x[rank] / self.w[rank]
        self.least, self.farthest = min(self.least, self.w[rank]), max(self.farthest, abs(z))
        self.v[rank] = MOMENTUM * self.v[rank] + z
        self.x[rank] -= LR * self.v[rank]
        self._take(rank, step - max(1, late))
        x, w = self.x[rank], self.w[rank]
        for to, p in self.plan.out_edges(rank, step):
            self.flying[to, rank, step] = (p * x, p * w)
            self.x[rank] -= p * x
            self.w[rank] -= p * w
        if late and self.random.random() < 0.5:
            self._take(rank, step)

    def _take(self, rank: int, until: int) -> None:
        for key in sorted(key for key in self.flying if key[0] == rank and key[2] <= until):
            x, w = self.flying.pop(key)
            self.x[rank] += x
            self.w[rank] += w


@settings(max_examples=examples(80))
@given(st.sampled_from(NAMES), st.integers(1, 10), st.integers(0, 16), st.integers(0, 2**32))
def test_weights_and_models_are_bounded_whatever_is_late(name, size, late, seed):
    """On the unit quadratic, learning rate 0.1, momentum 0.9: weights as low as the matrices say, z never far out."""
    one = Push(make_plan(size, "osgp", name, max_staleness=late), seed).run()
    assert one.least >= one.plan.least_weight - 1e-9
    assert one.farthest < 20


@pytest.mark.parametrize(
    ("name", "size", "late"), covering((NAMES, (1, 2, 3, 5, 8, 10), (0, 1, 3, 16)), 3 if LONG_RUN else 2)
)
def test_the_bound_is_reached(name, size, late):
    """It is what a rank has that gave, and got nothing back yet; with doubly stochastic matrices what it keeps."""
    plan = make_plan(size, "osgp", name, max_staleness=late)
    found = min(Push(plan, seed).run().least for seed in range(3))
    assert found >= plan.least_weight - 1e-9
    if late and all(np.allclose(each.sum(axis=1), 1) for each in plan.matrices):
        assert plan.least_weight == pytest.approx(min(each.diagonal().min() for each in plan.matrices))
    if not late:
        assert found == pytest.approx(plan.least_weight, rel=1e-3)


def star_in_turn(size: int) -> Topology:
    """A star whose centre sends to one rank at a step, and all the others to it."""
    return topology.one_peer(topology.star(size))


@pytest.mark.parametrize(
    ("algorithm", "graph", "size", "near"),
    [
        ("sgp", path_back, 12, 7),
        ("osgp", path_back, 12, 6),
        ("sgp", star_in_turn, 10, 7),
        ("osgp", star_in_turn, 10, 5),
    ],
)
def test_graphs_on_which_weights_run_away_are_refused(algorithm, graph, size, near):
    """And the ones that come near are warned of, with the number."""
    with pytest.raises(ValueError, match=r"push-sum weights fall to 0\.0\d*, so .* so training would diverge; use a"):
        make_plan(size, algorithm, graph(size))
    with pytest.warns(UserWarning, match=r"push-sum weights fall to 0\.0\d*, so the optimizer's step is up to \d"):
        make_plan(near, algorithm, graph(near))
    wild = GossipPlan(
        make_plan(size, algorithm).config, graph(size), tuple(mixing.edge_weights(graph(size), "uniform"))
    )
    assert wild.least_weight < MIN_WEIGHT
    assert max(Push(wild, seed).run().farthest for seed in range(3)) > 100


def test_osgp_with_many_receivers_a_step_is_refused_and_sgp_is_not():
    make_plan(64, "sgp", "complete")
    with pytest.raises(ValueError, match=r"'complete' under osgp: push-sum weights fall to 0\.0156, .* 64 times"):
        make_plan(64, "osgp", "complete")
    with pytest.warns(UserWarning, match="'complete' under osgp"):
        make_plan(16, "osgp", "complete")
    assert MIN_WEIGHT < 1 / 16 < LOW_WEIGHT


@pytest.mark.parametrize(
    "options",
    [
        {"algorithm": "osgp", "max_staleness": 3},
        {"algorithm": "osgp", "max_staleness": 3, "gossip_every": 2},
        {"algorithm": "osgp", "max_staleness": 1, "gossip_every": 3},
        {"gossip_every": 3},
    ],
    ids=str,
)
def test_the_last_step_of_a_period_sends(options):
    """The longer of both periods: what was sent before is received by then."""
    plan = make_plan(4, **options)
    sent = [[], [], [(1, 0.5)], [], [], [(2, 0.5)], [], [], [(1, 0.5)]]
    assert [plan.out_edges(0, step) for step in range(1, 10)] == sent
    assert [plan.in_edges(0, step) for step in (1, 3, 4, 6)] == [[], [(3, 0.5)], [], [(2, 0.5)]]
    assert [plan.moves(step) for step in range(1, 5)] == [False, False, True, False]
    assert not make_plan(1).moves(1)


# -- weights of a networkx graph ------------------------------------------------------------------------------


def test_edge_weights_of_a_networkx_graph_are_the_mixing_matrix():
    weights = np.array([[0.5, 0.25, 0.25], [0.0, 0.7, 0.3], [0.6, 0.1, 0.3]])  # (BlueFog's: a row a sender)
    graph = networkx.from_numpy_array(weights, create_using=networkx.DiGraph)
    for algorithm in ("sgp", "osgp"):
        np.testing.assert_array_equal(make_plan(3, algorithm, graph).matrices, [weights.T])
    graph.remove_edges_from([(rank, rank) for rank in range(3)])  # then each keeps what it does not send
    np.testing.assert_allclose(make_plan(3, "sgp", graph).matrices, [weights.T])
    both = networkx.Graph()
    both.add_weighted_edges_from([(0, 1, 0.2), (1, 2, 0.3)])
    expected = np.array([[0.8, 0.2, 0.0], [0.2, 0.5, 0.3], [0.0, 0.3, 0.7]])
    np.testing.assert_allclose(make_plan(3, "dpsgd", both).matrices, [expected])
    np.testing.assert_allclose(
        make_plan(3, "dpsgd", topology.from_networkx(both), weights="metropolis").matrices[0][0, 1], 1 / 3
    )


def test_a_weight_of_1_on_all_edges_is_none():
    ones = networkx.from_numpy_array(np.ones((3, 3)) - np.eye(3))
    np.testing.assert_allclose(make_plan(3, "sgp", ones).matrices, [np.full((3, 3), 1 / 3)])


@pytest.mark.parametrize(
    ("edges", "options", "match"),
    [
        ([(0, 1, 5.0), (1, 2, 2.0), (2, 0, 1.0)], {}, "weights must be 0 or more.*from_networkx"),
        (
            [(0, 1, 0.5), (1, 2, None), (2, 0, 0.5)],
            {},
            r"the edge \(1, 2\) has no weight, .* set the weights of all edges or of none",
        ),
        ([(0, 0, 0.9), (0, 1, 0.5), (1, 2, 0.5), (2, 0, 0.5)], {}, "rank 0 sends 1.4 in total; .*from_networkx"),
        ([(0, 1, 0.5), (1, 2, 0.2), (2, 0, 0.5)], {"algorithm": "dpsgd"}, "gets no answer"),
        ([(0, 1, 0.5), (1, 2, 0.2), (2, 0, 0.5)], {"weights": "metropolis"}, "omit mixing and peers; or pass"),
        ([(0, 1, 0.5), (1, 2, 0.2), (2, 0, 0.5)], {"weights": np.eye(3)}, "omit mixing and peers"),
        (
            [(0, 1, 0.2), (1, 2, 0.2)],
            {"algorithm": "adpsgd", "both": True},
            "averages pairs with equal weights; or pass topology=",
        ),
    ],
)
def test_edge_weights_that_cannot_be_used_are_refused(edges, options, match):
    graph = networkx.Graph() if options.pop("both", False) else networkx.DiGraph()
    for a, b, weight in edges:
        graph.add_edge(a, b, **({} if weight is None else {"weight": weight}))
    with pytest.raises(ValueError, match=match):
        make_plan(3, **{"algorithm": "sgp", "graph": graph} | options)


# -- memory of 8-bit differences ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "size", "copies"),
    [("exponential", 16, 9), ("ring", 16, 4), ("ring-right", 16, 3), ("complete", 16, 17), ("linear", 16, 31)],
)
def test_copies_of_the_weights_that_8_bits_keep(name, size, copies):
    assert make_plan(size, "sgp", name, compression="int8").copies == copies


@pytest.mark.parametrize(("name", "copies"), [("exponential", 3), ("ring", 2), ("complete", 8)])
def test_a_rank_of_a_host_keeps_copies_of_its_part_one_for_each_edge(name, copies):
    """1 + 8, 1 + 4 and 1 + 30 parts of 4 at 16 hosts."""
    assert make_plan(64, "sgp", name, compression="int8", local_size=4).copies == copies


def test_too_many_copies_are_refused():
    with pytest.raises(ValueError, match=r"int8 on topology 'linear' keeps 33 copies .*use 'exponential'"):
        make_plan(17, "sgp", "linear", compression="int8")
    make_plan(1024, "sgp", "ring", compression="int8")
