"""Horovod scripts in which only the optimizer's wrapper was swapped, at 3 ranks (see ``jobs/torch_swap.py``)."""

from __future__ import annotations

import numpy as np
import pytest
from launch import Job, RunJob, same

pytestmark = pytest.mark.multiproc

FAMILIES = pytest.mark.parametrize("family", ["eager", "gossip", "leader", "centre"])


@pytest.fixture(scope="module")
def swapped(launched: RunJob) -> Job:
    """The one job that has all cases."""
    return launched("plain torch", "torch_swap.py", 3, timeout=240.0)


def test_the_job_ends_well_and_horovods_shutdown_drains(swapped: Job) -> None:
    assert same(swapped.check().case("end"), "weights")


@pytest.mark.parametrize(
    ("family", "kind"),
    [("eager", "momentum"), ("eager", "adam"), ("gossip", "adam"), ("leader", "momentum"), ("centre", "momentum")],
)
def test_a_script_runs_and_resumes(swapped: Job, family: str, kind: str) -> None:
    ranks = swapped.case(f"{family} {kind}")
    for key in ("fresh", "averages", "resumed", "end"):
        assert same(ranks, key), key
    assert ranks[0]["fresh"]["rates"] == [0.01, 0.01], "rank 0's"
    for metrics in ranks[0]["averages"]:
        assert metrics[:2] == metrics[2:], "with a name and without"
        assert metrics[0] == 1.0
    for rank in ranks:
        assert rank["middle"] == ranks[0]["middle"]
        assert rank["saved"]["weights"] == ranks[0]["saved"]["weights"] != rank["fresh"]["weights"]
        assert rank["resumed"] == ranks[0]["saved"]
        assert rank["last"] in range(3)
    assert ranks[0]["end"] != ranks[0]["resumed"]["weights"]


@FAMILIES
def test_torch_state_syncs_commits_and_restores(swapped: Job, family: str) -> None:
    ranks = swapped.case(f"elastic {family}")
    assert same(ranks, "synced")
    assert ranks[0]["synced"][-1] == 0
    for rank in ranks:
        assert rank["committed"][0] == ranks[0]["committed"][0] != rank["synced"][0]
        assert rank["committed"][-1] == 5
        assert rank["restored"] == rank["committed"]
    if family == "eager":
        assert same(ranks, "committed")
    assert same(ranks, "again")
    assert same(ranks, "end")


def test_collectives_without_a_name_go_through_while_ranks_are_at_different_steps(swapped: Job) -> None:
    for rank in swapped.case("unnamed"):
        assert rank["mean"] == [1.0, 1.0]
        assert rank["gradient"] == [1.0, 1.0]
        assert rank["rows"] == [0, 1, 1, 2, 2, 2]
        assert rank["broadcast"] == [[1.0, 1.0, 1.0], [1.0]]
    assert same(swapped.case("unnamed"), "weights")


def test_what_was_imported_by_name_before_works_or_names_the_import(swapped: Job) -> None:
    ranks = swapped.case("by name")
    for rank in ranks:
        assert rank["kind"] == "ReplicaStateError"
        assert "from hvd_async.torch import broadcast_optimizer_state" in rank["text"]
        assert rank["last"] in range(3)
    assert same(ranks, "weights"), "its join drained"


@pytest.mark.parametrize("kind", ["momentum", "sparse-adam"])
def test_sparse_gradients_train_as_with_horovods_optimizer(swapped: Job, kind: str) -> None:
    ranks = swapped.case(f"sparse {kind}")
    assert same(ranks, "ours")
    np.testing.assert_allclose(ranks[0]["ours"], ranks[0]["theirs"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("quorum", ["all", "solo"])
def test_the_calls_of_horovods_imagenet_example(swapped: Job, quorum: str) -> None:
    ranks = swapped.case(f"imagenet {quorum}")
    assert same(ranks, "second")
    first, second = ranks[0]["first"], ranks[0]["second"]
    assert (first[0], second[0]) == (0, 2)
    assert second[-1] == first[-1] > 0
