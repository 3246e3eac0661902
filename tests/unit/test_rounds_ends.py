"""The state machine alone: pace by rounds, cuts, what an earlier run has left, process sets, the count it learns."""

from __future__ import annotations

import pytest

from hvd_async.algorithms.eager.messages import EagerConfig, GradientReady, VersionTaken
from hvd_async.algorithms.eager.state_machine import EagerStateMachine
from hvd_async.errors import ProtocolError
from hvd_async.runtime.messages import Accepted, Drained, Finished, Registered
from tests.unit.moves import PACED, SOLO, kinds, opened, step, whys
from tests.unit.simulation import Job, Simulation
from tests.unit.virtual import VirtualJob

# -- pace "rounds" --------------------------------------------------------------------------------------------


def test_a_rank_that_has_taken_a_version_counts_from_there():
    """Rank 1 hands over its first step when round 3 has fired, takes version 3, and may be 2 rounds later again."""
    rounds = opened(PACED, 2)
    for number in (1, 2):
        assert kinds(step(rounds, 0, number)) == ["StartRound"]
        assert rounds.handle(0, VersionTaken(7, number), 0.0) == []
    assert step(rounds, 0, 3) == []  # rank 1 computes at version 0
    assert kinds(step(rounds, 1, 1)) == ["StartRound"]
    assert rounds.handle(0, VersionTaken(7, 3), 0.0) == []
    assert step(rounds, 0, 4) == []  # nobody knows yet that rank 1 has taken more than round 1
    assert kinds(rounds.handle(1, VersionTaken(7, 3), 0.0)) == ["StartRound"]
    assert rounds.handle(0, VersionTaken(7, 4), 0.0) == []
    assert kinds(step(rounds, 0, 5)) == ["StartRound"]
    assert rounds.handle(0, VersionTaken(7, 5), 0.0) == []
    assert step(rounds, 0, 6) == []
    assert rounds.blocked_on() == ("round 6", {1})
    assert kinds(step(rounds, 1, 4)) == ["StartRound"]  # one step for the three rounds that it has missed


@pytest.mark.parametrize("staleness", [1, 2, 3])
@pytest.mark.parametrize("quorum", ["solo", 2])
def test_a_slow_rank_gives_fewer_gradients_in_pace_rounds(quorum, staleness):
    """The slow rank moves only when all others are stuck: it gives the fewest that the bound allows."""
    rounds, slow = 30, 1
    config = EagerConfig(quorum, staleness, 0.0, 3, 2, "rounds")
    simulation = Simulation(Job(config, ((rounds,) * 3,), (1.0, 0.0, 1.0), seed=staleness)).run()
    given = simulation.given()
    assert min(given[0], given[2]) > 0.4 * rounds
    fewest = rounds / (staleness + 1)
    assert fewest - 1 <= given[slow] <= fewest + 2
    assert max(simulation.staleness) == staleness


# -- cut ------------------------------------------------------------------------------------------------------


def with_one_pending(size: int = 2) -> EagerStateMachine:
    """Rank 0 has fired round 1, and rank 1's gradient came late."""
    rounds = opened(SOLO, size)
    step(rounds, 0, 1)
    assert step(rounds, 1, 1) == []
    return rounds


def test_a_cut_leaves_what_is_pending_and_a_drain_fetches_it():
    rounds = with_one_pending()
    assert rounds.handle(0, Finished(7, [1], flush=False), 0.0) == []
    assert rounds.handle(1, Finished(7, [1], flush=False), 0.0) == [Drained(7, 1, [2], 1, flushed=False)]
    for _ in range(2):  # cut again: nothing has changed
        assert rounds.handle(1, Finished(7, [1], flush=False), 0.0) == []
        assert rounds.handle(0, Finished(7, [1], flush=False), 0.0) == [Drained(7, 1, [2], 0, flushed=False)]
    assert rounds.handle(0, Finished(7, [1]), 0.0) == []
    commands = rounds.handle(1, Finished(7, [1]), 0.0)
    assert whys(commands) == [(0, 2, [{"lr": 0}], "drain: all ranks are done")]
    assert commands[-1] == Drained(7, 2, [2], 1)


@pytest.mark.parametrize("flushing", [0, 1])
def test_one_rank_that_drains_makes_a_drain_of_it(flushing):
    rounds = with_one_pending()
    assert rounds.handle(0, Finished(7, [1], flush=flushing == 0), 0.0) == []
    commands = rounds.handle(1, Finished(7, [1], flush=flushing == 1), 0.0)
    assert kinds(commands) == ["StartRound", "Drained"]
    assert commands[-1] == Drained(7, 2, [2], 1)


def test_after_a_cut_the_next_round_takes_what_is_pending():
    rounds = with_one_pending()
    for rank in range(2):
        rounds.handle(rank, Finished(7, [1], flush=False), 0.0)
    assert kinds(step(rounds, 0, 2)) == ["StartRound"]
    for rank, produced in ((0, 2), (1, 1)):
        commands = rounds.handle(rank, Finished(7, [produced]), 0.0)
    assert commands == [Drained(7, 2, [3], 1)]  # round 2 took it: no last round


@pytest.mark.parametrize("loaded", [(True, False), (False, True), (True, True), (False, False)])
def test_what_an_earlier_run_has_left_goes_out_although_nobody_steps(loaded):
    rounds = EagerStateMachine(7, range(2))
    for rank in (1, 0):
        opening = Registered(7, SOLO, ["w"], [1], loaded=loaded[rank], hyper=[{"lr": 10 + rank}])
        commands = rounds.handle(rank, opening, 0.0)
    assert commands == [Accepted(7)]
    assert rounds.handle(0, Finished(7, [int(loaded[0])]), 0.0) == []
    commands = rounds.handle(1, Finished(7, [int(loaded[1])]), 0.0)
    assert whys(commands) == ([(0, 1, [{"lr": 10}], "drain: all ranks are done")] if any(loaded) else [])
    assert commands[-1] == Drained(7, int(any(loaded)), [sum(loaded)], 1)


# -- process sets, the count that is learned ------------------------------------------------------------------


def test_only_the_ranks_of_a_process_set_count():
    rounds = EagerStateMachine(7, (1, 3))
    config = EagerConfig("all", 2, 0.0, 0, 1)
    assert rounds.handle(3, Registered(7, config, ["w"], [1], [1, 3]), 0.0) == []
    assert rounds.blocked_on() == ("the first step or drain", {1})
    with pytest.raises(ProtocolError, match="rank 0 does not share optimizer 7"):
        rounds.handle(0, Registered(7, config, ["w"], [1], [1, 3]), 0.0)
    assert rounds.handle(1, Registered(7, config, ["w"], [1], [1, 3]), 0.0) == [Accepted(7)]
    assert step(rounds, 3, 1) == []
    assert rounds.blocked_on() == ("round 1", {1})
    assert kinds(step(rounds, 1, 1)) == ["StartRound"]
    for rank in (3, 1):
        commands = rounds.handle(rank, Finished(7, [1]), 0.0)
    assert commands == [Drained(7, 1, [2], 1)]


def test_auto_tells_what_it_chooses_and_why():
    """Rank 2 takes 9 s, the others 1 s: synchronous at first, then two of three."""
    rounds = opened(EagerConfig("auto", 16, 0.0, 0, 1), 3)
    told, reasons, now = [rounds.take_notice()], [], 0.0
    for number in range(1, 13):
        for rank, seconds in ((0, 1.0), (1, 1.0), (2, 9.0)):
            reasons += [reason for _, _, _, reason in whys(step(rounds, rank, number, now + seconds))]
            told.append(rounds.take_notice())
        now += 9.0
    learning, chosen, *_ = [news for news in told if news is not None]
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
            rounds.handle(rank, GradientReady(7, bucket, number), now)

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


@pytest.mark.parametrize("pace", ["steps", "rounds"])
def test_auto_learns_how_long_a_rank_takes_that_comes_too_late_to_wait(pace):
    def duration(rank: int, step: int) -> float:
        return 1.25 if rank == 3 else 0.25

    job = VirtualJob(EagerConfig("auto", 16, 0.0, 0, 1, pace), 4, duration, 60)
    course = job.run()
    assert course.given[3] < course.given[0], "it was never late"
    assert {rank: set(seconds) for rank, seconds in learned(job.rounds).items()} == {
        0: {0.25}, 1: {0.25}, 2: {0.25}, 3: {1.25}
    }  # fmt: skip
