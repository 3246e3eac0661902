"""Keras' ``fit()`` on real ranks under ``quorum="all"``, where Horovod's ops in the graph sum the gradients."""

from __future__ import annotations

import re

import numpy as np
import pytest
from launch import Job, RunJob

from hvd_async.runtime.engine import IN_GRAPH

pytestmark = pytest.mark.multiproc

WITHOUT = 1
"""Gradients that rank 1 had not, for a NaN."""


@pytest.fixture(scope="module")
def graph_steps(forked: RunJob) -> Job:
    """The job: 3 ranks."""
    return forked("tensorflow", "tf_graph_steps.py", 3, timeout=300.0).check_clean()


@pytest.mark.parametrize("case", ["graph", "own rates", "fp16", "bf16", "loss scale", "confirmed"])
def test_uneven_data_a_drain_and_a_nan_leave_replicas_identical(graph_steps: Job, case: str) -> None:
    results = graph_steps.case(case)
    assert len({one["end"] for one in results}) == 1
    batches = [one["batches"] for one in results]
    assert len(set(batches)) == 3
    gradients = sum(batches) - WITHOUT
    for rank, one in enumerate(results):
        assert (one["produced"], one["applied"]) == (gradients, gradients)
        assert one["rounds"] == max(batches)
        assert one["skipped"] == (WITHOUT if rank == 1 else 0)
        assert one["staleness"] == {"0": batches[rank] - (rank == 1)}
        assert bool(one["in_graph"]) == (case != "confirmed")
        shared = dict(results[0]["history"])
        assert all(shared[rounds] == weights for rounds, weights in one["history"]), "replicas differ in between"


def difference(job: Job, one: str, other: str) -> float:
    first, second = (np.array(job.case(case)[0]["weights"]) for case in (one, other))
    return float(np.abs(first - second).max())


def test_the_graph_and_the_engine_give_the_same_numbers(graph_steps: Job) -> None:
    assert difference(graph_steps, "graph", "confirmed") < 1e-6
    assert difference(graph_steps, "loss scale", "confirmed") < 1e-6
    assert 0 < difference(graph_steps, "fp16", "confirmed") < 1e-2
    assert 0 < difference(graph_steps, "bf16", "confirmed") < 1e-1


def test_the_graph_gives_the_numbers_of_horovods_tape(graph_steps: Job) -> None:
    assert max(one["difference"] for one in graph_steps.case("horovod")) < 1e-6


def test_a_rank_that_dies_in_fit_is_named_in_the_next_call(forked: RunJob) -> None:
    job = forked("tensorflow", "tf_graph_steps.py", 3, args=("--killed", "2"), timeout=120.0).check_clean()
    for survivor in (0, 1):
        of_fit, of_drain = job.results[survivor]["errors"]["errors"]
        is_known = re.search("rank 2 on host .* died", of_fit["text"])  # (the coordinator was first to say so)
        assert is_known or IN_GRAPH in of_fit["text"], "an uncaught error would name this rank to the others"
        assert of_drain["kind"] == "HorovodInternalError", str(job)
        assert re.match("rank 2 on host .* died", of_drain["text"]), str(job)
