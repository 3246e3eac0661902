"""NoLoCo of ranks as threads: equal to the reference, kept by cuts; what it is for special constants."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_async import mixing, topology
from hvd_async.algorithms.gossip.plan import make_plan
from tests.conformance.gossip_reference import least_squares, sgp
from tests.conformance.noloco_reference import noloco
from tests.conftest import examples
from tests.threads.gossip_workload import EXACT, MOMENTUM, Job, check_replay, job, run

GRAPHS = ["random-pairs", "bipartite-exponential", "ring", "star", "base"]


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    size = draw(st.integers(1, 6))
    counts = st.lists(st.integers(0, 9), min_size=size, max_size=size)
    graph = draw(st.sampled_from(GRAPHS))
    return job(
        draw(st.lists(counts, min_size=1, max_size=3)),
        "noloco",
        graph,
        weights="metropolis" if graph == "star" else "uniform",
        gossip_every=draw(st.integers(1, 4)),
        outer_lr=draw(st.sampled_from([0.7, 1.0])),
        outer_momentum=draw(st.sampled_from([0.0, 0.3, 0.5])),
        compression=draw(st.sampled_from(["none", "none", "bf16"])),
    )


@settings(max_examples=examples(60))
@given(jobs(), st.booleans())
def test_every_step_equals_the_reference(one, late):
    """Whoever ends when; a drain leaves all at the mean, and each period of a rank sends one message a neighbour."""
    records = run(one, jitter=0.002 * late)
    check_replay(one, records)
    for end in range(len(one.steps)):
        assert len({record.segments[end].z.tobytes() for record in records}) == 1
    stats = [record.stats for record in records]
    assert sum(own.messages_sent for own in stats) == sum(own.messages_taken + own.messages_left for own in stats)


@pytest.mark.parametrize("size", [4, 5])
def test_without_momentum_and_damping_it_is_gossip_of_pairs(size):
    """beta = 1, alpha = 0: phi_i becomes the mean of the pair's theta, as in SGP each so many steps."""
    problem, matrices = least_squares(size, MOMENTUM), mixing.matrices(topology.random_pairs(size), "uniform")
    config = make_plan(size, "noloco", gossip_every=3, outer_lr=1.0, outer_momentum=0.0).config
    one, other = noloco(problem, matrices, [12] * size, config), sgp(problem, matrices, 12, every=3)
    np.testing.assert_allclose(one.path, other.path, **EXACT)


def test_the_mean_of_the_slow_weights_moves_as_under_one_outer_optimizer():
    """By heavy-ball momentum on the mean of what the ranks have learned; whoever is paired with whom."""
    size, every, lr, momentum = 6, 2, 0.7, 0.3
    one = job([12] * size, "noloco", "random-pairs", gossip_every=every, outer_lr=lr, outer_momentum=momentum)
    paths = np.array([record.segments[0].path for record in run(one)])
    learned = dict[int, np.ndarray]()
    problem = one.problem
    outcome = noloco(problem, one.plan.matrices, [12] * size, one.plan.config)
    np.testing.assert_allclose(paths, outcome.path, rtol=1e-10, atol=1e-10)
    phi = problem.start.mean(axis=0)
    delta = np.zeros_like(phi)
    for outer in range(6):
        last = paths[:, outer * every + every - 2]  # (the step before the outer one; its own update is repeated here)
        before = noloco(problem, one.plan.matrices, [outer * every + every - 1] * size, one.plan.config)
        theta = [
            problem.update(last[rank], problem.gradient(last[rank], rank, (outer + 1) * every), before.states[rank])[0]
            for rank in range(size)
        ]
        learned[outer] = np.mean(theta, axis=0) - phi
        delta = momentum * delta + lr * learned[outer]
        phi = phi + delta
        np.testing.assert_allclose(paths[:, outer * every + every - 1].mean(axis=0), phi, rtol=1e-10, atol=1e-10)
