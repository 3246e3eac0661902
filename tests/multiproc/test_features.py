"""Process sets at 4 ranks."""

from __future__ import annotations

import pytest
from launch import Job, RunJob
from settings import TORCH_4

pytestmark = pytest.mark.multiproc


@pytest.fixture
def features(job: RunJob) -> Job:
    """The job."""
    return job(TORCH_4)


def test_process_sets_average_over_their_ranks(features: Job) -> None:
    ranks = features.case("process sets")
    for rank in ranks:
        assert rank["held"] == 2
        assert rank["distance"] == 0.0
        for what in ("own", "every"):
            for weights, expected in zip(rank[what], rank[f"{what}_expected"], strict=True):
                assert weights == pytest.approx(expected, abs=1e-4), what
    assert ranks[0]["own"] == ranks[2]["own"] != ranks[1]["own"] == ranks[3]["own"]
    assert len({str(rank["every"]) for rank in ranks}) == 1


def test_rank_0s_state_of_an_outer_optimizer_is_sent_to_all(features: Job) -> None:
    for rank in features.case("resumed"):
        assert rank["again"] == rank["whole"]
        assert rank["began"] == rank["rounds"]


def test_a_rank_outside_the_process_set_steps_separately(features: Job) -> None:
    for index, rank in enumerate(features.case("process set of others")):
        assert (rank["last"], rank["rounds"], rank["distance"]) == (index, 3, 0.0)
        assert rank["own"] == rank["own_expected"]
