"""Exact diffusion of ranks as threads: equal to the reference, kept by cuts, exact where ranks' data differ."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_async import mixing, topology
from hvd_async.algorithms.gossip.error_feedback import SavedState
from hvd_async.algorithms.gossip.exact_diffusion import ExactDiffusionWorker
from hvd_async.algorithms.gossip.message_format import NumpyMessageFormat
from hvd_async.algorithms.gossip.plan import make_plan
from hvd_async.runtime.lifecycle import local_engine
from hvd_async.testing import Cluster
from tests.conformance.cases import CASES
from tests.conformance.exact_diffusion_reference import exact_diffusion, published
from tests.conformance.gossip_reference import Problem, least_squares
from tests.conftest import examples
from tests.threads.gossip_workload import Job, check, check_sums, job, run

EXACT_DIFFUSION = "exact-diffusion"
GRAPHS = ["ring", "star", "mesh", "complete", "symmetric-exponential"]


class Quadratics(Job):
    """Job of ranks with quadratics of their own: each has its minimum and its curvatures."""

    @property
    def problem(self) -> Problem:
        curvature, centre = curvatures(self.size), centres(self.size)
        base = super().problem
        return dataclasses.replace(base, gradient=lambda z, rank, step: curvature[rank] * (z - centre[rank]))


def curvatures(size):
    return np.random.default_rng(3).uniform(0.2, 1.5, size=(size, 6))


def centres(size):
    return np.random.default_rng(5).normal(size=(size, 6))


def minimizer(size):
    """The minimum of the mean of all ranks' quadratics."""
    return (curvatures(size) * centres(size)).sum(axis=0) / curvatures(size).sum(axis=0)


def lazy(name, size):
    (weights,) = mixing.matrices(topology.named(name, size), "metropolis")
    return (weights + np.eye(size)) / 2


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("name", GRAPHS)
def test_edge_by_edge_is_as_published(name, case):
    problem = least_squares(6, case)
    one = exact_diffusion(problem, lazy(name, 6), [9] * 6)
    other = published(problem, lazy(name, 6), 9)
    np.testing.assert_allclose(one.path, other.path, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(one.x, other.x, rtol=1e-10, atol=1e-10)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    size = draw(st.integers(1, 6))
    counts = st.lists(st.integers(0, 9), min_size=size, max_size=size)
    return job(
        draw(st.lists(counts, min_size=1, max_size=3)),
        EXACT_DIFFUSION,
        draw(st.sampled_from(GRAPHS)),
        weights="metropolis",
        gossip_every=draw(st.integers(1, 4)),
        average_every=draw(st.sampled_from([0, 0, 3])),
        compression=draw(st.sampled_from(["none", "none", "bf16", "int8"])),
    )


@settings(max_examples=examples(60))
@given(jobs(), st.booleans())
def test_every_step_equals_the_reference_and_the_mean_is_kept(one, late):
    """Any rank that ends when, drains or cuts between."""
    check(one, run(one, jitter=0.002 * late))
    cut = dataclasses.replace(one, cuts=frozenset(range(len(one.steps) - 1)))
    check_sums(cut, run(cut, jitter=0.002 * late))


def test_it_converges_to_the_minimizer_of_the_mean_where_gossip_does_not():
    """At a constant learning rate, with local steps between the ones that send."""
    far = {}
    for algorithm in (EXACT_DIFFUSION, "dpsgd"):
        plan = job([1] * 5, algorithm, "ring", weights="metropolis", gossip_every=4).plan
        records = run(Quadratics(plan, ((700,) * 5,)))
        models = np.array([record.segments[0].path[-1] for record in records])
        far[algorithm] = np.abs(models - minimizer(5)).max()
    assert far[EXACT_DIFFUSION] < 2e-3
    assert far["dpsgd"] > 0.02 > 10 * far[EXACT_DIFFUSION]


def test_a_state_with_a_push_sum_weight_is_refused():
    saved = [record.saved[0] for record in run(job([5] * 3, "sgp", "star", cuts=frozenset({0})))]
    assert any(isinstance(each.kept, SavedState) and each.kept.weight != 1.0 for each in saved if each is not None)
    with pytest.raises(Exception, match=r"push-sum weight .*, which exact-diffusion does not support"):
        run(job([2] * 3, EXACT_DIFFUSION, "ring"), resumed=saved)


def test_ranks_continue_without_the_part_of_one_that_has_left():
    """Rank 1 leaves after a cut, with corrections on its edges; the others forget it, and find their own minimizer."""
    plan = make_plan(4, EXACT_DIFFUSION, "ring", gossip_every=3)
    curvature, centre = curvatures(4), centres(4)

    def train(number: int) -> Any:
        engine, model = local_engine(), {"z": np.zeros(6)}
        assert engine is not None
        post = NumpyMessageFormat(6, np.float64, "none", plan.max_messages, None)
        worker = ExactDiffusionWorker(
            engine, plan, post, lambda flush: model.update(z=worker.gather(model["z"], flush))
        )
        worker.begin(model["z"] + 0)
        worker.connect(["w"], [0])
        for steps in (7, 900):
            for _ in range(steps):
                z = model["z"]
                model["z"] = worker.mix(z + 0, z - 0.3 * curvature[number] * (z - centre[number]))
                worker.publish(model["z"])
            engine.drain(False)
            if number == 1:
                worker.delete()
                return None
        return model["z"]

    found = [z for z in Cluster(4).run(train) if z is not None]
    rest = [0, 2, 3]
    expected = (curvature[rest] * centre[rest]).sum(axis=0) / curvature[rest].sum(axis=0)
    np.testing.assert_allclose(found, np.tile(expected, (3, 1)), rtol=0, atol=1e-6)
