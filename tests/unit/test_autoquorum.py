"""``quorum="auto"``: its replay is what the state machine does, and what it chooses is nearly the best."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hvd_async.algorithms.eager.config import EagerConfig, ExplainRound, GradientReady
from hvd_async.algorithms.eager.machine import EagerStateMachine
from hvd_async.algorithms.eager.quorum import (
    CANDIDATES,
    LEARN,
    MARGIN,
    RENEW,
    AutoQuorum,
    Quorum,
    candidates,
    fresh_rate,
)
from hvd_async.algorithms.eager.rank import EagerWorker
from hvd_async.runtime.interfaces import Wait
from hvd_async.runtime.protocol import Command, Finished
from hvd_async.simulation.arms import EagerJob
from hvd_async.simulation.job import Rank, Setup, Work
from tests.conftest import LONG_RUN, examples
from tests.unit.moves import opened, step, whys

Durations = list[list[float]]
P, ROUNDS = 6, 300


class Course(EagerJob):
    """A simulated job without latency that ends when a rank is free after ``ROUNDS`` rounds, or has no further step.

    Args:
        duration: (rank, its step from 1) -> seconds from being free to the next arrival; None: there is no such step.

    Attributes:
        reasons: of the rounds.
    """

    def __init__(
        self,
        quorum: Quorum,
        duration: Callable[[int, int], float | None],
        pace: str,
        size: int = P,
        staleness: int = 16,
    ) -> None:
        self._duration, self.reasons = duration, list[str]()
        endless = np.broadcast_to(0.0, (10**9, size))
        super().__init__("", Setup(endless, drains=False), quorum, staleness, 0.0, pace)
        self.run()
        self.seconds, self.rounds, self.staleness = self.clock.now, self.plane.count, self._staleness()
        self.given = [sum(rank.worker.produced) for rank in self.ranks]
        self.rate = self.staleness[0] / self.seconds if self.seconds else 0.0

    def _worker(self, rank: Rank) -> EagerWorker:
        worker = super()._worker(rank)
        worker._records_timeline = rank.rank == 0
        return worker

    def seconds_of(self, rank: Rank) -> float:
        seconds = self._duration(rank.rank, rank.steps + 1)
        if seconds is None or self.plane.count == ROUNDS:
            self._stop()
        return seconds or 0.0

    def _step(self, rank: Rank, worker: EagerWorker) -> Iterator[Work]:
        for work in super()._step(rank, worker):
            if isinstance(work, Wait):  # (a late rank may start a round: its event, the command, the sum, the result)
                yield from [0.0] * 4
            yield work

    def _deliver(self, command: Command) -> None:
        if isinstance(command, ExplainRound):
            self.reasons.append(command.trigger.reason)
        super()._deliver(command)


def replayed(durations: Durations, count: int, staleness: int, pace: str) -> Course:
    """Run a job whose ranks take so long."""

    def duration(rank: int, step: int) -> float | None:
        return durations[rank][step - 1] if step <= len(durations[rank]) else None

    return Course(count, duration, pace, len(durations), staleness)


@st.composite
def courses(draw: st.DrawFn) -> tuple[Durations, int, int, str]:
    size, steps = draw(st.integers(1, 5)), draw(st.integers(1, 12))
    seconds = st.sampled_from([0.125, 0.25, 0.5, 1.0, 4.0]) | st.floats(0.01, 3.0)
    given = draw(st.lists(st.lists(seconds, min_size=steps, max_size=steps), min_size=size, max_size=size))
    noise = random.Random(draw(st.integers(0, 99)))  # (no two ranks arrive at the same instant)
    durations = [[one * noise.uniform(1.0, 1.001) for one in own] for own in given]
    pace = draw(st.sampled_from(["steps", "rounds"]))
    return durations, draw(st.integers(1, size)), draw(st.integers(pace == "rounds", 6)), pace


@settings(max_examples=examples(300))
@given(courses())
@example(([[1.0] * 12, [9.01] * 12], 1, 2, "steps"))
@example(([[1.0] * 12, [9.01] * 12], 1, 2, "rounds"))
@example(([[0.0], [0.0]], 2, 16, "steps"))
def test_a_replay_is_what_the_state_machine_does(course):
    durations, count, staleness, pace = course
    expected = replayed(durations, count, staleness, pace)
    assert fresh_rate(durations, count, staleness, pace) == pytest.approx(expected.rate)
    assert max(expected.staleness, default=0) <= staleness


@pytest.mark.parametrize("size", [1, 2, 5, CANDIDATES, CANDIDATES + 1, 16, 100, 513])
def test_candidates_have_both_ends_and_are_few(size):
    tried = candidates(size)
    assert tried == sorted(set(tried))
    assert {1, max(1, size - 1), size} <= set(tried) <= set(range(1, size + 1))
    assert len(tried) <= CANDIDATES
    if size <= CANDIDATES:
        assert tried == list(range(1, size + 1))


# -- learning -------------------------------------------------------------------------------------------------


def taught(auto: AutoQuorum, rounds: int, *durations: float, now: float = 0.0) -> float:
    """Play synchronous rounds in which rank r takes ``durations[r]``, and return when they end."""
    for start in (now + number * max(durations) for number in range(rounds)):
        for seconds, rank in sorted((seconds, rank) for rank, seconds in enumerate(durations)):
            auto.arrived(rank, start + seconds, late=False)
        auto.fired(start + max(durations))
    return now + rounds * max(durations)


def test_a_choice_lasts_some_rounds_and_follows_the_ranks():
    auto = AutoQuorum(range(2), 16, "steps")
    now = taught(auto, LEARN + 1, 1.0, 1.0)
    assert auto.choose(1).quorum == 2
    assert auto.take_notice() is not None
    taught(auto, 48, 1.0, 9.0, now=now)
    assert auto.choose(RENEW).quorum == 2
    assert auto.take_notice() is None
    assert auto.choose(1 + RENEW).quorum == 1
    assert "1 of 2 ranks" in str(auto.take_notice())


@pytest.mark.parametrize(("seconds", "quorum"), [(2.04, 2), (2.1, 1)])
def test_a_little_better_is_not_enough(seconds, quorum):
    """Counts that differ by less than the margin do not flap."""
    auto = AutoQuorum(range(2), 16, "rounds")
    taught(auto, 48, 1.0, seconds)
    rates = [fresh_rate([[1.0] * 48, [seconds] * 48], count, 16, "rounds") for count in (1, 2)]
    assert rates[0] > rates[1]
    assert (rates[0] > MARGIN * rates[1]) == (quorum == 1), "the example has lost its point"
    assert auto.choose(1).quorum == quorum


# -- in the state machine -------------------------------------------------------------------------------------


def test_auto_tells_what_it_chooses_and_why():
    """Rank 2 takes 9 s, the others 1 s: synchronous at first, then two of three."""
    rounds = opened(EagerConfig("auto", 16, 0.0, 0, 1), 3, timeline=True)
    reported, reasons, now = [rounds.take_notice()], [], 0.0
    for number in range(1, 13):
        for rank, seconds in ((0, 1.0), (1, 1.0), (2, 9.0)):
            reasons += [reason for _, _, _, reason in whys(step(rounds, rank, number, now + seconds))]
            reported.append(rounds.take_notice())
        now += 9.0
    learning, chosen, *_ = [news for news in reported if news is not None]
    assert learning == "auto: learning how long the ranks take"
    assert chosen.startswith("auto: 2 of 3 ranks; fresh gradients per second by the last 2 steps are 1: ")
    assert reasons[0] == f"quorum: 3 of 3 are in, 3 needed ({learning})"
    assert f"quorum: 2 of 3 are in, 2 needed ({chosen})" in reasons


def learned(rounds: EagerStateMachine) -> dict[int, list[float]]:
    """The durations that "auto" goes by."""
    assert rounds._auto is not None
    return {rank: list(durations) for rank, durations in rounds._auto._durations.items()}


def test_auto_learns_how_long_a_rank_takes_until_its_last_bucket_and_nothing_from_a_drain():
    rounds = opened(EagerConfig("auto", 16, 0.0, 0, 2), 2)

    def arrive(rank: int, number: int, *times: float) -> None:
        for bucket, now in enumerate(times):
            rounds.handle(rank, GradientReady(7, [bucket], number), now)

    arrive(0, 1, 5.0, 6.0)
    arrive(1, 1, 7.0, 8.0)  # fired at 8: both are free
    assert learned(rounds) == {0: [], 1: []}
    arrive(0, 2, 9.0, 10.0)
    arrive(1, 2, 8.5, 12.0)
    assert learned(rounds) == {0: [2.0], 1: [4.0]}
    for rank in (0, 1):
        rounds.handle(rank, Finished(7, [2, 2]), 13.0)
    arrive(0, 3, 100.0, 101.0)
    arrive(1, 3, 102.0, 103.0)
    assert learned(rounds) == {0: [2.0], 1: [4.0]}
    arrive(0, 4, 104.0, 104.0)
    assert learned(rounds) == {0: [2.0, 1.0], 1: [4.0]}


def slow_last(rank: int, step: int) -> float:
    """Let rank 3 take five times as long as the others."""
    return 1.25 if rank == 3 else 0.25


@pytest.mark.parametrize("pace", ["steps", "rounds"])
def test_auto_learns_how_long_a_rank_takes_that_comes_too_late_to_wait(pace):
    found = Course("auto", slow_last, pace, 4)
    assert found.given[3] < found.given[0], "it was never late"
    assert {rank: set(seconds) for rank, seconds in learned(found.machine).items()} == {
        0: {0.25}, 1: {0.25}, 2: {0.25}, 3: {1.25}
    }  # fmt: skip


# -- is it nearly the best? -----------------------------------------------------------------------------------


def jitter(rank: int, step: int) -> float:
    return 0.3 * random.Random(str((rank, step))).uniform(0.98, 1.02)


DURATIONS: dict[str, Callable[[int, int], float]] = {
    "a random straggler": lambda rank, step: jitter(rank, step) + 0.3 * (random.Random(step).randrange(P) == rank),
    "a slow rank": lambda rank, step: jitter(rank, step) * (5 if rank == 3 else 1),
    "skew": lambda rank, step: jitter(rank, step) + 0.03 * rank,
}


@pytest.mark.parametrize(
    ("kind", "pace"),
    [
        ("a random straggler", "steps"),
        ("a slow rank", "rounds"),
        *([("a random straggler", "rounds"), ("skew", "steps"), ("skew", "rounds")] if LONG_RUN else []),
    ],
)
def test_auto_reaches_nearly_the_best_fixed_count(kind, pace):
    rates = {count: Course(count, DURATIONS[kind], pace).rate for count in range(1, P + 1)}
    best, auto = max(rates, key=lambda count: rates[count]), Course("auto", DURATIONS[kind], pace)
    assert auto.rounds == ROUNDS
    assert auto.rate >= 0.95 * rates[best], f"{auto.rate / rates[best]:.3f} of {rates}"
    assert min(rates.values()) < 0.8 * rates[best], "all counts are as good: it shows nothing"
    assert best == P or "auto: " in auto.reasons[-1]


# -- the bound in time ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("quorum", ["solo", 2, 3, "auto"] if LONG_RUN else [2, "auto"])
def test_a_rank_that_is_slow_for_good_gives_fewer_gradients_and_holds_no_rank_in_pace_rounds(quorum):
    """Four ranks, one five times slower: as fast as the other three; in pace "steps" it holds them up."""

    three, rounds, steps = (Course(quorum, slow_last, *job) for job in (("steps", 3), ("rounds", 4), ("steps", 4)))
    assert three.seconds == 0.25 * ROUNDS
    assert steps.seconds > 4 * three.seconds
    learned = 0.0 if quorum != "auto" else (LEARN + 1) * 1.0  # s that synchronous rounds take longer
    assert rounds.seconds == pytest.approx(three.seconds + learned, abs=1.5)
    assert rounds.given[3] == pytest.approx(ROUNDS / 5, abs=3)
    assert set(rounds.staleness) <= {0, 1, 4, 5}  # (at the same instant the first of three fires alone)
    tight = Course(quorum, slow_last, "rounds", 4, staleness=2)  # slower by more than the bound: it holds them up
    assert tight.seconds > 1.5 * three.seconds
    assert max(tight.staleness) <= 2
