"""Every interleaving of small jobs at the three state machines; each fault that is seeded into one is found."""

from __future__ import annotations

from typing import Any

import pytest

from hvd_async.runtime.machine import StateMachine
from tests.conftest import LONG_RUN
from tests.unit import mutants
from tests.unit.explore import BrokenLawError, explore
from tests.unit.explore_jobs import LONG, MACHINES, QUICK, Job, eager, gossip, leader

BOUND = 400_000
"""States of a long job; of the few that have more, as many in an order that is drawn."""


def cases(jobs: Any) -> list[Any]:
    return [pytest.param(family, job, id=f"{family}: {name}") for family in jobs for name, job in jobs[family].items()]


@pytest.mark.parametrize(("family", "job"), cases(QUICK))
def test_laws_hold_in_every_interleaving(family: str, job: Job) -> None:
    found = explore(lambda: job(MACHINES[family]))
    assert found.complete
    assert found.ends >= 1


@pytest.mark.skipif(not LONG_RUN, reason="larger explorations run under scripts/check.sh --long")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("family", "job"), cases(LONG))
def test_laws_hold_in_larger_jobs(family: str, job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    found = explore(lambda: job(MACHINES[family]), most=BOUND)
    with capsys.disabled():
        print(f" {found}", end="")
    assert found.complete or found.states >= BOUND


REDUCED = [
    ("eager", eager("2 drain", "1 drain", staleness=1)),
    ("eager", eager("1 drain", "drain", buckets=2)),
    ("eager", eager("1 drain sum drain", "1 drain leave")),
    ("eager", eager("1 drain", "1 drain", pace="rounds")),
    ("gossip", gossip("1 drain", "1 drain")),
    ("gossip", gossip("1 drain", "1 drain", algorithm="osgp", max_staleness=1)),
    ("gossip", gossip("1 drain", "drain", algorithm="adpsgd", max_local_steps=1, slow=True)),
    ("gossip", gossip("2 drain", "1 drain", algorithm="allreduce", average_every=1)),
    ("leader", leader("1 drain 1 drain", "1 drain drain")),
]
REDUCED_LONG = [
    ("eager", eager("1 drain", "1 drain", buckets=2)),
    ("eager", eager("2 drain", "1 drain", pace="rounds")),
    ("gossip", gossip("1 drain", "1 drain", algorithm="adpsgd", max_local_steps=1, slow=True)),
]


@pytest.mark.parametrize(("family", "job"), REDUCED + (REDUCED_LONG if LONG_RUN else []))
def test_the_reduction_leaves_no_end_out(family: str, job: Job) -> None:
    """What is taken at once and alone changes nothing: all that a job can come to is still come to."""
    reduced, whole = (explore(lambda: job(MACHINES[family]), reduced=reduced) for reduced in (True, False))
    assert reduced.ends == whole.ends
    assert reduced.states < whole.states


@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param(family, name, id=f"{family}: {name}")
        for family in mutants.MUTANTS
        for name in mutants.MUTANTS[family]
    ],
)
def test_a_seeded_fault_is_found(family: str, name: str) -> None:
    if mutants.MUTANTS[family][name].long and not LONG_RUN:
        pytest.skip("larger explorations run under scripts/check.sh --long")
    job = {**LONG[family], **QUICK[family]}[mutants.MUTANTS[family][name].job]
    with mutants.planted(family, name), pytest.raises(BrokenLawError):
        explore(lambda: job(MACHINES[family]))


def test_a_broken_law_comes_with_the_way_to_it() -> None:
    said = r"stayed behind\nafter\n  go on \d\n(?s:.*)  obey \d$"
    with mutants.planted("eager", "nothing goes out at a drain"), pytest.raises(BrokenLawError, match=said):
        explore(lambda: QUICK["eager"]["two buckets, both late"](MACHINES["eager"]))


def test_a_fault_in_code_that_a_method_does_not_have_is_refused() -> None:
    fault = mutants.Mutant("opening", StateMachine.handle, "self.no_such_field", "None")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(mutants.MUTANTS["eager"], "new", fault)  # type: ignore[arg-type]
        with pytest.raises(AssertionError, match="has this 0 times"), mutants.planted("eager", "new"):
            pass
