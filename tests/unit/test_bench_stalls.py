"""Whom a graph makes wait when one rank stands still, whether ranks waited so, and random graphs."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_async import topology
from scripts.benchmarks.cases import sleeping_rank
from scripts.benchmarks.support.random_graphs import random_graph
from scripts.benchmarks.support.stalls import Stall, stalls
from tests.conftest import examples


def test_on_a_ring_one_more_rank_each_way_stops_at_each_step():
    assert stalls(topology.ring(8), 3, 10) == {
        2: Stall(10, (3,)),
        4: Stall(10, (3,)),
        1: Stall(11, (2,)),
        5: Stall(11, (4,)),
        0: Stall(12, (1,)),
        6: Stall(12, (5,)),
        7: Stall(13, (0, 6)),
    }


def test_a_dynamic_graph_stops_those_whose_turn_it_is():
    # Hops 1, 2, 4 at steps 1, 2, 3. Rank 0 does not end step 2: rank 2 waits there; at step 3 rank 4 waits for rank 0
    # and rank 6 for rank 2; at step 4 rank 1 waits for 0, 3 for 2, 5 for 4, 7 for 6.
    assert stalls(topology.exponential(8), 0, 2) == {
        2: Stall(2, (0,)),
        4: Stall(3, (0,)),
        6: Stall(3, (2,)),
        1: Stall(4, (0,)),
        3: Stall(4, (2,)),
        5: Stall(4, (4,)),
        7: Stall(4, (6,)),
    }


def test_staleness_lets_ranks_go_on():
    graph = topology.ring(4, "right")
    assert stalls(graph, 0, 5) == {1: Stall(5, (0,)), 2: Stall(6, (1,)), 3: Stall(7, (2,))}
    assert stalls(graph, 0, 5, staleness=2) == {1: Stall(7, (0,)), 2: Stall(10, (1,)), 3: Stall(13, (2,))}


@settings(max_examples=examples(100))
@given(st.integers(2, 9), st.integers(0, 2), st.integers(1, 9), st.randoms(use_true_random=False))
def test_everybody_stops_at_last(size, staleness, step, draws):
    graph = random_graph(size, False, draws)
    sleeper = draws.randrange(size)
    found = stalls(graph, sleeper, step, staleness)
    assert found.keys() == set(range(size)) - {sleeper}
    last = {rank: stall.step for rank, stall in found.items()} | {sleeper: step - 1}
    for rank, stall in found.items():
        assert stall.step >= step + staleness
        assert all(last[sender] < stall.step - staleness for sender in stall.senders)
        assert set(stall.senders) <= set(graph.into(rank, stall.step - staleness - 1))


@settings(max_examples=examples(100))
@given(st.integers(1, 9), st.booleans(), st.randoms(use_true_random=False))
def test_random_graphs_connect_all(size, symmetric, draws):
    graph = random_graph(size, symmetric, draws)
    assert graph.unreachable() is None
    assert graph.symmetric or not symmetric
    assert graph.size == size


def test_random_graphs_differ():
    draws = random.Random(0)
    assert len({random_graph(8, False, draws).phases for _ in range(20)}) == 20


def test_under_dpsgd_whose_messages_go_a_step_ahead_all_stop_a_step_later():
    def slept(arm):
        ranks = [{"slept": 5 if rank == 2 else None} for rank in range(4)]
        return sleeping_rank.expected({"arm": arm, "topology": "ring", "sleeper": 2, "by_rank": ranks})

    assert slept("sgp") == {1: Stall(5, (2,)), 3: Stall(5, (2,)), 0: Stall(6, (1, 3))}
    assert slept("dpsgd") == {1: Stall(6, (2,)), 3: Stall(6, (2,)), 0: Stall(7, (1, 3))}
    assert slept("adpsgd") == slept("lsgd") == {}


@pytest.mark.parametrize(
    ("waits", "right"),
    [
        ({3: (9.0, 0)}, True),
        ({3: (4.0, 0)}, False),  # not for long
        ({3: (9.0, 2)}, False),  # for another
        ({4: (9.0, 0)}, False),  # in another step
        ({3: (9.0, 0), 6: (9.0, 0)}, False),  # twice
        ({}, False),
    ],
)
def test_a_rank_waits_where_the_graph_says_and_nowhere_else(waits, right):
    """Rank 0 of a ring of 3 to the right sleeps 10 s in its step 3: rank 1 waits for it there."""
    own = {"waits": [waits.get(step, (0.0, 0))[0] for step in range(1, 8)]}
    own["waited_for"] = [waits.get(step, (0.0, None))[1] for step in range(1, 8)]
    ranks = [{"slept": 3, "waits": [], "waited_for": []}, own, own]
    block = {"arm": "sgp", "topology": "ring-right", "sleep": 10.0, "sleeper": 0, "by_rank": ranks}
    assert sleeping_rank.as_expected(block, 1) is right
