"""Graphs as data, and the mixing matrices on them: their properties at every size; what is refused.

What ``make_plan`` refuses, and graphs of networkx, are in ``test_plan``.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_async import mixing, topology
from hvd_async.finite_time import base_graph, hyper_hypercube, simple_base_graph
from hvd_async.topology import Topology
from tests.conftest import examples

SIZES = st.integers(1, 17)
SEEDS = st.integers(0, 2**32 - 1)
NAMES = st.sampled_from(sorted(topology.NAMED))
SYMMETRIC = {
    "bipartite-exponential",
    "bipartite-linear",
    "ring",
    "symmetric-exponential",
    "mesh",
    "star",
    "complete",
    "base",
    "random-pairs",
}
REGULAR = set(topology.NAMED) - {"bipartite-exponential", "bipartite-linear", "mesh", "star", "base", "random-pairs"}


@given(NAMES, SIZES)
def test_every_graph_exists_and_is_connected_at_every_size(name, size):
    graph = topology.named(name, size)
    assert graph.size == size
    assert graph.unreachable() is None
    for step in range(graph.period):
        for rank in range(size):
            assert rank not in graph.out(rank, step)
            for peer in graph.out(rank, step):
                assert rank in graph.into(peer, step)
                assert peer in graph.neighbours(rank)
            assert len(set(graph.out(rank, step))) == len(graph.out(rank, step))


@given(NAMES, SIZES)
def test_the_table_says_which_are_symmetric_and_which_regular(name, size):
    graph = topology.named(name, size)
    assert graph.symmetric or name not in SYMMETRIC
    assert graph.regular or name not in REGULAR
    if size > 4:
        assert graph.symmetric == (name in SYMMETRIC)


@pytest.mark.parametrize(("size", "hops"), [(1, []), (2, [1]), (3, [1, 2]), (5, [1, 2, 4]), (8, [1, 2, 4])])
def test_one_peer_exponential_hops_double(size, hops):
    graph = topology.exponential(size)
    found = [(graph.out(0, step)) for step in range(graph.period)]
    assert found == ([(hop % size,) for hop in hops] or [()])


@given(st.integers(3, 33), st.data())
def test_several_peers_are_all_different_ones(size, data):
    peers = data.draw(st.integers(1, size - 1))
    graph = topology.exponential(size, peers)
    for step in range(graph.period):
        degrees = {len(graph.out(rank, step)) for rank in range(size)}
        assert len(degrees) == 1
        assert 1 <= max(degrees) <= peers
    assert graph.out(0, 0) == tuple(range(1, peers + 1))
    assert graph.unreachable() is None


@given(st.integers(1, 32))
def test_in_a_bipartite_graph_no_rank_has_two_partners(size):
    for graph in (topology.bipartite_exponential(size), topology.bipartite_linear(size)):
        for step in range(graph.period):
            partners = [graph.out(rank, step) for rank in range(size)]
            assert all(len(own) <= 1 for own in partners)
            assert sum(not own for own in partners) == size % 2


@pytest.mark.parametrize("make", [base_graph, simple_base_graph])
@pytest.mark.parametrize("peers", [1, 2, 3, 4])
def test_a_base_graph_agrees_exactly_after_a_period_at_any_size(peers, make):
    """Each phase has at most ``peers`` neighbours of a rank, and a symmetric, doubly stochastic matrix."""
    for size in range(1, 41):
        product = np.eye(size)
        phases = make(range(size), peers)
        for phase in phases:
            weights = np.zeros((size, size))
            for (sender, receiver), weight in phase.items():
                weights[receiver, sender] = weight
            assert 1 <= np.count_nonzero(weights, axis=0).max() <= peers
            np.fill_diagonal(weights, 1.0 - weights.sum(axis=0))
            np.testing.assert_array_equal(weights, weights.T)
            assert (weights.diagonal() > 0).all()
            product = weights @ product
        np.testing.assert_allclose(product, 1.0 / size, rtol=0, atol=1e-15)
        if make is base_graph:  # (Theorem 1 of the paper)
            assert len(phases) <= 2 * math.log(size, peers + 1) + 2
            assert len(phases) <= len(simple_base_graph(range(size), peers))


@pytest.mark.parametrize("size", [2, 3, 8, 15])
def test_random_pairs_are_others_in_each_phase_and_the_same_on_all_ranks(size):
    graph = topology.random_pairs(size)
    assert graph == topology.random_pairs(size)
    assert size < 4 or graph.phases != topology.random_pairs(size, seed=1).phases
    assert graph.period == 2 * size
    assert {sum(bool(graph.out(rank, step)) for rank in range(size)) for step in range(2 * size)} == {size // 2 * 2}
    assert len(set(graph.phases)) > (size if size > 3 else 0)


def test_a_mesh_is_as_square_as_it_can_be():
    degrees = [len(topology.mesh(12).out(rank, 0)) for rank in range(12)]  # 3 x 4
    assert sorted(degrees) == [2] * 4 + [3] * 6 + [4] * 2
    assert [len(topology.mesh(5).out(rank, 0)) for rank in range(5)] == [1, 2, 2, 2, 1]


@given(st.integers(2, 17), st.sampled_from(["static-exponential", "complete", "ring", "star"]))
def test_one_peer_takes_every_neighbour_in_its_turn(size, name):
    static = topology.named(name, size)
    graph = topology.one_peer(static)
    assert [topology.one_peer(topology.complete(4)).out(2, step) for step in range(3)] == [(3,), (0,), (1,)]
    for rank in range(size):
        visited = {graph.out(rank, step) for step in range(graph.period)}
        assert visited == {(peer,) for peer in static.out(rank, 0)}


@given(st.integers(1, 5), st.sampled_from([1, 3, 4, 5]), st.sampled_from(["ring", "exponential"]))
def test_inner_outer_sends_one_rank_of_each_host_outside(hosts, local_size, outer):
    graph = topology.inner_outer(hosts * local_size, local_size, outer)
    assert graph.unreachable() is None
    for step in range(graph.period):
        for rank in range(graph.size):
            for peer in graph.out(rank, step):
                inside = peer // local_size == rank // local_size
                assert inside == (rank % local_size != step % local_size)
                assert inside or peer % local_size == rank % local_size


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (lambda: topology.named("exponential", 4, 0), "must be a whole number, 1 or more, got 0"),
        (lambda: hyper_hypercube(range(10), 3), "10 ranks have a prime factor above 4; use base_graph"),
        (lambda: topology.ring(4, "up"), "'left', 'right' or 'both'"),
        (lambda: topology.static_exponential(4, 1), "must be 2 or more, got 1"),
        (lambda: topology.inner_outer(6, 4), "does not divide 6 ranks"),
        (lambda: topology.inner_outer(6, 2), "must be 1, or 3 or more, got 2"),
        (lambda: topology.inner_outer(6, 3, "star"), "'ring' or 'exponential'"),
        (lambda: topology.one_peer(topology.exponential(4)), "must be static, got 'exponential' with 2 phases"),
        (lambda: Topology("mine", 2, (frozenset({(0, 2)}),)), r"edge \(0, 2\) must be between ranks 0 to 1"),
        (lambda: Topology("mine", 2, (frozenset({(1, 1)}),)), "rank 1 sends to itself"),
        (lambda: Topology("mine", 0, (frozenset(),)), "1 or more"),
        (lambda: Topology("mine", 2, ()), "at least one"),
        (lambda: Topology("mine", 2, (frozenset({(0, 1)}),), ({}, {})), "weights of each phase's edges, or none"),
    ],
)
def test_what_is_no_graph_is_refused_with_a_hint(make, hint):
    with pytest.raises(ValueError, match=hint):
        make()


# -- mixing matrices --------------------------------------------------------------------------------------------------

TWO_WAY = st.sampled_from(["bipartite-exponential", "bipartite-linear", "ring", "mesh", "star", "complete"])


@given(NAMES, SIZES)
def test_uniform_weights_are_column_stochastic_on_every_graph(name, size):
    graph = topology.named(name, size)
    for weights in mixing.matrices(graph, "uniform"):
        mixing.check_columns(weights)
        if graph.regular:
            mixing.check_doubly(weights)


def test_a_matrix_whose_rows_do_not_add_up_is_refused():
    with pytest.raises(ValueError, match=r"rank 0 receives 1\.5"):
        mixing.check_doubly(np.array([[1.0, 0.5], [0.0, 0.5]]))


@given(TWO_WAY, SIZES)
def test_metropolis_weights_are_symmetric_and_doubly_stochastic(name, size):
    for weights in mixing.matrices(topology.named(name, size), "metropolis"):
        mixing.check_doubly(weights)
        np.testing.assert_array_equal(weights, weights.T)
        assert (np.diag(weights) > 0).all()


@settings(max_examples=examples(25))
@given(NAMES, st.integers(1, 8), SEEDS)
def test_push_sum_keeps_the_sums_and_finds_the_mean_on_every_graph(name, size, seed):
    random = np.random.default_rng(seed)
    x, w = random.normal(size=(size, 3)), np.ones((size, 1))
    mean = x.mean(axis=0)
    matrices = mixing.matrices(topology.named(name, size), "uniform")
    for step in range(250 * len(matrices)):  # the slowest, a one-way ring of 8, shrinks by cos(pi / 8) a step
        x, w = matrices[step % len(matrices)] @ x, matrices[step % len(matrices)] @ w
        assert (w > 0).all()
    np.testing.assert_allclose(x.sum(axis=0) / size, mean, atol=1e-12)
    np.testing.assert_allclose(x / w, np.tile(mean, (size, 1)), atol=1e-6)


@pytest.mark.parametrize(
    "graph", [*map(topology.exponential, (1, 2, 4, 8, 16)), topology.base(5), topology.base(12, 2)]
)
def test_these_graphs_agree_exactly_after_a_period(graph):
    matrices = mixing.matrices(graph, "uniform")
    product = functools.reduce(lambda before, each: each @ before, matrices)
    np.testing.assert_allclose(product, 1.0 / len(product), atol=1e-12)


def test_a_graph_that_is_not_connected_is_refused():
    apart = Topology("two pairs", 4, (frozenset({(0, 1), (1, 0), (2, 3), (3, 2)}),))
    with pytest.raises(ValueError, match="nothing of rank 0 ever reaches rank 2"):
        mixing.check_connected(apart)
    one_way = Topology("one way", 3, (frozenset({(0, 1)}), frozenset({(1, 2)})))
    with pytest.raises(ValueError, match="nothing of rank 1 ever reaches rank 0"):
        mixing.check_connected(one_way)


GREEDY = Topology("greedy", 2, (frozenset({(0, 1)}),), ({(0, 1): 1.5},))


@pytest.mark.parametrize(
    ("graph", "scheme", "hint"),
    [
        (topology.exponential(4), "metropolis", "rank 0 sends to rank 1 at step 0 and gets no answer"),
        (GREEDY, "uniform", r"the edge from rank 0 to rank 0 is -0\.5"),
    ],
)
def test_weights_that_do_not_fit_a_graph_are_refused(graph, scheme, hint):
    with pytest.raises(ValueError, match=hint):
        mixing.matrices(graph, scheme)


@given(NAMES, SIZES, SEEDS)
def test_edges_are_their_matrix(name, size, seed):
    """Whatever is computed by a matrix's edges is what NumPy computes with all of it."""
    x = np.random.default_rng(seed).normal(size=size)
    for edges in mixing.edge_weights(topology.named(name, size), "uniform"):
        matrix = edges.dense()
        np.testing.assert_allclose(edges @ x, matrix @ x, atol=1e-12)
        np.testing.assert_allclose(edges.sums(edges.senders), matrix.sum(axis=0))
        np.testing.assert_allclose(edges.sums(edges.receivers), matrix.sum(axis=1))
        np.testing.assert_array_equal(edges.lazy().dense(), (matrix + np.eye(size)) / 2)
        np.testing.assert_array_equal(mixing.EdgeWeights.of(matrix).dense(), matrix)
        pair = edges.asymmetric()
        assert (pair is None) == np.array_equal(matrix, matrix.T)
        assert pair is None or pair[2:] == (matrix[pair[:2]], matrix[pair[1::-1]])
