"""The nemesis of elastic training: its schedules, and that its reader of histories misses nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from scripts.benchmarks.support.nemesis import (
    COLUMNS,
    FAST,
    IN_A_RESET,
    KINDS,
    LOSSES,
    POINTS,
    START,
    History,
    Schedule,
    Trouble,
    drawn,
    points_of,
)
from tests.unit.nemesis_history import DEATH, Records, history_of

DEADLY = (Trouble(0, "kill", "backward", DEATH, 2, 0.0),)


def test_schedules_are_the_same_for_a_seed_and_reach_every_point_action_and_kind():
    schedules = [drawn(seed) for seed in range(400)]
    assert schedules == [drawn(seed) for seed in range(400)]
    assert all(msgspec.convert(schedule.content(), Schedule) == schedule for schedule in schedules)
    troubles = [trouble for schedule in schedules for trouble in schedule.troubles]
    assert {trouble.point for trouble in troubles} == {*POINTS}
    assert {trouble.point for trouble in troubles if trouble.action == "kill"} == {*POINTS}
    assert {trouble.action for trouble in troubles} == {"kill", "stop", "cut", "join", "leave", "slow disk"}
    assert Counter(schedule.kind for schedule in schedules) == dict.fromkeys(KINDS, 40)
    for schedule in schedules:
        assert sum(trouble.action in ("kill", "leave") for trouble in schedule.troubles) <= LOSSES < START
        for trouble in schedule.troubles:
            reached = any(trouble.point in points_of(batch) for batch in range(trouble.batch, FAST))
            assert reached or trouble.point in IN_A_RESET, schedule


@pytest.mark.parametrize("troubles", [(), DEADLY])
@pytest.mark.parametrize("kind", KINDS)
def test_a_history_as_it_should_be_has_no_violation(kind, troubles):
    history = History(Schedule(0, kind, troubles), history_of(Schedule(0, kind, troubles)))
    assert history.violations() == []
    assert history.resets == (2 if troubles else 0)
    assert history.lost == (1 if troubles and kind in ("all", "majority", "solo") else 0)
    for one in history.recoveries():
        assert (one.seconds, one.found_out, one.restart, one.again) == pytest.approx((0.06, 0.02, 0.03, 0))
    assert len(history.recoveries()) == len(troubles)


def change(found: Records, host: str, what: str, at_batch: int | None = None, **fields: Any) -> None:
    """Change a host's first record of a kind, or of a kind and a batch."""
    record = next(one for one in found[host] if one["what"] == what and at_batch in (None, one.get("batch")))
    record |= fields


def move_all(found: Records, slot: int, batch: int, by: float) -> None:
    """Have all ranks count a gradient more often at the end, or less."""
    for records in found.values():
        if records[-1]["what"] == "end":
            weights = list(records[-1]["weights"])
            weights[slot * COLUMNS + batch] -= by
            records[-1] |= {"weights": weights}


BREAKS = {
    "one that has not ended": ("solo", lambda found: found["a"].pop(), "2 ranks have come to the end"),
    "not drained": ("solo", lambda found: change(found, "a", "end", drained=False), "has not ended among"),
    "a step again": ("sgp", lambda found: change(found, "a", "stepped", 20, batch=19), "ended steps in this order"),
    "replicas": ("dpsgd", lambda found: change(found, "b", "end", weights=[0.0] * COLUMNS), "replicas differ"),
    "no number": ("solo", lambda found: move_all(found, 0, 0, float("nan")), "not finite"),
    "counted twice": ("solo", lambda found: move_all(found, 1, 20, 1.0), "b: batch 20 counts 2.000 times"),
    "lost": ("majority", lambda found: move_all(found, 0, 5, -1.0), "a: batch 5 counts -0.000 times"),
    "out of nothing": ("all", lambda found: move_all(found, 3, 2, 1.0), "d: batch 2 counts 1.000 times"),
    "a dead rank's twice": ("solo", lambda found: move_all(found, 2, DEATH, 2.0), "c (gone): batch 10 counts 2.000"),
    "lost of a dead rank": ("all", lambda found: move_all(found, 2, 3, -1.0), "c (gone): batch 3 counts -0.000"),
    "counts": ("solo", lambda found: found["a"][-1]["stats"].update(gradients_produced=39), "counts 39 gradients"),
    "too late": ("solo", lambda found: found["a"][-1]["stats"].update(staleness={"2": 1}), "2 rounds stale"),
    "an update twice": ("easgd", lambda found: move_all(found, 0, 5, 1.5), "an update counts"),
    "an update lost": ("local", lambda found: change(found, "b", "stepped", 7, own=0.0), "batches [7] are not in"),
    "the mean": ("adpsgd", lambda found: move_all(found, 0, 30, -0.1), "the mean is off by 0.1000"),
}


@pytest.mark.parametrize("what", BREAKS)
def test_whatever_should_not_have_been_is_reported(what):
    kind, broken, reported = BREAKS[what]
    found = history_of(schedule := Schedule(0, kind, DEADLY))
    broken(found)
    violations = History(schedule, found).violations()
    assert any(reported in one for one in violations), violations


@pytest.mark.parametrize("broken_off", [False, True])
def test_a_host_that_leaves_hands_over_what_it_has_unless_another_dies_just_then(broken_off):
    """Seed 172: a rank was killed while another's host was being taken away, and its late gradient was gone with it."""
    found = history_of(schedule := Schedule(0, "solo", DEADLY))
    change(found, "c", "trouble", action="leave")
    if broken_off:
        found["c"].append({"what": "meeting", "at": 2.02})
    move_all(found, 2, 5, -1.0)
    lost = ["c (gone): batch 5 counts -0.000 times"]
    assert History(schedule, found).violations() == ([] if broken_off else lost)
