"""Leader-pull of ranks as threads: every step equals the reference's, and nobody waits for anybody."""

from __future__ import annotations

import dataclasses
import itertools
import queue
import threading
from typing import Any

import numpy as np
import pytest

from hvd_async.algorithms.leader.config import StartPull
from hvd_async.testing import Cluster, InjectedError
from tests.conformance.cases import CASES
from tests.conformance.gossip_reference import least_squares
from tests.conformance.leader_drive import TIMEOUT, Seen, check, check_leaders, run, wait_for_pulls
from tests.conformance.leader_reference import ALL, NEVER_OLD, Following, replay, several
from tests.threads.following_workload import Follower, gated, pass_gate

MOMENTUM = CASES[1]
EXACT = 1e-12
PAIRS = Following("lsgd", several(4, 2), 2, 5, loss_window=NEVER_OLD)
ELASTIC = Following("easgd", global_period=3)
KINDS = pytest.mark.parametrize("following", [PAIRS, ELASTIC], ids=["lsgd", "easgd"])
SHAPES = [(1, 1), (2, 1), (2, 2), (3, 3), (4, 2), (6, 1), (6, 2), (6, 3)]


def follow(following: Following, size: int, how: str) -> None:
    """Train, and check each step against the reference."""
    problem, together = least_squares(size, MOMENTUM), how == "in step"
    behind = [1 + (size - 1 - rank) % 3 for rank in range(size)]
    cluster = Cluster(size, jitter=0.0 if together else 0.001, seed=size)
    made = run(lambda rank: Follower(problem, following, rank), 40, cluster, together, () if together else behind)
    outcome = replay(problem, following, [own.log for own in made])
    check(outcome, made, EXACT)
    if together and following.algorithm == "lsgd":
        check_leaders(outcome, following, 40)


# -- the reference --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("how", ["in step", "late"])
def test_lsgd_equals_the_reference(how, shape):
    """Each pull goes when the period is over; or messages are held back at random, and some ranks are slow."""
    size, ranks = shape
    following = Following("lsgd", several(size, ranks), 2, 3, 0.3, lambda step: 0.9 / step, 0.5, 0.9)
    following = dataclasses.replace(following, loss_window=4 if how == "in step" else NEVER_OLD)
    follow(following, size, how)


@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize("how", ["in step", "late"])
def test_easgd_equals_the_reference(how, size):
    follow(ELASTIC, size, how)


@KINDS
def test_a_center_is_the_same_bits_everywhere_and_leaders_are_too(following):
    """Each rank computes the center itself; a leader's weights are copies."""

    def train(rank: int) -> list[bytes]:
        own = Follower(least_squares(4, MOMENTUM), following, rank).train(30)
        own.drain(flush=False)
        come = own.worker().executor.pending_results()
        return [come.targets[ALL].tobytes()] if following is ELASTIC or ALL in come.targets else []

    held = [one for own in Cluster(4, jitter=0.001).run(train) for one in own]
    assert len(held) >= 3
    assert len(set(held)) == 1


# -- nobody waits ---------------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("at", [1, 4])
@pytest.mark.parametrize("sleeper", [0, 3])
def test_a_rank_that_sleeps_holds_nobody_and_wakes_to_the_last_leader(following, sleeper, at):
    """Also before its first step. Its engine takes part in pulls of the others' steps; their steps wait for nobody."""
    problem, together, awake = least_squares(4, MOMENTUM), threading.Barrier(4), threading.Event()
    rested = threading.Barrier(3)
    slept: list[int] = []

    def train(rank: int) -> Seen:
        own = Follower(problem, following, rank)
        seen, worker = Seen(own), own.worker()
        together.wait(TIMEOUT)

        def sleep(step: int) -> None:
            if step == at:
                pass_gate(awake)
                wait_for_pulls(worker, 6)
                slept.append(len(seen.log))

        own.calls = [sleep] if rank == sleeper else []
        for step in range(1, 3 + (at if rank == sleeper else 58)):
            own.step()
            if rank != sleeper and step % 10 == 0:  # 30 steps of the three have made one more due
                rested.wait(TIMEOUT)
                wait_for_pulls(worker, step // 10)
        if rank != sleeper:
            awake.set()
        return seen.drain(own)

    seen = Cluster(4).run(train)
    outcome = replay(problem, following, [own.log for own in seen])
    check(outcome, seen, EXACT)
    log, (woke,) = seen[sleeper].log, slept
    landed = [entry[1] for entry in log[:woke] if entry[0] == "landed"]
    assert len(landed) >= 6
    taken = next(entry for entry in log[woke:] if entry[0] == "taken")
    assert taken[1] == at
    assert max(number for number, _ in taken[2].values()) >= landed[-1]
    assert taken[2].keys() == ({ALL} if following is ELASTIC else {sleeper // 2, ALL})


@KINDS
def test_a_pull_that_takes_long_holds_up_no_step_and_no_pull_of_others(following):
    """One of all is in the air: steps are taken, groups' pulls go on, and there is no second one of all meanwhile."""
    gate, begun, problem = threading.Event(), queue.Queue[int](), least_squares(4, MOMENTUM)
    together, rested = threading.Barrier(4), threading.Barrier(4)
    flying: list[int] = []

    def wait(own: Follower) -> None:
        flying.append(begun.get(timeout=TIMEOUT))  # of some rank
        if following is PAIRS:
            wait_for_pulls(own.worker(), 1)
        rested.wait(TIMEOUT)
        assert begun.empty()
        assert all(entry[1] != ALL for entry in own.stats().history)
        rested.wait(TIMEOUT)
        gate.set()

    def train(rank: int) -> Seen:
        own = Follower(problem, following, rank)
        seen = Seen(own)
        together.wait(TIMEOUT)
        for step in range(1, 31):
            own.step()
            if step == 20:
                wait(own)
        worker = own.worker()  # (what was due meanwhile)
        worker.engine.wait(lambda: sum(entry[1] == ALL for entry in own.stats().history) > 1)
        return seen.drain(own)

    seen = Cluster(4, wrap=gated(gate, ".-1", begun)).run(train)
    check(replay(problem, following, [own.log for own in seen]), seen, EXACT)
    assert sorted(flying) == [0, 1, 2, 3]


@KINDS
def test_a_rank_takes_part_in_a_groups_next_pull_when_its_last_is_over_here_too(following):
    """Horovod knows collectives by their names: a rank must not submit a second one while it has not seen the first."""
    gate, told, begun = threading.Event(), threading.Event(), queue.Queue[int]()
    together, problem = threading.Barrier(2), least_squares(2, MOMENTUM)
    one = dataclasses.replace(following, groups=((0,), (1,)), local_period=1, global_period=1)

    def train(rank: int) -> Seen:
        own = Follower(problem, one, rank)
        seen, worker = Seen(own), own.worker()
        pull = worker.executor.pull

        def watched(command: StartPull) -> None:
            pull(command)
            if command.round == 2:
                told.set()

        worker.executor.pull = watched  # type: ignore[method-assign]
        together.wait(TIMEOUT)
        for step in (1, 2):  # (the second pull is due when rank 0 has seen the first)
            own.step()
            if step == 1 and rank == 0:
                wait_for_pulls(worker, 1)
        if rank == 1:
            pass_gate(told)
            assert [entry for entry in seen.log if entry[0] == "sent"] == [("sent", 1)]
            assert sorted([begun.get(timeout=TIMEOUT) for _ in range(3)]) == [0, 0, 1]
            gate.set()
        return seen.drain(own)

    seen = Cluster(2, wrap=gated(gate, ".-1", begun, rank=1)).run(train)
    check(replay(problem, one, [own.log for own in seen]), seen, EXACT)
    assert [entry[1] for entry in seen[1].log if entry[0] == "sent"][:2] == [1, 2]


@KINDS
def test_a_pull_after_a_drain_finds_what_the_drain_has_left(following):
    """Rank 0 has gone on, and a pull is due again, while rank 1 rests, or (easgd) is still about to end its drain."""
    told, together, problem = threading.Event(), threading.Barrier(2), least_squares(2, MOMENTUM)
    one = dataclasses.replace(following, groups=((0, 1),), local_period=1, global_period=1)

    def train(rank: int) -> Seen:
        own = Follower(problem, one, rank)
        seen, worker = Seen(own), own.worker()
        together.wait(TIMEOUT)
        own.step()
        pull, complete_drain, landed = worker.executor.pull, worker.complete_drain_program, [0]

        def watched(command: StartPull) -> None:
            pull(command)
            drained = worker._inbox.drained
            if drained is not None and command.round > drained.rounds:
                told.set()

        def late() -> Any:
            landed[0] = worker.executor.pulls
            if following is ELASTIC:  # (of lsgd rank 0 is in its drain until rank 1 has its leader's weights)
                pass_gate(told)
                assert worker.executor._waiting
            yield from complete_drain()

        if rank == 1:
            worker.executor.pull, worker.complete_drain_program = watched, late  # type: ignore[method-assign]
        own.drain()
        if rank == 1:
            worker.complete_drain_program = complete_drain  # type: ignore[method-assign]
            wait_for_pulls(worker, landed[0] + 1)
        return seen.drain(own.train(4))

    seen = Cluster(2).run(train)
    outcome = replay(problem, one, [own.log for own in seen])
    check(outcome, seen, EXACT)
    log = seen[1].log
    assert log[log.index(("drained",)) + 1][0] == "sent"
    assert len(outcome.drained) == 2


def test_what_is_on_its_way_is_looked_at_and_changed_under_the_engines_lock_only():
    """The engine adds pulls while the training thread, at an end, looks which are on their way."""

    class Guarded(set[int]):
        def __init__(self, lock: Any) -> None:
            super().__init__()
            self.lock, self.looks = lock, 0

        def __iter__(self) -> Any:
            assert self.lock._is_owned()
            self.looks += 1
            return super().__iter__()

        def add(self, number: int) -> None:
            assert self.lock._is_owned()
            super().add(number)

        def discard(self, number: int) -> None:
            assert self.lock._is_owned()
            super().discard(number)

    def train(rank: int) -> int:
        own = Follower(least_squares(2, MOMENTUM), dataclasses.replace(PAIRS, groups=((0, 1),)), rank)
        guarded = own._worker.executor._flying = Guarded(own._worker.engine.changed)
        own.train(12).drain(flush=False)
        own.train(1).drain()
        return guarded.looks

    assert min(Cluster(2).run(train)) > 0


# -- several, and failures ------------------------------------------------------------------------------------


def test_two_optimizers_follow_side_by_side():
    """Each with its own leader, center and counts; one drain is for both."""
    problem, together = least_squares(3, MOMENTUM), threading.Barrier(3)
    kinds = [Following("lsgd", several(3, 3), 1, 2, loss_window=NEVER_OLD), Following("easgd", global_period=2)]

    def train(rank: int) -> list[Seen]:
        pair = [Follower(problem, following, rank) for following in kinds]
        seen = [Seen(own) for own in pair]
        together.wait(TIMEOUT)
        for _, own in itertools.product(range(20), pair):
            own.step()
        return [one.drain(own) for one, own in zip(seen, pair, strict=True)]  # (the first is for both)

    for seen, following in zip(zip(*Cluster(3, jitter=0.001).run(train), strict=True), kinds, strict=True):
        check(replay(problem, following, [own.log for own in seen]), seen, EXACT)


@KINDS
def test_a_rank_that_fails_is_named_to_the_others_and_nobody_hangs(following):
    """Whether they step or are at an end."""

    def train(rank: int) -> None:
        own = Follower(least_squares(4, MOMENTUM), following, rank).train(6)
        if rank == 2:
            raise ArithmeticError("out of numbers")
        own.train(100_000 if rank == 1 else 1).drain()

    for rank, outcome in enumerate(Cluster(4).outcomes(train)):
        if rank == 2:
            assert isinstance(outcome, ArithmeticError)
        else:
            assert isinstance(outcome, InjectedError)
            assert "rank 2 on host host2 failed: ArithmeticError: out of numbers" in str(outcome)


def test_a_snapshot_is_never_changed_by_later_steps():
    """What is on its way belongs to the pull: mix() returns vectors that must not be changed, and changes none."""

    def train(rank: int) -> None:
        own, held = Follower(least_squares(2, MOMENTUM), dataclasses.replace(ELASTIC, global_period=1), rank), []
        for _ in range(30):
            own.step()
            executor = own.worker().executor
            held += [(vector, vector.copy()) for vector in (executor.snapshot, executor.consensus, own.x)]
        own.drain()
        for vector, was in held:
            np.testing.assert_array_equal(vector, was)

    Cluster(2).run(train)
