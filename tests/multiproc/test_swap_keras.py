"""Horovod scripts for Keras in which the optimizer's wrapper alone became ours, at 3 ranks: one job, several cases."""

from __future__ import annotations

import pytest
from launch import Job, RunJob, same

pytestmark = pytest.mark.multiproc


@pytest.fixture(scope="module")
def swapped(forked: RunJob) -> Job:
    """The one job that has all cases."""
    return forked("plain tensorflow", "tf_swap.py", 3)


def test_the_job_ends_by_horovods_own_shutdown(swapped: Job) -> None:
    assert len(swapped.check().case("end")) == 3, "every rank got past hvd.shutdown()"


def test_a_benchmark_runs_with_horovods_collectives_and_join(swapped: Job) -> None:
    ranks = swapped.case("speed")
    assert same(ranks, "weights")
    for rank in ranks:
        assert rank["applied"] == 3 * 12 + 1 + 2
        assert rank["received"] == ["from", 2]
        assert rank["mean"] == pytest.approx(sum(rank["everyone"]) / 3, rel=1e-5)
        assert rank["last"] in range(3)


def test_keras_may_number_optimizers_differently_on_each_rank(swapped: Job) -> None:
    ranks = swapped.case("numbered names")
    assert [rank["name"] for rank in ranks] == ["sgd_2", "sgd", "sgd"]
    assert same(ranks, "weights")


def test_a_broadcast_of_different_variables_is_refused_on_every_rank(swapped: Job) -> None:
    for rank in swapped.case("different variables"):
        assert rank["kind"] == "ReplicaMismatchError"
        assert "rank 1 of them has 4, and rank 0 has 4; first at place 0" in rank["text"]
