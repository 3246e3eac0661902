"""``grace="auto"``: rounds wait for ranks that usually come right after the quorum, and for no others."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_async.algorithms.eager.config import EagerConfig, GradientReady, StartRound, StepEntered
from hvd_async.algorithms.eager.machine import EagerStateMachine
from hvd_async.algorithms.eager.quorum import SHARE, Grace
from tests.unit.moves import opened

STEP = 0.1


def machine(ranks: int, quorum: str | int = "solo", **options: Any) -> EagerStateMachine:
    """All ranks have registered."""
    return opened(EagerConfig(quorum=quorum, max_staleness=16, grace="auto", seed=0, buckets=1, **options), ranks)


def play(made: EagerStateMachine, arrivals: list[list[float]]) -> list[tuple[float, int]]:
    """Let ranks arrive at these times, by step and rank; return when each round fired, with how many in it.

    A rank computes its next step from the times that it is given, whenever its round fires.
    """
    events = sorted((at, step, rank) for step, times in enumerate(arrivals, 1) for rank, at in enumerate(times))
    fired: list[tuple[float, int]] = []

    def note(commands, now):
        fired.extend((now, command.arrived[0]) for command in commands if isinstance(command, StartRound))

    for at, step, rank in events:
        while (due := made.deadline()) is not None and due <= at:
            note(made.tick(due), due)
        note(made.handle(rank, StepEntered(7, step, []), at), at)
        note(made.handle(rank, GradientReady(7, [0], step, len(fired)), at), at)
    return fired


def even(steps: int, *offsets: float) -> list[list[float]]:
    return [[STEP * step + offset for offset in offsets] for step in range(1, steps + 1)]


@pytest.mark.parametrize(
    ("offsets", "local_size", "first", "together", "at"),
    [
        ((0.0, 0.001, 0.002), 1, 1, 3, 0.002),
        ((0.0, 0.001, 0.05), 1, 1, 2, 0.001),  # no rank waits for one that is late
        ((0.0, 0.03, 0.02, 0.031), 2, 2, 4, 0.031),  # a host comes when the last of its ranks does
        ((0.0, 0.001, 0.002, 0.05), 2, 2, 2, 0.001),
    ],
)
def test_ranks_and_hosts_that_come_a_millisecond_apart_go_together_once_that_is_known(
    offsets, local_size, first, together, at
):
    fired = play(machine(len(offsets), local_size=local_size), even(30, *offsets))
    assert fired[0][1] == first, "nothing was known yet"
    assert [each for _, each in fired[12:]] == [together] * 18
    assert [when for when, _ in fired[12:]] == pytest.approx([STEP * number + at for number in range(13, 31)])


def test_a_rank_that_stays_away_costs_no_more_than_its_share():
    usual, away = even(30, 0.0, 0.001), [[STEP * 31, STEP * 31 + 0.05]]
    fired = play(machine(2), usual + away)
    assert fired[30][0] == pytest.approx(STEP * 31 + SHARE * STEP, abs=1e-4)


def test_seconds_that_are_given_are_waited():
    assert Grace(0.5).seconds(1) == Grace(0.5).seconds(7) == 0.5
    assert Grace("auto").seconds(1) == 0.0, "nothing is known"


@given(
    arrivals=st.lists(st.lists(st.floats(0, 0.09), min_size=4, max_size=4), min_size=1, max_size=40),
    quorum=st.sampled_from(["solo", 2, 3]),
)
def test_a_round_waits_at_most_its_share_of_the_longest_interval(arrivals, quorum):
    """After its quorum; and every round starts."""
    needed = 1 if quorum == "solo" else quorum
    times = [[STEP * step + at for at in row] for step, row in enumerate(arrivals, 1)]
    fired = play(machine(4, quorum), times)
    last = [*times, [STEP * (len(times) + 1)] * 4]
    longest = max([b - a for (a, _), (b, _) in itertools.pairwise(fired)], default=0.0)
    assert len(fired) == len(times)
    for (at, together), row in zip(fired, last, strict=False):
        reached = sorted(row)[needed - 1]
        assert reached - 1e-9 <= at <= reached + SHARE * longest + 1e-9
        assert together >= needed


def test_after_a_drain_the_time_until_the_next_round_is_no_interval():
    grace = Grace("auto")
    for round_ in range(1, 21):
        grace.quorum_reached(round_, 1, STEP * round_)
        grace.arrived(round_, STEP * round_ + 0.001)
        grace.fired(round_, STEP * round_)
    before = grace.seconds(1)
    for drain in range(1, 13):
        grace.interrupted()
        grace.fired(20 + drain, 1000.0 * drain)
    assert grace.seconds(1) == before == pytest.approx(SHARE * STEP)
