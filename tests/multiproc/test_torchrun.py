"""Jobs without Horovod, under ``torchrun`` and without a launcher: deaths are named, nobody hangs, ends are clean."""

from __future__ import annotations

import re

import pytest
from launch import RunJob, run_job
from test_ends import MANNERS, check_error, ends

pytestmark = pytest.mark.multiproc


@pytest.mark.parametrize(("manner", "victim"), [("sigkill", 1), ("sigkill", 0), ("exception", 2)])
def test_a_death_under_torchrun_ends_the_job_and_is_named(manner: str, victim: int) -> None:
    job = run_job("ends.py", 3, transport="torch", args=ends("torch", manner, victim)).check_clean()
    assert job.returncode not in (0, None), str(job)
    if manner == "sigkill":
        assert re.search(rf"rank +: {victim} .*\n +exitcode +: -9 ", job.output), str(job)
    else:  # (torchrun may see first that another rank has ended on its error)
        assert re.search(rf"HorovodInternalError: rank {victim} on host \S+ failed: RuntimeError: boom", job.output)


@pytest.mark.parametrize(("manner", "victim"), [("sigkill", 1), ("sigkill", 0), ("exception", 1), ("exit0", 1)])
def test_a_death_without_launcher_raises_at_the_others(forked: RunJob, manner: str, victim: int) -> None:
    job = forked("torch", "ends.py", 3, transport="torch", args=ends("torch", manner, victim)).check_clean()
    for survivor in {0, 1, 2} - {victim}:
        assert job.returncodes[survivor] == 1, str(job)
        said = "died" if victim == 0 else re.escape(MANNERS[manner])
        check_error(job.results[survivor]["error"], rf"rank {victim} on host localhost {said}")


@pytest.mark.parametrize("manner", ["falls off", "sysexit0", "early"])
def test_normal_ends(forked: RunJob, manner: str) -> None:
    job = forked("torch", "ends.py", 2, transport="torch", args=ends("torch", manner)).check()
    assert "hvd_async" not in job.output, str(job)
    for rank, final in enumerate(job.case("exit")):
        if rank != 1 or manner != "early":
            assert final["weights"] == final["expected"], f"rank {rank}"
