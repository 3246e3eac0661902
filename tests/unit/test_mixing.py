"""Mixing matrices: stochastic, mean-preserving, contracting as their singular values say; what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_async import mixing, topology
from hvd_async.topology import Topology

SIZES = st.integers(1, 17)
NAMES = st.sampled_from(sorted(topology.NAMED))
SYMMETRIC = st.sampled_from(["bipartite-exponential", "bipartite-linear", "ring", "mesh", "star", "complete"])
SEEDS = st.integers(0, 2**32 - 1)


def disagreement(x):
    """sqrt(sum over ranks of |x_i - mean|^2)."""
    return np.linalg.norm(x - x.mean(axis=0))


@given(NAMES, SIZES)
def test_uniform_weights_are_column_stochastic_on_every_graph(name, size):
    graph = topology.named(name, size)
    for weights in mixing.matrices(graph, "uniform"):
        mixing.check_columns(weights)
        if graph.regular:
            mixing.check_doubly(weights)


@given(SYMMETRIC, SIZES)
def test_metropolis_weights_are_symmetric_and_doubly_stochastic(name, size):
    for weights in mixing.matrices(topology.named(name, size), "metropolis"):
        mixing.check_doubly(weights)
        np.testing.assert_array_equal(weights, weights.T)
        assert (np.diag(weights) > 0).all()


@given(SYMMETRIC, SIZES, SEEDS)
def test_a_period_shrinks_disagreement_by_the_second_singular_value_at_least(name, size, seed):
    matrices = mixing.matrices(topology.named(name, size), "metropolis")
    x = np.random.default_rng(seed).normal(size=(size, 4))
    before, mean = disagreement(x), x.mean(axis=0)
    for weights in matrices:
        x = weights @ x
    np.testing.assert_allclose(x.mean(axis=0), mean, atol=1e-12)
    assert disagreement(x) <= mixing.contraction(matrices) * before + 1e-12


@given(SIZES, st.integers(1, 4))
def test_base_graphs_agree_after_a_period(size, peers):
    graph = topology.base(size, min(peers, max(1, size - 1)))
    matrices = mixing.matrices(graph, "uniform")
    for weights in matrices:
        mixing.check_doubly(weights)
    assert mixing.disagreement(matrices, graph.period)[-1] < 1e-14
    assert mixing.spectral_gap(matrices) == 1.0
    assert mixing.mixing_time(matrices) == graph.period
    with pytest.raises(ValueError, match="topology 'base' defines its own weights; omit mixing"):
        mixing.matrices(graph, "metropolis")


def test_disagreement_is_what_is_left_of_the_worst_case():
    (half,) = mixing.matrices(topology.complete(2), "uniform")
    third = np.array([[2.0, 1.0], [1.0, 2.0]]) / 3
    np.testing.assert_allclose(mixing.disagreement([third], 3), [1 / 3, 1 / 9, 1 / 27])
    np.testing.assert_allclose(mixing.disagreement([third, half], 3), [1 / 3, 0, 0], atol=1e-15)
    assert mixing.disagreement([np.eye(3)], 2) == pytest.approx([1.0, 1.0])


def test_the_gap_of_a_ring_is_the_known_one():
    (weights,) = mixing.matrices(topology.ring(9), "metropolis")
    second = (1 + 2 * math.cos(2 * math.pi / 9)) / 3
    assert mixing.second_eigenvalue([weights]) == pytest.approx(second)
    assert mixing.spectral_gap([weights]) == pytest.approx(1 - second)
    assert mixing.mixing_time([weights], 1e-3) == pytest.approx(math.log(1e-3) / math.log(second))


def test_a_graph_without_a_gap_never_mixes():
    apart = Topology("two pairs", 4, (frozenset({(0, 1), (1, 0), (2, 3), (3, 2)}),))
    assert mixing.mixing_time(mixing.matrices(apart, "metropolis")) == math.inf
    with pytest.raises(ValueError, match="nothing of rank 0 ever reaches rank 2"):
        mixing.check_connected(apart)
    one_way = Topology("one way", 3, (frozenset({(0, 1)}), frozenset({(1, 2)})))
    with pytest.raises(ValueError, match="nothing of rank 1 ever reaches rank 0"):
        mixing.check_connected(one_way)


@pytest.mark.parametrize(
    ("matrix", "hint"),
    [
        ([[1.0, 0.5], [0.0, 0.4]], "rank 1 sends 0.9"),
        ([[1.0, 0.5], [0.0, 0.5]], "rank 0 receives 1.5"),
        ([[1.2, 0.0], [-0.2, 1.0]], "the edge from rank 0 to rank 1 is -0.2"),
        ([[math.nan, 0.0], [0.0, 1.0]], "from rank 0 to rank 0 is nan"),
        ([[1.0, 0.0]], r"shape \(1, 2\)"),
    ],
)
def test_what_does_not_mix_is_refused_by_name(matrix, hint):
    with pytest.raises(ValueError, match=hint):
        mixing.check_doubly(np.array(matrix))


def test_metropolis_weights_refuse_directed_graphs_and_unknown_schemes():
    with pytest.raises(ValueError, match="rank 0 sends to rank 1 at step 0 and gets no answer"):
        mixing.matrices(topology.exponential(4), "metropolis")
    with pytest.raises(ValueError, match="'uniform', 'metropolis'"):
        mixing.matrices(topology.ring(4), "random")


def test_own_weights_above_1_are_refused():
    greedy = Topology("greedy", 2, (frozenset({(0, 1)}),), ({(0, 1): 1.5},))
    with pytest.raises(ValueError, match=r"the edge from rank 0 to rank 0 is -0\.5"):
        mixing.matrices(greedy, "uniform")


@given(NAMES, SIZES, SEEDS)
def test_edges_are_their_matrix(name, size, seed):
    """Whatever is computed by a matrix's edges is what NumPy computes with all of it."""
    x = np.random.default_rng(seed).normal(size=size)
    for edges in mixing.edge_weights(topology.named(name, size), "uniform"):
        matrix = edges.dense()
        np.testing.assert_allclose(edges @ x, matrix @ x, atol=1e-12)
        np.testing.assert_allclose(edges.sums(edges.senders), matrix.sum(axis=0))
        np.testing.assert_allclose(edges.sums(edges.receivers), matrix.sum(axis=1))
        np.testing.assert_array_equal(edges.diagonal(), matrix.diagonal())
        np.testing.assert_array_equal(edges.lazy().dense(), (matrix + np.eye(size)) / 2)
        again = mixing.EdgeWeights.of(matrix)
        np.testing.assert_array_equal(again.dense(), matrix)
        pair = edges.asymmetric()
        assert (pair is None) == np.array_equal(matrix, matrix.T)
        if pair is not None:
            assert pair[2:] == (matrix[pair[:2]], matrix[pair[1::-1]])
