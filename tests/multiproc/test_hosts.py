"""Partial allreduce host by host at 4 ranks, two hosts of two, in both frameworks."""

from __future__ import annotations

import pytest
from launch import RunJob
from settings import TENSORFLOW_4, TORCH_4, TORCHRUN_4, Setting

pytestmark = [pytest.mark.multiproc, pytest.mark.parametrize("setting", [TORCH_4, TENSORFLOW_4, TORCHRUN_4], ids=str)]


def test_a_late_hosts_gradients_go_together(job: RunJob, setting: Setting) -> None:
    ranks = setting.case(job, "late host")
    for rank in ranks:
        assert rank["weights"] == rank["expected"]
        assert (rank["applied"], rank["distance"]) == (12, 0.0)
        assert rank["contributors"] == [[0, 1], [2, 3]], "three rounds of host 0, and the drain's"
    for rank in ranks[:2]:
        assert rank["staleness"] == {"0": 3}
    for rank in ranks[2:]:
        assert rank["staleness"] == ranks[2]["staleness"], "the ranks of a host computed with different weights"
        assert max(int(stale) for stale in rank["staleness"]) == 3


@pytest.mark.parametrize("case", ["solo steps", "majority steps", "2 steps", "solo rounds"])
def test_uneven_batches_inside_hosts_lose_nothing(job: RunJob, setting: Setting, case: str) -> None:
    ranks = setting.case(job, f"hosts {case}")
    for rank in ranks:
        assert rank["weights"] == rank["expected"]
        assert rank["applied"] == rank["total"] == sum(each["own"] for each in ranks)
        assert sum(rank["staleness"].values()) == rank["own"]
        assert max(int(stale) for stale in rank["staleness"]) <= 4


def test_hosts_that_cannot_be_are_refused_before_anything_is_done(job: RunJob, setting: Setting) -> None:
    for rank in setting.case(job, "refused 1"):
        assert "3 ranks per host do not divide 4 ranks into hosts of equal size" in str(rank)
    for rank in setting.case(job, "refused 2"):
        assert "a number of hosts from 1 to 2" in str(rank)


def test_these_jobs_went_by_way_of_a_relay_and_a_coordinator_of_its_own(job: RunJob, setting: Setting) -> None:
    roles = [rank["roles"] for rank in setting.case(job, "control processes")]
    assert roles == [["coordinator"], [], ["relay"], []]
