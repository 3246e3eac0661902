"""Process sets and pace by rounds at 4 ranks, in one job."""

from __future__ import annotations

import pytest
from launch import Job, RunJob
from settings import TORCH_4

pytestmark = pytest.mark.multiproc

ROUNDS = 40
STALENESS = 8


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


def test_a_rank_outside_the_process_set_steps_by_itself(features: Job) -> None:
    for index, rank in enumerate(features.case("process set of others")):
        assert (rank["last"], rank["rounds"], rank["distance"]) == (index, 3, 0.0)
        assert rank["own"] == rank["own_expected"]


@pytest.mark.parametrize("case", ["pace rounds", "pace steps"])
def test_every_pace_keeps_the_promises(features: Job, case: str) -> None:
    ranks = features.case(case)
    assert len({rank["weights"] for rank in ranks}) == 1
    produced = sum(rank["produced"] for rank in ranks)
    for rank in ranks:
        assert rank["produced"] == rank["steps"]
        assert rank["applied"] == rank["total"] == produced
        assert rank["rounds"] >= ROUNDS
        assert sum(rank["staleness"].values()) == rank["produced"]
        assert max(int(s) for s in rank["staleness"]) <= STALENESS


def test_a_slow_rank_holds_nobody_in_pace_rounds(features: Job) -> None:
    """It takes fewer steps than the others there, as many as they (but for those they may be ahead) in pace steps."""
    by_rounds, by_steps = ([rank["steps"] for rank in features.case(f"pace {name}")] for name in ("rounds", "steps"))
    print(f"{ROUNDS} rounds, rank 1 slower: {by_rounds} steps in pace rounds, {by_steps} in pace steps")
    slow, *others = by_rounds[1], by_rounds[0], *by_rounds[2:]
    assert slow <= ROUNDS / 4 + 1  # (each of its steps waits for four rounds of others, or one that is at its end)
    assert min(others) > 2 * slow
    assert max(int(s) for s in features.case("pace rounds")[1]["staleness"]) >= 3
    assert max(by_steps) - min(by_steps) <= STALENESS + 1
