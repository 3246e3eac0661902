"""Elastic training, the pure half: from whose state ranks continue, and which gradients are pending then."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_async.algorithms.eager.gradient_format import PendingGradient, Tail
from hvd_async.algorithms.eager.rank import Remains
from hvd_async.algorithms.gossip.adpsgd import ADPSGDWorker
from hvd_async.algorithms.gossip.message_format import NumpyMessageFormat
from hvd_async.errors import ReplicaStateError
from hvd_async.optimizers import elastic
from hvd_async.optimizers.driver import GradientCounts, Standing
from hvd_async.optimizers.elastic import INIT_FAILED, Report, plan
from hvd_async.runtime import time_limits
from hvd_async.runtime.coordinator import CommitCounts
from hvd_async.runtime.engine import Commits
from hvd_async.runtime.interfaces import Program
from hvd_async.testing import InjectedError

BUCKETS = 2


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[Remains], np.ndarray, list[int]]:
    """Survivors of a job of eager ranks; which round took each of their gradients [rank, bucket, step], 0 for none; how
    many rounds each has seen."""
    ranks, steps, rounds = draw(st.integers(1, 4)), draw(st.integers(0, 4)), draw(st.integers(0, 5))
    took = np.zeros((ranks, BUCKETS, steps), int)
    seen = draw(st.lists(st.integers(0, rounds), min_size=ranks, max_size=ranks))
    remains = []
    for rank in range(ranks):
        in_rounds: dict[int, list[PendingGradient]] = {}
        pending = [PendingGradient(None, []) for _ in range(BUCKETS)]
        for bucket in range(BUCKETS):
            for step in range(steps):
                took[rank, bucket, step] = round_ = draw(st.integers(0, rounds))
                one = np.zeros(ranks * steps)
                one[rank * steps + step] = 1.0
                if round_ == 0:
                    own = pending
                elif round_ > seen[rank]:
                    own = in_rounds.setdefault(round_, [PendingGradient(None, []) for _ in range(BUCKETS)])
                else:
                    continue
                vector, versions = own[bucket]
                own[bucket] = PendingGradient(one if vector is None else vector + one, [*versions, step])
        remains.append(Remains(seen[rank], in_rounds, pending, begun=steps, ended=steps))
    return remains, took, seen


@given(jobs())
def test_each_gradient_of_a_survivor_is_in_the_weights_or_pending_and_never_both(job):
    """Whatever rounds each survivor has seen: the rounds that only others saw count as well."""
    remains, took, seen = job
    version = max(seen)
    ranks, _, steps = took.shape
    for bucket in range(BUCKETS):
        counted = np.zeros(ranks * steps)
        for rank, own in enumerate(remains):
            after = own.after(version, own.ended)
            assert not after.in_rounds
            assert after.version == version
            vector, versions = after.pending[bucket]
            counted += 0.0 if vector is None else vector
            assert len(versions) == (0 if vector is None else vector.sum())
            in_weights = (took[rank, bucket] > 0) & (took[rank, bucket] <= version)
            counted[rank * steps : (rank + 1) * steps] += in_weights
        np.testing.assert_array_equal(counted, 1.0)


@given(jobs(), st.integers(0, 3), st.integers(0, 3))
def test_counting_from_an_earlier_round_changes_no_gradient(job, rounds, steps):
    for own in job[0]:
        moved = own.counted_from(rounds, steps)
        assert moved.version == own.version + rounds
        assert moved.begun == own.begun + steps
        assert moved.counted_from(-rounds, -steps) == own or not own.pending


@pytest.mark.parametrize(
    ("begun", "ended", "handed", "furthest", "brought"),
    [
        (5, 5, set(), 5, set()),  # between two steps
        (6, 5, set(), 5, {0, 1}),  # a step was broken off, and no rank has ended it: its gradient is there
        (6, 5, set(), 6, set()),  # another rank has ended it: the next step is a new one
        (5, 5, {1}, 5, {1}),  # broken off in backward: one bucket had left
        (5, 5, {1}, 6, set()),  # another rank is a step further
        (4, 4, set(), 7, set()),  # a slow rank continues where the furthest is
    ],
)
def test_a_gradient_that_is_there_is_not_brought_again(begun, ended, handed, furthest, brought):
    none = [PendingGradient(None, []) for _ in range(BUCKETS)]
    remains = Remains(3, {}, none, begun, ended, frozenset(handed))
    after = remains.after(3, furthest)
    assert after.brought == frozenset(brought)
    again = after.after(3, furthest)  # ranks are lost once more, before the first step
    assert again.brought == frozenset(brought)
    assert (again.begun, again.ended) == (after.begun, furthest)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("before", "now"), [((1, 0), (3, 2)), ((4, 3), (1, 0)), ((2, 1), (2, 0))])
def test_counting_elements_say_the_same_among_other_ranks(before, now, weighted):
    old, new = Tail(*before, weighted), Tail(*now, weighted)
    elements = (np.array(old.of(5)) + np.array(old.of(9))).tolist()
    moved = new.moved(elements, old)
    assert len(moved) == len(new)
    assert new.read(moved, 1.0) == old.read(elements, 1.0)


# -- whose state ---------------------------------------------------------------------------------------------------


def eager(rounds: int, begun: int, ended: int, fit: bool = True) -> Report:
    return Report(True, [Standing(rounds, begun, ended, fit)])


def own_weights(version: int, ended: int) -> Report:
    return Report(True, [Standing(version, ended, ended, apart=True, shared=("anchor",))])


NEW = Report(False, [Standing(0, 0, 0)])


@pytest.mark.parametrize(
    ("reports", "position", "source", "takers"),
    [
        ([NEW, NEW, NEW], 0, 0, {1, 2}),  # a job begins
        ([eager(4, 4, 4), eager(4, 4, 4)], 0, 0, set()),
        ([eager(4, 5, 4), eager(5, 5, 5), eager(5, 5, 4)], 1, 1, {0}),
        ([NEW, eager(4, 4, 4), eager(3, 4, 3)], 1, 1, {0, 2}),  # a new rank is rank 0
        ([eager(6, 5, 5, fit=False), eager(5, 5, 5)], 0, 1, {0}),  # a round was half applied there
        ([eager(7, 3, 3), eager(6, 5, 5)], 1, 0, {1}),  # pace="rounds": the furthest is not the one with most rounds
        ([own_weights(2, 5), own_weights(3, 4), NEW], 0, 1, {2}),  # weights of their own; the anchor is the newest
    ],
)
def test_ranks_continue_from_the_one_that_is_furthest(reports, position, source, takers):
    found = plan(reports)
    (agreed,) = found.optimizers
    assert (found.position, agreed.source, agreed.takers) == (position, source, frozenset(takers))
    assert agreed.ended == reports[position].optimizers[0].ended
    assert agreed.rounds == reports[source].optimizers[0].rounds
    assert found.newcomers == frozenset(rank for rank, report in enumerate(reports) if report is NEW) - {found.position}


def test_a_state_that_cannot_be_gone_on_from_is_refused():
    with pytest.raises(ReplicaStateError, match="half applied on every rank"):
        plan([eager(6, 5, 5, fit=False), NEW])
    with pytest.raises(ReplicaStateError, match=r"\[1, 2\] optimizers"):
        plan([eager(1, 1, 1), Report(True, [Standing(1, 1, 1)] * 2)])


# -- gradients of ranks that are gone -------------------------------------------------------------------------------


@st.composite
def losses(draw: st.DrawFn) -> tuple[list[Report], int, bool]:
    """Survivors' reports, how many gradients of ranks that are gone are in no round, and whether anybody can know."""
    ranks, rounds = draw(st.integers(1, 5)), draw(st.integers(0, 4))
    took = [draw(st.lists(st.integers(0, rounds + 1), max_size=6)) for _ in range(ranks)]  # the round after: none yet
    seen = [draw(st.integers(0, rounds)) for _ in range(ranks)]
    gone = draw(st.sets(st.integers(0, ranks - 1), max_size=ranks - 1))
    known = draw(st.booleans())
    there = [rank for rank in range(ranks) if rank not in gone]
    last = max(seen[rank] for rank in there)
    reports = []
    for rank in there:
        own = [round_ for round_ in took[rank] if round_ <= rounds]
        counts = GradientCounts(
            place=rank,
            size=ranks,
            applied=sum(round_ <= seen[rank] for each in took for round_ in each),
            produced=len(took[rank]),
            in_rounds={number: own.count(number) for number in {*own} if number > seen[rank]},
            pending=len(took[rank]) - len(own),
            handed_over=tuple(map(len, took)) if known else None,
        )
        reports.append(Report(True, [Standing(seen[rank], 3, 3, gradients=counts)]))
    return reports, sum(round_ > last for rank in gone for round_ in took[rank]), known or not gone


@given(losses())
def test_gradients_of_lost_ranks_in_no_round_are_counted(job):
    reports, lost, known = job
    assert plan(reports).optimizers[0].lost == (lost if known else None)


# -- meeting ----------------------------------------------------------------------------------------------------------


class Horovod:
    """Whose ``init`` fails so often."""

    def __init__(self, failures: int, problem: str = f"{INIT_FAILED}. Please check log messages") -> None:
        self.failures, self.problem, self.calls = failures, problem, list[str]()

    def init(self) -> None:
        self.calls.append("init")
        if self.failures:
            self.failures -= 1
            raise ValueError(self.problem)

    def shutdown(self) -> None:
        self.calls.append("shutdown")


def test_ranks_meet_again_where_one_dies_meanwhile(monkeypatch):
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    horovod = Horovod(2)
    elastic.meet(horovod.shutdown, horovod.init)
    assert horovod.calls == ["init", "shutdown", "init", "shutdown", "init"]
    with pytest.raises(ValueError, match=INIT_FAILED):
        elastic.meet(horovod.shutdown, Horovod(elastic.MEETINGS).init)
    with pytest.raises(ValueError, match="process set"):
        elastic.meet(horovod.shutdown, Horovod(1, "no such process set").init)
    monkeypatch.delenv("HOROVOD_ELASTIC")
    with pytest.raises(ValueError, match=INIT_FAILED):
        elastic.meet(horovod.shutdown, Horovod(1).init)


def test_a_rank_whose_host_has_left_the_job_ends_well(monkeypatch, capfd):
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    monkeypatch.setenv("HOROVOD_RANK", "-1")  # (as Horovod's library does it, where Python does not look)
    horovod = Horovod(1)
    with pytest.raises(SystemExit) as left:
        elastic.meet(horovod.shutdown, horovod.init)
    assert left.value.code == 0
    assert horovod.calls == ["init"]
    assert "host has left the job" in capfd.readouterr().err


def test_silence_counts_sooner_in_elastic_jobs(monkeypatch):
    for name in ("HOROVOD_ELASTIC", "HVD_ASYNC_DEAD_AFTER", "HOROVOD_GLOO_TIMEOUT_SECONDS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(limit := "HOROVOD_GLOO_OPERATION_TIMEOUT_SECONDS", "")
    monkeypatch.delenv(limit)
    time_limits.limit_gloo()
    assert (time_limits.dead_after(), limit in os.environ) == (25.0, False)
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    time_limits.limit_gloo()
    assert time_limits.dead_after() == 7.0 < float(os.environ[limit]) < 10.0
    monkeypatch.setenv("HVD_ASYNC_DEAD_AFTER", "3.5")
    monkeypatch.delenv(limit)
    time_limits.limit_gloo()
    assert os.environ[limit] == "6"
    for gloo, found in (("120", "6"), ("5", "5")):  # (that of meeting may be longer; a shorter one holds)
        monkeypatch.setenv("HOROVOD_GLOO_TIMEOUT_SECONDS", gloo)
        monkeypatch.delenv(limit)
        time_limits.limit_gloo()
        assert os.environ[limit] == found


# -- commits ----------------------------------------------------------------------------------------------------------


class _Engine:
    """One whose ``wait`` may not be needed."""

    def __init__(self) -> None:
        self.changed = threading.Condition()

    def wait(self, ready: Callable[[], bool], _: object) -> None:
        assert ready(), "a rank waits in commit()"


@given(st.integers(1, 5), st.data())
def test_all_ranks_stop_at_the_same_commit_and_none_passes_it(ranks, data):
    """Whenever each is asked, and informed. One that was asked takes its next commit when it is informed."""
    counts, own = CommitCounts(ranks), [Commits() for _ in range(ranks)]
    informed: dict[int, int] = {}
    stopped: dict[int, int] = {}
    asked, stop = set[int](), None
    assert len(counts.ask()) == 1
    assert counts.ask() == []
    while len(stopped) < ranks:
        moves = [("ask", rank) for rank in range(ranks) if rank not in asked]
        moves += [("tell", rank) for rank in range(ranks) if stop is not None and rank not in informed]
        free = [rank for rank in range(ranks) if rank not in stopped and (rank not in asked or rank in informed)]
        moves += [("commit", rank) for rank in free]
        move, rank = data.draw(st.sampled_from(moves))
        if move == "ask":
            asked.add(rank)
            for command in counts.count(rank, own[rank].answer().made) or ():
                stop = command.commit
        elif move == "tell":
            informed[rank] = own[rank].stop_at = stop
        elif own[rank].commit(_Engine()):
            stopped[rank] = own[rank].made
        if own[rank].made > 30 and rank not in asked:
            asked.add(rank)
            for command in counts.count(rank, own[rank].answer().made) or ():
                stop = command.commit
    assert {*stopped.values()} == {stop}


def test_commits_that_no_rank_has_asked_for_are_refused():
    counts = CommitCounts(2)
    assert counts.count(0, 3) is None
    counts.ask()
    assert counts.count(0, 3) == []
    assert counts.count(0, 3) is None


def test_an_orderly_change_of_the_ranks_loses_nothing():
    reports = [Report(True, [Standing(4, 3, 3)]) for _ in range(2)]
    assert plan(reports).optimizers[0].lost == 0


def test_a_drain_of_adpsgd_that_a_death_breaks_off_leaves_this_ranks_weights():
    """The collective may have written over what it was given: a part of the others' weights, as it has come."""

    class Broken(ADPSGDWorker):
        def __init__(self) -> None:
            self._lock, self._post, self.log = threading.Lock(), NumpyMessageFormat(2, np.float32, "none", 1), None
            self._together = False
            self.flags_late = False
            self.begin(np.array([1.0, 2.0], np.float32))

        def consensus_program(self, x: np.ndarray) -> Program[np.ndarray]:
            x += 100.0
            raise InjectedError("a rank has died")
            yield

    worker, weights = Broken(), np.array([1.5, 2.0], np.float32)
    with pytest.raises(InjectedError):
        worker.gather(weights + 0, True)
    assert worker.leave(weights + 0).weights == pytest.approx(weights)
