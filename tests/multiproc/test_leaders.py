"""Leaders under ``horovodrun``: both frameworks against the float64 reference, at 2, 3 and 4 ranks, Gloo and MPI."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from jobs.leader_table import PULLS, STEPS, cases
from launch import Job, RunJob

from tests.conformance import gossip_reference
from tests.conformance.cases import CASES
from tests.conformance.leader_reference import Following, replay

pytestmark = pytest.mark.multiproc

CASE = next(case for case in CASES if case.name == "nesterov")
Setting = tuple[str, int, str, tuple[str, ...]]
TORCH: Setting = ("torch_leader.py", 4, "gloo", ())
TENSORFLOW: Setting = ("tf_leader.py", 4, "gloo", ())
SETTINGS = (TORCH, TENSORFLOW)
FEW_SETTINGS: tuple[Setting, ...] = (
    ("torch_leader.py", 3, "gloo", ("--cases", "few", "--sets", "none")),
    ("torch_leader.py", 2, "mpi", ("--cases", "few")),
    ("tf_leader.py", 2, "mpi", ("--cases", "few")),
)
EACH = [(setting, name) for setting in (*SETTINGS, *FEW_SETTINGS) for name in cases(setting[1])]


def ident(value: Any) -> str | None:
    """How a parameter shows in a test's name."""
    return f"{value[0].partition('_')[0]}-{value[1]}-{value[2]}" if isinstance(value, tuple) else None


def run(job: RunJob, setting: Setting) -> Job:
    """The job of a setting."""
    script, ranks, transport, args = setting
    return job(script, ranks, transport, args, timeout=300.0)


def logged(entries: list[Any]) -> list[Any]:
    """A rank's log again, of what JSON has made of it."""
    return [[*entry[:2], dict(map(tuple, entry[2]))] if entry[0] == "taken" else entry for entry in entries]


@pytest.mark.parametrize("setting", [*SETTINGS, *FEW_SETTINGS], ids=ident)
def test_the_job_ends_well(job: RunJob, setting: Setting) -> None:
    run(job, setting).check().case("end")


@pytest.mark.parametrize(("setting", "name"), EACH, ids=ident)
def test_every_case_equals_the_reference(job: RunJob, setting: Setting, name: str) -> None:
    ranks, following = run(job, setting).case(name), cases(setting[1])[name]
    problem = gossip_reference.least_squares(
        len(ranks), CASE, "torch" if setting[0].startswith("torch") else "keras"
    )  # fmt: skip
    outcome = replay(problem, following, [logged(rank["log"]) for rank in ranks])
    np.testing.assert_allclose(
        [rank["before"] for rank in ranks], [path[-1] for path in outcome.path], rtol=0, atol=1e-5
    )
    check_ends(ranks, following)
    np.testing.assert_allclose(ranks[0]["drained"], outcome.drained[-1], rtol=0, atol=1e-5)


def check_ends(ranks: list[dict[str, Any]], following: Following) -> None:
    """What holds for all: consensus, distance and drain agree; pulls came about as often as they were due."""
    own = np.array([rank["before"] for rank in ranks])
    apart = np.sqrt(((own - own.mean(axis=0)) ** 2).sum(axis=1).mean())
    for number, rank in enumerate(ranks):
        assert rank["back"] == rank["before"]
        assert rank["drained"] == rank["consensus"] == ranks[0]["drained"]
        assert rank["distance"] == pytest.approx(apart, abs=1e-6)
        assert 1 <= rank["pulls"] <= 2 * following.pulls(number, STEPS)
        assert set(rank["led"]) <= ({-1} if following.algorithm == "easgd" else set(range(len(ranks))))
    if following.algorithm == "lsgd":
        assert ranks[0]["drained"] in [rank["before"] for rank in ranks]


@pytest.mark.parametrize("setting", SETTINGS, ids=ident)
def test_pulls_go_on_while_a_rank_sleeps(job: RunJob, setting: Setting) -> None:
    """Rank 1 wakes to the pulls of the time that it slept, and nobody has waited for it."""
    ranks = run(job, setting).case("asleep")
    assert ranks[1]["pulls"] >= PULLS
    assert all(0 in rank["led"] for rank in ranks)
    assert all(rank["waits"] == 0.0 for rank in ranks)


@pytest.mark.parametrize("setting", SETTINGS, ids=ident)
def test_what_was_saved_after_a_cut_goes_on_as_it_would_have(job: RunJob, setting: Setting) -> None:
    for rank in run(job, setting).case("resumed"):
        assert rank["again"] == rank["straight"]
        assert rank["ends"][0] == rank["ends"][1]


@pytest.mark.parametrize("setting", SETTINGS, ids=ident)
def test_what_cannot_be_is_refused_on_every_rank(job: RunJob, setting: Setting) -> None:
    for rank in run(job, setting).case("refused"):
        errors = rank["errors"]
        assert "global_period=0" in errors["period"]
        assert "local_period=5 is above global_period=4" in errors["local above global"]
        assert "do not divide 4 ranks" in errors["does not divide"]
        assert "global_pull" in errors["strength"]
        assert "lsgd has no use for it" in errors["not lsgd's"]
        assert "wrapped their optimizers differently" in errors["different"]
        assert "rank 0 has the groups [[0, 1], [2, 3]], rank 1 has [[0, 1, 2, 3]]" in errors["groups"]
        assert "record_loss(loss)" in errors["silent"]


def test_a_group_without_a_process_set_is_refused_with_a_hint(job: RunJob) -> None:
    for rank in run(job, FEW_SETTINGS[0]).case("no process sets"):
        assert "hvd.init(process_sets=" in rank["error"]


@pytest.mark.parametrize("setting", [TENSORFLOW, FEW_SETTINGS[2]], ids=ident)
@pytest.mark.parametrize("algorithm", ["lsgd", "easgd"])
def test_fit_trains_and_ends_alike(job: RunJob, setting: Setting, algorithm: str) -> None:
    ranks = run(job, setting).case(f"fitted {algorithm}")
    for rank in ranks:
        assert rank["ends"] == ranks[0]["ends"]
        assert (rank["loss"], rank["val"]) == (ranks[0]["loss"], ranks[0]["val"])
        assert rank["loss"][-1] < 0.5 * rank["loss"][0]
        assert (rank["steps"], rank["pulls"] > 4, rank["mean_loss"] > 0) == (32, True, True)
