"""Deaths, slowness and normal ends, with Horovod and without: what ranks report and how soon; no process is left."""

from __future__ import annotations

import re
import socket

import pytest
from launch import Job, RunJob

from tests.conftest import LONG_RUN

pytestmark = pytest.mark.multiproc

MANNERS = {
    "sigkill": "died: its connection to the coordinator ended without a goodbye",
    "exit1": "failed: sys.exit(1)",
    "builtin exit": "failed: sys.exit(1)",
    "interrupt": "failed: KeyboardInterrupt: ",
    "sigterm": "died: its connection to the coordinator ended without a goodbye",
    "forked, sigkill": "died: its connection to the coordinator ended without a goodbye",
    "exception": "failed: RuntimeError: boom",
    "exit0": "died: its connection to the coordinator ended without a goodbye",
}
ALIKE = ("builtin exit", "sigterm")
"""Manners that a long run tries: they differ from another in who ends the process (``unit/test_exit_status``)."""
TORCH, TENSORFLOW, BARE = ("torch", ""), ("tensorflow", ""), ("torch", "torch")
"""A framework and its transport, "" for the usual one; the last is torch without Horovod."""
PROMISED = 60.0
"""Seconds within which a death must be reported; seen: far under one."""
HELD = 15.0
"""The same where a forked child holds on for 20 s, or until it is reported: the dead rank's connection must end."""


def ends(framework: str, manner: str, victim: int = 1, quorum: str = "solo") -> tuple[str, ...]:
    return ("--framework", framework, "--manner", manner, "--victim", str(victim), "--quorum", quorum)


def delay(job: Job, victim: int) -> float:
    """Seconds from the victim's last sign to the last survivor's error."""
    death = job.results[victim]["death"]["at"]
    return max(cases["error"]["at"] - death for rank, cases in enumerate(job.results) if rank != victim)


@pytest.mark.parametrize(
    ("framework", "manner", "quorum"),
    [
        ("torch", "exception", "solo"),
        ("torch", "exit0", "solo"),
        *([("tensorflow", "sigkill", "all")] if LONG_RUN else []),
    ],
)
def test_a_death_under_horovodrun_is_reported_by_rank_0(
    launched: RunJob, framework: str, manner: str, quorum: str
) -> None:
    job = launched(framework, "ends.py", 2, args=ends(framework, manner, quorum=quorum)).check_clean()
    assert job.returncode not in (0, None), str(job)
    said = [line for line in job.output.splitlines() if line.startswith("[0]<stderr>") and "hvd_async: " in line]
    assert any(f"rank 1 on host localhost {MANNERS[manner]}" in line for line in said), str(job)
    # (The survivor is killed 40 ms after the death, so it may not get as far as writing its own result.)


LIFETIMES = ("200", "50", "50") if LONG_RUN else ("8", "3", "3")
"""Optimizers, switches, and cycles of init and shutdown."""
POINTS = ("init", "registration", "step", "backward", "waiting", "drain", "checkpoint", "end")
DEATHS = [
    (launcher, point, victim)
    for launcher in ("", "torchrun")
    for number, point in enumerate(POINTS)
    for victim in (0, 1)
    if LONG_RUN or (victim == number % 2 and (not launcher or number % 3 == 0))
]
"""Launcher of a job, point at which a rank is killed, and that rank: every day each point once."""


@pytest.mark.parametrize(("launcher", "point", "victim"), DEATHS)
def test_a_death_at_any_point_without_horovod_is_named(
    forked: RunJob, launched: RunJob, launcher: str, point: str, victim: int
) -> None:
    args = (*ends("torch", "sigkill", victim, "all" if point == "waiting" else "solo"), "--point", point)
    env = {"HVD_ASYNC_INIT_TIMEOUT": "3"} if point == "init" else {}
    run = launched if launcher else forked
    job = run("torch", "ends.py", 3, transport="torch", args=args, env=env, timeout=PROMISED).check_clean()
    assert job.returncode not in (0, None), str(job)
    if launcher:  # (it stops the others, who may not have said anything yet)
        assert re.search(rf"rank +: {victim} .*\n +exitcode +: -9 ", job.output), str(job)
        return
    for survivor in {0, 1, 2} - {victim}:
        assert job.returncodes[survivor] == 1, str(job)
        assert re.search(rf"(Collective|HorovodInternal)Error: .*\brank {victim}\b", job.outputs[survivor]), str(job)


def check_error(error: dict[str, str], said: str) -> None:
    """A survivor's error is Horovod's own, so that elastic can act, and says what is known."""
    assert error["kind"] in ("HorovodInternalError", "CollectiveError"), error
    assert re.search(f"^{said}", error["text"]), error


@pytest.mark.parametrize(
    ("where", "manner", "victim", "ranks"),
    [
        *((TORCH, manner, 1, 3 if manner == "sigkill" else 2) for manner in MANNERS if LONG_RUN or manner not in ALIKE),
        (TORCH, "sigkill", 0, 3),
        (TENSORFLOW, "sigkill", 1, 2),
        *([(TENSORFLOW, "exception", 1, 2), (TENSORFLOW, "sigkill", 0, 2)] if LONG_RUN else []),
        (BARE, "exit0", 1, 2),
        (BARE, "exception", 1, 3),
    ],
    ids=str,
)
def test_a_death_without_launcher_raises_at_the_others(
    forked: RunJob, where: tuple[str, str], manner: str, victim: int, ranks: int
) -> None:
    framework, transport = where
    job = forked(framework, "ends.py", ranks, transport=transport, args=ends(framework, manner, victim)).check_clean()
    assert job.returncode is not None, str(job)
    host = "localhost" if victim else rf"(localhost|{re.escape(socket.gethostname())})"
    how = re.escape(MANNERS[manner]) if victim else "died"
    if victim:
        assert f"hvd_async: rank 1 on host localhost {MANNERS[manner]}" in job.outputs[0], str(job)
    for survivor in set(range(ranks)) - {victim}:
        assert job.returncodes[survivor] == 1, str(job)
        check_error(job.results[survivor]["error"], f"rank {victim} on host {host} {how}")
    assert delay(job, victim) < (PROMISED if manner != "forked, sigkill" else HELD)


@pytest.mark.parametrize(
    ("transport", "point", "manner", "victim"),
    [
        ("torch", "call", "sigkill", 0),
        ("torch", "call", "forked, sigkill", 1),
        ("torch", "call before", "sigkill", 1),
        ("torch", "call before", "forked, sigkill", 0),
        ("", "call", "forked, sigkill", 0),
    ],
)
def test_a_death_during_a_collective_of_the_script_is_named(
    forked: RunJob, transport: str, point: str, manner: str, victim: int
) -> None:
    args = (*ends("torch", manner, victim), "--point", point)
    job = forked("torch", "ends.py", 3, transport=transport, args=args, timeout=PROMISED).check_clean()
    for survivor in {0, 1, 2} - {victim}:
        check_error(job.results[survivor]["error"], rf"rank {victim} on host \S+ (died|has ended)")
        assert "RankLostError" in job.outputs[survivor], str(job)


def test_tensorflows_own_collectives_end_with_a_lost_rank(forked: RunJob) -> None:
    """Though a forked child of it lives. Horovod's error names no rank; this library does, on rank 0."""
    args = (*ends("tensorflow", "forked, sigkill"), "--point", "call")
    job = forked("tensorflow", "ends.py", 3, args=args, timeout=PROMISED).check_clean()
    assert "hvd_async: rank 1 on host localhost died" in job.outputs[0], str(job)
    assert delay(job, 1) < HELD


def check_served_by_a_process(job: Job) -> None:
    """The coordinator had a process in addition to rank 0, which has ended; there were no relays."""
    assert [rank["serves"] for rank in job.check_clean().case("first step")] == [["coordinator"], []], str(job)


@pytest.mark.parametrize(
    ("framework", "manner"),
    [("torch", "sigkill"), *([("torch", "falls off"), ("tensorflow", "early")] if LONG_RUN else [])],
)
def test_a_coordinator_with_gpus_ends_under_horovodrun(launched: RunJob, framework: str, manner: str) -> None:
    job = launched(framework, "ends.py", 2, args=(*ends(framework, manner), "--on-gpu"))
    check_served_by_a_process(job)
    if manner == "sigkill":
        assert job.returncode not in (0, None), str(job)
        assert f"hvd_async: rank 1 on host localhost {MANNERS[manner]}" in job.output, str(job)
    else:
        final = job.check().case("exit")[0]
        assert final["weights"] == final["expected"], str(job)


GPU_ENDS = [("sigkill", 0), ("sigkill", 1), ("exception", 0), ("early", 0)]
if LONG_RUN:
    GPU_ENDS += [("interrupt", 1), ("fork", 1), ("exit0", 0), ("exit0", 1), ("exception", 1), ("interrupt", 0)]
    GPU_ENDS += [("sysexit0", 1), ("drop", 1), ("unequal", 1)]


@pytest.mark.parametrize(("manner", "victim"), GPU_ENDS)
def test_a_coordinator_with_gpus_ends_as_ranks_do(forked: RunJob, manner: str, victim: int) -> None:
    """And outlives its own rank, to report how it ended."""
    job = forked("torch", "ends.py", 2, args=(*ends("torch", manner, victim), "--on-gpu"))
    check_served_by_a_process(job)
    if manner in MANNERS:
        survivor = 1 - victim
        assert job.returncodes[survivor] == 1, str(job)
        check_error(job.results[survivor]["error"], f"rank {victim} on host .* {re.escape(MANNERS[manner])}")
    else:
        job.check()


def test_a_slow_rank_is_only_warned_about_by_name(forked: RunJob) -> None:
    job = forked("torch", "ends.py", 2, args=ends("torch", "slow"), env={"HVD_ASYNC_WARN_AFTER": "0.6"}).check()
    host = re.escape(socket.gethostname())
    said = [line for line in job.outputs[0].splitlines() if "hvd_async: " in line]
    warnings = [line for line in said if "for others to begin" not in line]  # (imports may take longer than a second)
    assert len(warnings) >= 2, str(job)
    assert "has waited" not in job.outputs[1], "rank 0 says it, once for all"
    assert all(re.search(rf"has waited 1 s more for rank\(s\) 1 \((localhost|{host})\): alive", w) for w in warnings)
    for rank in job.case("exit"):
        assert rank["weights"] == rank["expected"]


@pytest.mark.parametrize(
    ("where", "manner"),
    [
        *((TORCH, manner) for manner in ("falls off", "sysexit0", "drop", "early", "unequal")),
        (TENSORFLOW, "falls off"),
        (BARE, "early"),
        *([(TENSORFLOW, "early"), (BARE, "falls off")] if LONG_RUN else []),
    ],
    ids=str,
)
def test_a_normal_end_drains_automatically_and_soon(forked: RunJob, where: tuple[str, str], manner: str) -> None:
    """A rank that has left is done for good: others continue without it, and drain as often as they like."""
    framework, transport = where
    job = forked(framework, "ends.py", 2, transport=transport, args=ends(framework, manner)).check()
    said = ["was deleted after steps and without drain()" in line for line in re.findall("hvd_async.*", job.output)]
    assert said == [True] * (manner in ("drop", "unequal")), "a normal end has nothing else to say"
    for rank, final in enumerate(job.case("exit")):
        if not (manner in ("drop", "early", "unequal") and rank == 1):  # that rank has left, or holds no optimizer
            assert final["weights"] == final["expected"], f"rank {rank}"
    last = max(step["at"] for step in job.case("last step"))
    assert max(job.exited) - last < 5.0


def test_a_forked_child_ends_on_its_own_and_its_error_says_that_it_cannot_train(forked: RunJob) -> None:
    job = forked("torch", "ends.py", 2, args=ends("torch", "fork")).check()
    assert [result["status"] for result in job.case("forked")] == [7, 7]
    assert all("was forked from a rank" in result["text"] for result in job.case("forked"))


@pytest.mark.parametrize(
    "env",
    [{"HVD_ASYNC_DEAD_AFTER": "2"}, {"HVD_ASYNC_DEAD_AFTER": "3", "HOROVOD_GLOO_TIMEOUT_SECONDS": "1"}],
    ids=["heartbeats", "gloo"],
)
def test_a_rank_that_stands_still_is_named_whichever_rank_gives_up_first(forked: RunJob, env: dict[str, str]) -> None:
    job = forked("torch", "ends.py", 3, args=ends("torch", "stands still"), env=env).check_clean()
    said = f"hvd_async: rank 1 on host localhost {MANNERS['sigkill'].partition(' ended')[0]}"
    assert said in job.outputs[0], str(job)
    for survivor in (0, 2):
        check_error(job.results[survivor]["error"], "rank 1 on host localhost died")
    assert "error" in job.results[1], "it has gone on, and ended"


@pytest.mark.parametrize("transport", ["torch", ""])
def test_what_is_made_is_ended(forked: RunJob, transport: str) -> None:
    """Each optimizer's groups, waiting threads and connections end with it; ``cycles`` compares after a shutdown."""
    job = forked("torch", "lifetimes.py", 2, transport=transport, args=LIFETIMES, timeout=500.0).check()
    for case in ("optimizers", "switches", "cycles"):
        for found in job.case(case):
            assert all(last <= first for first, last in zip(found["first"], found["last"], strict=True)), (case, found)


@pytest.mark.parametrize("kind", ["gossip", "leader", "solo"] if LONG_RUN else ["gossip"])
def test_an_optimizer_deleted_after_a_cut_is_waited_for_no_more(forked: RunJob, kind: str) -> None:
    job = forked("torch", "several.py", 2, transport="torch", args=(kind, "deleted"), timeout=PROMISED).check()
    job.case("done")


@pytest.mark.parametrize(("kind", "case"), [("gossip", "drained twice"), ("solo", "drained in reverse")])
def test_ends_of_optimizers_that_not_all_ranks_have_are_an_error(forked: RunJob, kind: str, case: str) -> None:
    """The second call would wait for a rank that has finished: it is refused instead."""
    job = forked("torch", "several.py", 2, transport="torch", args=(kind, case), timeout=PROMISED).check()
    assert "error" not in job.results[0], str(job)
    assert "rank 0 lacks one of the two" in job.results[1]["error"]["text"], str(job)
