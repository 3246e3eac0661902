"""Process sets at 4 ranks."""

from __future__ import annotations

import pytest
from launch import RunJob
from settings import TORCH_4

pytestmark = pytest.mark.multiproc


def test_process_sets_average_over_their_ranks(job: RunJob) -> None:
    ranks = job(TORCH_4).case("process sets")
    for rank in ranks:
        assert (rank["held"], rank["distance"]) == (2, 0.0)
        for what in ("own", "every"):
            for weights, expected in zip(rank[what], rank[f"{what}_expected"], strict=True):
                assert weights == pytest.approx(expected, abs=1e-4), what
    assert ranks[0]["own"] == ranks[2]["own"] != ranks[1]["own"] == ranks[3]["own"]
    assert len({str(rank["every"]) for rank in ranks}) == 1


def test_a_rank_outside_the_process_set_steps_separately(job: RunJob) -> None:
    for index, rank in enumerate(job(TORCH_4).case("process set of others")):
        assert (rank["last"], rank["rounds"], rank["distance"]) == (index, 3, 0.0)
        assert rank["own"] == rank["own_expected"]
