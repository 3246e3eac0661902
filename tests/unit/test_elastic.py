"""Elastic training, the pure half: from whose state ranks continue, and which gradients are pending then."""

from __future__ import annotations

import contextlib
import os
import threading
import types
from collections.abc import Callable
from itertools import product
from unittest.mock import Mock

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
def jobs(draw: st.DrawFn) -> tuple[np.ndarray, list[int]]:
    """A job of eager ranks: which round took each gradient [rank, bucket, step], 0 for none; the rounds each rank has
    seen."""
    ranks, steps, rounds = draw(st.integers(1, 4)), draw(st.integers(0, 4)), draw(st.integers(0, 5))
    count = ranks * BUCKETS * steps
    took = draw(st.lists(st.integers(0, rounds), min_size=count, max_size=count))
    seen = draw(st.lists(st.integers(0, rounds), min_size=ranks, max_size=ranks))
    return np.array(took, int).reshape(ranks, BUCKETS, steps), seen


def remains_of(took: np.ndarray, rank: int, seen: int) -> Remains:
    """Return what a rank has left that has seen this many rounds; each gradient is 1 at an index of its own."""
    ranks, _, steps = took.shape
    none = [PendingGradient(None, []) for _ in range(BUCKETS)]
    held = {round_: [*none] for round_ in (0, *range(seen + 1, int(took.max(initial=0)) + 1))}
    for (bucket, step), round_ in np.ndenumerate(took[rank]):
        if round_ in held:
            one = np.zeros(ranks * steps)
            one[rank * steps + step] = 1.0
            vector, versions = held[round_][bucket]
            held[round_][bucket] = PendingGradient(one if vector is None else vector + one, [*versions, step])
    return Remains(seen, in_rounds=held, pending=held.pop(0), begun=steps, ended=steps)


@given(jobs(), st.integers(0, 3), st.integers(0, 3))
def test_each_gradient_of_a_survivor_is_in_the_weights_or_pending_and_never_both(job, rounds, steps):
    """Whatever rounds each survivor has seen, and from whichever round and step they are counted: the rounds that only
    others saw count as well."""
    took, seen = job
    version, ended = max(seen), took.shape[2]
    counted = ((took > 0) & (took <= version)).astype(float)
    for rank, own in enumerate(seen):
        after = remains_of(took, rank, own).counted_from(rounds, steps).after(version + rounds, ended + steps)
        assert (after.in_rounds, after.version, after.begun) == ({}, version + rounds, ended + steps)
        for bucket, (vector, versions) in enumerate(after.pending):
            counted[:, bucket] += 0.0 if vector is None else vector.reshape(len(seen), ended)
            assert len(versions) == (0 if vector is None else vector.sum())
    np.testing.assert_array_equal(counted, 1.0)


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
    remains = Remains(3, {}, none, begun, ended, handed=frozenset(handed))
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
    assert agreed.lost == 0, "an orderly change of the ranks loses nothing"
    assert agreed.ended == reports[position].optimizers[0].ended
    assert agreed.rounds == reports[source].optimizers[0].rounds
    assert found.newcomers == frozenset(rank for rank, report in enumerate(reports) if report is NEW) - {found.position}


def test_a_state_that_cannot_be_gone_on_from_is_refused():
    with pytest.raises(ReplicaStateError, match="half applied on every rank"):
        plan([eager(6, 5, 5, fit=False), NEW])
    with pytest.raises(ReplicaStateError, match=r"\[1, 2\] optimizers"):
        plan([eager(1, 1, 1), Report(True, [Standing(1, 1, 1)] * 2)])


# -- gradients of ranks that are gone -------------------------------------------------------------------------------


@given(jobs(), st.booleans(), st.data())
def test_gradients_of_lost_ranks_in_no_round_are_counted(job, known, data):
    """``known``: the coordinator has said how many gradients each rank has handed over."""
    took, seen = job
    gone = data.draw(st.sets(st.integers(0, len(seen) - 1), max_size=len(seen) - 1))
    there = [rank for rank in range(len(seen)) if rank not in gone]
    reports = []
    for rank in there:
        own = took[rank][took[rank] > 0].tolist()
        counts = GradientCounts(
            place=rank,
            size=len(seen),
            applied=int(((took > 0) & (took <= seen[rank])).sum()),
            produced=took[rank].size,
            in_rounds={number: own.count(number) for number in {*own} if number > seen[rank]},
            pending=took[rank].size - len(own),
            handed_over=(took[0].size,) * len(seen) if known else None,
        )
        reports.append(Report(True, [Standing(seen[rank], 3, 3, gradients=counts)]))
    last = max(seen[rank] for rank in there)
    lost = int(sum(((took[rank] == 0) | (took[rank] > last)).sum() for rank in gone))
    assert plan(reports).optimizers[0].lost == (lost if known or not gone else None)


# -- meeting ----------------------------------------------------------------------------------------------------------


FAILED = ValueError(f"{INIT_FAILED}. Please check log messages")


@pytest.mark.parametrize(
    ("elastic_job", "outcomes", "error"),
    [
        (True, [FAILED, FAILED, None], None),
        (True, [FAILED] * elastic.MEETINGS, INIT_FAILED),
        (True, [ValueError("no such process set")], "process set"),
        (False, [FAILED], INIT_FAILED),
    ],
)
def test_ranks_meet_again_where_one_dies_meanwhile(monkeypatch, elastic_job, outcomes, error):
    monkeypatch.delenv("HOROVOD_ELASTIC", raising=False)
    if elastic_job:
        monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    horovod = Mock()
    horovod.init.side_effect = outcomes
    with pytest.raises(ValueError, match=error) if error else contextlib.nullcontext():
        elastic.meet(horovod.shutdown, horovod.init)
    assert [name for name, *_ in horovod.method_calls] == ["init", *["shutdown", "init"] * (len(outcomes) - 1)]


def test_a_rank_whose_host_has_left_the_job_ends_well(monkeypatch, capfd):
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    monkeypatch.setenv("HOROVOD_RANK", "-1")  # (as Horovod's library does it, where Python does not look)
    with pytest.raises(SystemExit) as left:
        elastic.meet(shutdown := Mock(), Mock(side_effect=FAILED))
    assert (left.value.code, shutdown.called) == (0, False)
    assert "host has left the job" in capfd.readouterr().err


ELASTIC = {"HOROVOD_ELASTIC": "1"}
QUICK = {**ELASTIC, "HVD_ASYNC_DEAD_AFTER": "3.5"}


@pytest.mark.parametrize(
    ("environment", "dead_after", "gloo"),
    [
        ({}, 25.0, None),
        (ELASTIC, 7.0, "9"),
        (QUICK, 3.5, "6"),
        ({**QUICK, "HOROVOD_GLOO_TIMEOUT_SECONDS": "120"}, 3.5, "6"),  # (that of meeting may be longer)
        ({**QUICK, "HOROVOD_GLOO_TIMEOUT_SECONDS": "5"}, 3.5, "5"),  # (a shorter one holds)
    ],
)
def test_silence_counts_sooner_in_elastic_jobs(monkeypatch, environment, dead_after, gloo):
    monkeypatch.setattr(os, "environ", environment.copy())
    time_limits.limit_gloo()
    assert time_limits.dead_after() == dead_after
    assert os.environ.get("HOROVOD_GLOO_OPERATION_TIMEOUT_SECONDS") == gloo


# -- commits ----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 5), st.data())
def test_all_ranks_stop_at_the_same_commit_and_none_passes_it(ranks, data):
    """Whenever each is asked, and informed. One that was asked takes its next commit when it is informed."""

    def wait(ready: Callable[[], bool], _: object) -> None:
        assert ready(), "a rank waits in commit()"

    engine = types.SimpleNamespace(changed=threading.Condition(), wait=wait)
    counts, own = CommitCounts(ranks), [Commits() for _ in range(ranks)]
    assert counts.count(0, 0) is None, "no rank has asked"
    assert (len(counts.ask()), counts.ask()) == (1, [])
    moves = st.sampled_from([(what, rank) for what in ("ask", "tell", "commit") for rank in range(ranks)])
    drawn = data.draw(st.lists(moves, max_size=40))
    asked, stopped, stop = set[int](), dict[int, int](), None
    end = list(product(("ask", "tell", *["commit"] * (len(drawn) + 1)), range(ranks)))
    for what, rank in drawn + end:
        is_free = rank not in stopped and (rank not in asked or own[rank].stop_at is not None)
        if what == "ask" and rank not in asked:
            asked.add(rank)
            for command in counts.count(rank, own[rank].answer().made):
                stop = command.commit
            assert counts.count(rank, 0) is None, "a second answer"
        elif what == "tell":
            own[rank].stop_at = stop
        elif what == "commit" and is_free and own[rank].commit(engine):
            stopped[rank] = own[rank].made
    assert stopped == dict.fromkeys(range(ranks), stop)


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
