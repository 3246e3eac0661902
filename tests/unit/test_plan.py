"""Who gossips with whom: graphs and matrices laid out for an algorithm, and all that does not fit together."""

from __future__ import annotations

import math
import re
import tracemalloc

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_async import mixing, topology
from hvd_async.algorithms import registry
from hvd_async.algorithms.gossip.plan import ALGORITHMS, make_plan
from hvd_async.topology import Topology
from tests.conftest import examples
from tests.unit.test_topology import SYMMETRIC

DOUBLY = ("dpsgd", "exact-diffusion", "noloco")
GOSSIPS = [name for name, algorithm in ALGORITHMS.items() if algorithm.has_graph]
OUTER = [name for name, algorithm in ALGORITHMS.items() if algorithm.outer is not None]
SWAP = np.array([[0.0, 1.0], [1.0, 0.0]])
TURN = np.array([[0.5, 0.0, 0.5], [0.5, 0.5, 0.0], [0.0, 0.5, 0.5]])
"""Doubly stochastic, and directed."""
LOPSIDED = np.array([[0.5, 0.2, 0.3], [0.3, 0.5, 0.2], [0.2, 0.3, 0.5]])
"""Doubly stochastic on a symmetric graph, and not symmetric."""
TO_NEXT = topology.ring(4, "right").phases[0]
APART = Topology("two pairs", 4, (frozenset({(0, 1), (1, 0), (2, 3), (3, 2)}),))


def scheme_of(algorithm: str, graph: Topology) -> str:
    return "metropolis" if algorithm in DOUBLY and graph.symmetric and not graph.weights else "uniform"


def takes(algorithm: str, graph: Topology) -> bool:
    """Whether an algorithm takes a graph, which it refuses with a reason otherwise."""
    try:
        make_plan(graph.size, algorithm, graph, weights=scheme_of(algorithm, graph))
    except ValueError as error:
        if not re.search(r"symmetric|averages pairs with equal weights|changes from step to step", str(error)):
            raise
        return False
    return True


# -- what is laid out -----------------------------------------------------------------------------------------


@settings(max_examples=examples(60))
@given(st.sampled_from(GOSSIPS), st.sampled_from(sorted(topology.NAMED)), st.integers(1, 9), st.integers(1, 30))
def test_edges_are_those_of_the_matrices(algorithm, name, size, step):
    graph = topology.named(name, size)
    scheme = scheme_of(algorithm, graph)
    if not takes(algorithm, graph):
        return
    plan = make_plan(size, algorithm, graph, weights=scheme)
    weights = plan.matrices[plan.phase(step)]
    expected = mixing.matrices(graph, scheme)[(step - 1) % graph.period]
    lazy = (expected + np.eye(size)) / 2
    np.testing.assert_array_equal(weights, lazy if algorithm == "exact-diffusion" else expected)
    again = np.diag(np.diag(weights))
    for place in range(size):
        out, into = plan.out_edges(place, step), plan.in_edges(place, step)
        assert [to for to, _ in out] == list(graph.out(place, step - 1))
        assert [sender for sender, _ in into] == list(graph.into(place, step - 1))
        for to, p in out:
            assert (place, p) in plan.in_edges(to, step)
            again[to, place] = p
        assert len(out) <= plan.max_messages or algorithm == "adpsgd"
    np.testing.assert_array_equal(again, weights)


def test_each_algorithm_has_its_graph_and_its_staleness():
    graphs = {name: make_plan(8, name).topology.name for name in ALGORITHMS}
    assert graphs == {
        "sgp": "exponential",
        "osgp": "exponential",
        "dpsgd": "bipartite-exponential",
        "adpsgd": "bipartite-exponential",
        "exact-diffusion": "ring",
        "noloco": "random-pairs",
        **dict.fromkeys(("allreduce", *OUTER), "none"),
    }
    assert {name: make_plan(8, name).config.max_staleness for name in ALGORITHMS} == {
        **dict.fromkeys(ALGORITHMS, 0),
        "osgp": 1,
        **dict.fromkeys(OUTER, 4),
    }
    assert make_plan(8, "osgp", max_staleness=0).config.max_staleness == 0
    assert make_plan(8, "sgp", max_staleness=0).config.max_staleness == 0


def test_the_configuration_says_what_ranks_must_have_in_common():
    plan = make_plan(4, "adpsgd", "ring", max_local_steps=7, compression="bf16")
    config = plan.config
    assert (config.algorithm, config.max_local_steps, config.compression) == ("adpsgd", 7, "bf16")
    assert config.neighbours == [[1, 3], [0, 2], [1, 3], [0, 2]]
    assert config.graph.startswith("ring (")
    assert make_plan(4, "allreduce").config.average_every == 1
    assert make_plan(4, "allreduce", average_every=3).config.average_every == 3
    assert make_plan(4, average_every=3).config.average_every == 3


def test_outer_optimizers_have_their_rhythm_and_constants():
    for name in OUTER:
        config = make_plan(4, name).config
        assert (config.average_every, config.max_staleness, config.fragments) == (8, 4, 1)
    given = {"average_every": 6, "fragments": 6, "max_staleness": 9, "outer_lr": 0.4, "outer_momentum": 0.0}
    config = make_plan(4, "diloco", **given).config
    assert (config.max_staleness, config.outer_lr, config.outer_momentum) == (5, 0.4, 0), "later it would be too late"
    assert make_plan(4, "local", average_every=1).config.max_staleness == 0
    assert (make_plan(4, "local").config.outer_lr, make_plan(4, "local").config.outer_momentum) == (0.0, 0.0)
    assert make_plan(4, "local", fragments=2).parts == 8
    assert (make_plan(4).parts, make_plan(4, local_size=2).parts) == (1, 2)
    plans = make_plan(4, "local", fragments=2), make_plan(4), make_plan(4, local_size=2)
    assert [(plan.max_messages, plan.plain_messages) for plan in plans] == [(3, 0), (1, 0), (1, 1)]
    hosts = make_plan(6, "local", fragments=2, local_size=3)
    assert (hosts.parts, hosts.max_messages, hosts.plain_messages) == (12, 5, 2 * 4)


def test_other_weights_are_another_graph():
    same, others = make_plan(4, graph="star"), [make_plan(4, graph="star", weights="metropolis"), make_plan(4)]
    assert make_plan(4, graph="star").config == same.config
    assert len({plan.config.graph for plan in [same, *others]}) == 3
    renamed = Topology("star", 4, topology.ring(4).phases)
    assert make_plan(4, graph=renamed).config.graph != same.config.graph


def test_networkx_graphs():
    petersen = make_plan(10, "dpsgd", networkx.petersen_graph())
    assert petersen.topology.symmetric
    assert petersen.topology.regular
    assert {len(petersen.out_edges(place, 1)) for place in range(10)} == {3}
    assert petersen.max_messages == 3
    one_way = networkx.DiGraph([(0, 1), (1, 2), (2, 0), (2, 2)])
    assert [make_plan(3, "osgp", one_way).out_edges(place, 1)[0][0] for place in range(3)] == [1, 2, 0]
    with pytest.raises(ValueError, match="rank 0 sends to rank 1 at step 0 and gets no answer; adpsgd needs"):
        make_plan(3, "adpsgd", one_way)


@pytest.mark.parametrize("given", [TURN, TURN.tolist(), [TURN], TURN[None], tuple(TURN.tolist())])
def test_a_matrix_says_who_sends_to_whom(given):
    plan = make_plan(3, "sgp", weights=given)
    assert plan.topology.phases == (frozenset({(0, 1), (1, 2), (2, 0)}),)
    assert plan.out_edges(1, 4) == [(2, 0.5)]
    assert plan.in_edges(0, 1) == [(2, 0.5)]


def test_matrices_by_phase_may_be_connected_together_only():
    pairs = [np.eye(4), np.eye(4)]
    for matrix, edges in zip(pairs, ([(0, 1), (2, 3)], [(1, 2), (3, 0)]), strict=True):
        for a, b in edges:
            matrix[np.ix_([a, b], [a, b])] = 0.5
    for weights in (pairs, tuple(pairs), np.array(pairs), [pair.tolist() for pair in pairs]):
        plan = make_plan(4, "dpsgd", weights=weights)
        assert [plan.out_edges(0, step) for step in (1, 2, 3)] == [[(1, 0.5)], [(3, 0.5)], [(1, 0.5)]]


def test_hosts_gossip_instead_of_ranks():
    plan = make_plan(12, graph="ring", local_size=3)
    assert plan.topology.size == 4
    assert plan.config.local_size == 3


# -- which algorithms may use a graph -------------------------------------------------------------------------


@given(st.sampled_from(sorted(topology.NAMED)), st.integers(5, 12))
def test_a_graph_is_refused_by_the_algorithms_that_it_does_not_fit(name, size):
    graph = topology.named(name, size)
    expected = {"sgp", "osgp"} | ({"dpsgd", "noloco"} if name in SYMMETRIC else set())
    expected |= {"adpsgd"} if name in SYMMETRIC - {"base"} else set()
    expected |= {"exact-diffusion"} if name in SYMMETRIC and graph.period == 1 else set()
    assert {algorithm for algorithm in GOSSIPS if takes(algorithm, graph)} == expected


def test_no_algorithm_may_use_a_graph_in_parts():
    for algorithm in GOSSIPS:
        with pytest.raises(ValueError, match="'two pairs' is not connected: nothing of rank 0 ever reaches rank 2"):
            make_plan(4, algorithm, APART)


# -- what does not fit ----------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "algorithm": (
        {"algorithm": "gossip"},
        "algorithm must be one of 'sgp', 'osgp', 'dpsgd', 'adpsgd', 'exact-diffusion', 'noloco', 'all",
    ),
    "name": ({"graph": "torus"}, "must be one of exponential, .*, or a networkx graph, got 'torus'"),
    "no graph": ({"graph": 4}, r"topology must be a name \(.*, got 4"),
    "class": ({"graph": Topology}, r"topology must be a name \(.*, got <class"),
    "nodes": ({"graph": networkx.Graph([("a", "b")])}, "convert_node_labels_to_integers"),
    "connected": ({"graph": networkx.Graph([(0, 1), (2, 3)])}, "is not connected: .*; add edges"),
    "one way": ({"graph": networkx.DiGraph([(0, 1), (1, 2), (2, 3)])}, "nothing of rank 1 ever reaches rank 0"),
    "size of a topology": ({"graph": topology.ring(5)}, "'ring' is one of 5 ranks, and there are 4"),
    "size of a networkx graph": ({"graph": networkx.cycle_graph(3)}, "is one of 3 ranks, and there are 4"),
    "size of a matrix": ({"weights": TURN}, "is one of 3 ranks, and there are 4"),
    "sizes of matrices": ({"weights": [np.eye(4), TURN]}, r"must have one size, .* got \[3, 4\]"),
    "sizes of lists": ({"weights": [np.eye(4).tolist(), TURN.tolist()]}, r"must have one size, .* got \[3, 4\]"),
    "no matrices": ({"weights": []}, "must be square"),
    "no matrix": ({"weights": None}, "must be square"),
    "an oblong matrix": ({"weights": np.ones((2, 3)) / 2}, r"must be square, .* got shape \(2, 3\)"),
    "columns": ({"weights": [[0.5, 0.5], [0.4, 0.5]], "size": 2}, "rank 0 sends 0.9 in total; every column must"),
    "negative": ({"weights": [[1.5, 0.5], [-0.5, 0.5]], "size": 2}, "from rank 0 to rank 1 is -0.5; weights must be"),
    "NaN": ({"weights": [[math.nan, 0.5], [0.5, 0.5]], "size": 2}, "from rank 0 to rank 0 is nan"),
    "nothing kept": ({"weights": [np.full((2, 2), 0.5), SWAP], "size": 2}, r"W\[0, 0\] must be above 0, got 0: rank 0"),
    "a matrix apart": ({"weights": np.eye(4)}, "'given by mixing=' is not connected"),
    "pairs' matrix": ({"weights": np.full((4, 4), 0.25), "algorithm": "adpsgd"}, "with equal weights; omit it"),
    "pairs' steps": ({"max_local_steps": 7}, "use 'adpsgd'"),
    "a graph of averages": ({"algorithm": "allreduce", "graph": "ring"}, "allreduce averages all ranks; omit it"),
    "peers of averages": ({"algorithm": "allreduce", "peers": 2}, "allreduce averages all ranks; omit it"),
    "weights of averages": ({"algorithm": "allreduce", "weights": "metropolis"}, "omit it"),
    "a matrix and a graph": ({"weights": np.full((4, 4), 0.25), "graph": "ring"}, "omit topology and peers"),
    "a matrix and peers": ({"weights": np.full((4, 4), 0.25), "peers": 2}, "omit topology and peers"),
    "scheme": ({"weights": "random"}, "mixing must be one of 'uniform', 'metropolis', got 'random'"),
    "metropolis on a directed graph": ({"weights": "metropolis"}, "Metropolis weights need a symmetric graph"),
    "peers": ({"peers": 4}, "peers must be at most 3 at 4 ranks, got 4"),
    "peers of a name": ({"graph": "ring", "peers": 2}, "topology 'ring' defines its own edges; omit peers"),
    "peers of a graph": (
        {"graph": topology.ring(4), "peers": 2},
        "a graph passed as topology= defines its own edges; omit",
    ),
    "no peers": ({"peers": 0}, "peers must be a whole number, 1 or more, got 0"),
    "true peers": ({"peers": True}, "peers must be a whole number, 1 or more, got True"),
    "half a peer": ({"peers": 1.5, "graph": topology.ring(4)}, "peers must be a whole number, .* got 1.5"),
    "late SGP": ({"max_staleness": 1}, "messages of sgp are never late; use 'osgp', or pass 0"),
    "late D-PSGD": ({"algorithm": "dpsgd", "max_staleness": 1}, "of dpsgd are never late"),
    "staleness": ({"algorithm": "osgp", "max_staleness": -1}, "max_staleness must be .* 0 or more, got -1"),
    "local steps": ({"algorithm": "adpsgd", "max_local_steps": 0}, "max_local_steps must be .* 1 or more, got 0"),
    "weights of a graph": ({"graph": "base", "weights": "metropolis"}, "'base' defines its own weights; omit mixing"),
    "weights of pairs": ({"graph": "base", "algorithm": "adpsgd"}, "'base' defines its own mixing weights, and adpsgd"),
    "a graph that keeps nothing": (
        {"graph": Topology("swap", 4, (TO_NEXT,), (dict.fromkeys(TO_NEXT, 1.0),))},
        r"W\[0, 0\] must be above 0, got 0: rank 0 would",
    ),
    "a graph that changes": (
        {"graph": "bipartite-exponential", "algorithm": "exact-diffusion"},
        "'bipartite-exponential' changes from step to step, and exact-diffusion needs .*: use 'ring', 'symm",
    ),
    "a directed graph": ({"graph": "ring-left", "algorithm": "exact-diffusion"}, "exact-diffusion needs a symmetric"),
    "hosts of exact diffusion": (
        {"algorithm": "exact-diffusion", "local_size": 2},
        "does not average hosts first; omit",
    ),
    "every": ({"gossip_every": 0}, "gossip_every must be a whole number of steps, 1 or more, got 0"),
    "every step of AD-PSGD": ({"algorithm": "adpsgd", "gossip_every": 2}, "adpsgd has another period; omit"),
    "every step of averages": ({"algorithm": "allreduce", "gossip_every": 2}, "allreduce average_every"),
    "average": ({"average_every": -1}, "average_every must be a whole number of steps, 0 or more, got -1"),
    "true average": ({"average_every": True}, "average_every must be .* got True"),
    "averages of AD-PSGD": ({"algorithm": "adpsgd", "average_every": 2}, r"call drain\(\) when an average is due"),
    "compression": ({"compression": "int4"}, "must be one of 'none', 'fp16', 'bf16', 'int8', got 'int4'"),
    "int8 of AD-PSGD": ({"algorithm": "adpsgd", "compression": "int8"}, "adpsgd has no fixed neighbours: use fp16"),
    "int8 of averages": (
        {"algorithm": "allreduce", "compression": "int8"},
        "averages over all ranks are not compressed",
    ),
    "fragments of SGP": ({"fragments": 2}, "sgp does not average the weights in parts; omit it, or use local"),
    "no fragments": ({"algorithm": "local", "fragments": 0}, "fragments must be a whole number, at least 1, got 0"),
    "many fragments": ({"algorithm": "local", "fragments": 9}, "fragments must be at most average_every, got 9 and 8"),
    "an outer rate of averages": ({"algorithm": "local", "outer_lr": 0.7}, "outer_lr: local has no outer"),
    "outer momentum of SGP": ({"outer_momentum": 0.5}, "outer_momentum: sgp has no outer optimizer; omit it, or"),
    "an outer rate": ({"algorithm": "slowmo", "outer_lr": 0.0}, "outer_lr must be a number, above 0, got 0.0"),
    "outer momentum": ({"algorithm": "diloco", "outer_momentum": 1}, "must be a number, at least 0 and below 1"),
    "hosts of NoLoCo": ({"algorithm": "noloco", "local_size": 2}, "noloco does not average hosts first; omit it, or"),
    "a graph of local SGD": ({"algorithm": "local", "graph": "ring"}, "local averages all ranks; omit it"),
    "directed D-PSGD": ({"algorithm": "dpsgd", "graph": "exponential"}, "dpsgd needs a symmetric graph: use 'bip.*sgp"),
    "directed AD-PSGD": ({"algorithm": "adpsgd", "graph": "ring-left"}, "gets no answer; adpsgd needs a symmetric"),
    "a directed matrix": ({"algorithm": "dpsgd", "weights": TURN, "size": 3}, "gets no answer; dpsgd needs a symm"),
    "uniform D-PSGD on a star": ({"algorithm": "dpsgd", "graph": "star"}, "every row must sum to 1; dpsgd .*metropol"),
    "lopsided": ({"algorithm": "dpsgd", "weights": LOPSIDED, "size": 3}, r"W\[0, 1\] = 0.2 and W\[1, 0\] = 0.3; dps"),
    "hosts of other sizes": ({"local_size": 3}, "3 ranks per host do not divide 4 ranks into hosts of equal size"),
    "empty hosts": ({"local_size": 0}, "0 ranks per host do not divide"),
    "hosts of averages": ({"algorithm": "allreduce", "local_size": 2}, "use sgp, osgp, dpsgd, adpsgd, local"),
    "a graph of ranks for hosts": ({"graph": topology.ring(4), "local_size": 2}, "one of 4 hosts, and there are 2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_with_a_hint(name):
    options, hint = REFUSED[name]
    with pytest.raises(ValueError, match=hint):
        make_plan(**{"size": 4, **options})  # type: ignore[arg-type]


def test_what_only_looks_wrong_is_taken():
    make_plan(1, peers=1)
    make_plan(2, "dpsgd", "star")  # regular at two ranks
    make_plan(4, "dpsgd", "star", weights="metropolis")
    make_plan(4, "sgp", "star")
    make_plan(3, "sgp", weights=LOPSIDED)
    make_plan(2, "adpsgd", networkx.Graph([(0, 1), (1, 1)]))
    np.testing.assert_allclose(make_plan(3, weights=np.full((3, 3), 1 / 3)).matrices[0].sum(axis=0), 1.0)


@pytest.mark.parametrize(
    ("size", "options", "most"),
    [
        (8, {"algorithm": "sgp"}, 1),
        (8, {"algorithm": "sgp", "peers": 3}, 3),
        (5, {"algorithm": "osgp", "graph": "star"}, 4),
        (6, {"algorithm": "adpsgd"}, 1),
        (1, {"algorithm": "sgp"}, 1),
        (8, {"algorithm": "sgp", "local_size": 2}, 0),
    ],
)
def test_the_most_messages_that_an_exchange_brings(size, options, most):
    plan = make_plan(size, **options)
    assert plan.max_received == most
    if most:
        assert all(len(plan.in_edges(place, step)) <= most for place in range(size) for step in range(1, 9))


def test_a_plan_of_very_many_ranks_has_no_matrix_of_all_pairs():
    """A dense one of 4,096 ranks takes 134 MB; bipartite-exponential has 12 phases."""
    tracemalloc.start()
    try:
        plan = make_plan(4096, "dpsgd")
        assert plan.moves(1)
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()
    assert plan.topology.period == len(plan.weights) == 12
    for each in plan.weights:
        mixing.check_doubly(each)


def test_each_algorithm_is_of_a_family():
    families = {family.name for family in registry.FAMILIES}
    assert {algorithm.family for algorithm in registry.ALGORITHMS.values()} == families
    assert all(name == algorithm.name for name, algorithm in registry.ALGORITHMS.items())
