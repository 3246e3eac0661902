"""Leaders under ``horovodrun``: both frameworks against the float64 reference, at 2, 3 and 4 ranks, Gloo and MPI."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from jobs.leader_table import STEPS, cases
from launch import PLANE, RunJob
from settings import TENSORFLOW, TORCH, TORCH_4, Setting, having
from test_gossip import check_after_cut

from tests.conformance import gossip_reference
from tests.conformance.cases import CASES
from tests.conformance.leader_reference import Following, replay

pytestmark = pytest.mark.multiproc

CASE = next(case for case in CASES if case.name == "nesterov")
GROUPED = (TORCH_4, TENSORFLOW)
"""With process sets."""
EACH = [
    pytest.param(setting, name, id=f"{setting}-{name}")
    for setting in having("leaders")
    for name in cases(setting.ranks, setting.sets)
]


def logged(entries: list[Any]) -> list[Any]:
    """A rank's log again, of what JSON has made of it."""
    return [[*entry[:2], dict(map(tuple, entry[2]))] if entry[0] == "taken" else entry for entry in entries]


@pytest.mark.parametrize(("setting", "name"), EACH)
def test_every_case_equals_the_reference(job: RunJob, setting: Setting, name: str) -> None:
    ranks, following = setting.case(job, name), cases(setting.ranks, setting.sets)[name]
    problem = gossip_reference.least_squares(len(ranks), CASE, setting.reference)
    outcome = replay(problem, following, [logged(rank["log"]) for rank in ranks])
    np.testing.assert_allclose(
        [rank["before"] for rank in ranks], [path[-1] for path in outcome.path], rtol=0, atol=1e-5
    )
    check_ends(ranks, following)
    np.testing.assert_allclose(ranks[0]["drained"], outcome.drained[-1], rtol=0, atol=1e-5)


def check_ends(ranks: list[dict[str, Any]], following: Following) -> None:
    """Check a job: a drain leaves the consensus; pulls came about as often as they were due."""
    check_after_cut(ranks)
    for number, rank in enumerate(ranks):
        assert rank["own"] == rank["before"]
        assert rank["drained"] == rank["consensus"]
        assert 1 <= rank["pulls"] <= 2 * following.pulls(number, STEPS)
        assert set(rank["led"]) <= ({-1} if following.algorithm == "easgd" else set(range(len(ranks))))
    if following.algorithm == "lsgd":
        assert ranks[0]["drained"] in [rank["before"] for rank in ranks]


@pytest.mark.parametrize("setting", GROUPED, ids=str)
def test_pulls_continue_while_a_rank_sleeps(job: RunJob, setting: Setting) -> None:
    """Rank 1 is pulled while it takes no step, and no rank has waited for it."""
    ranks = setting.case(job, "asleep")
    assert ranks[1]["pulls"] >= 1
    assert all(0 in rank["led"] for rank in ranks)
    assert all(rank["waits"] == 0.0 for rank in ranks)


@pytest.mark.skipif(PLANE == "torch", reason="without Horovod process sets can always be added")
def test_a_group_without_a_process_set_is_refused_with_a_hint(job: RunJob) -> None:
    for rank in TORCH.case(job, "no process sets"):
        assert "hvd.init(process_sets=" in rank["error"]


@pytest.mark.parametrize("setting", [TENSORFLOW], ids=str)
def test_fit_trains_and_ends_alike(job: RunJob, setting: Setting) -> None:
    ranks = setting.case(job, "fitted lsgd")
    for rank in ranks:
        assert rank["weights"] == ranks[0]["weights"]
        assert (rank["loss"], rank["val"]) == (ranks[0]["loss"], ranks[0]["val"])
        assert rank["loss"][-1] < 0.5 * rank["loss"][0]
        assert (rank["steps"], rank["pulls"] > 4, rank["mean_loss"] > 0) == (32, True, True)
