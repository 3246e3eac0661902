"""One rank's worker: buckets that go empty, what is pending over a cut, counting in half precision, process sets."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from hvd_async.algorithms.eager.config import EagerConfig
from hvd_async.algorithms.eager.gradient_format import GradientFormat, PendingGradient, ReducedRound, Tail, count_slots
from hvd_async.algorithms.eager.rank import NAME, EagerWorker
from hvd_async.errors import GradientLossError, ReplicaStateError
from hvd_async.runtime.engine import Engine
from hvd_async.runtime.lifecycle import local_engine
from hvd_async.testing import Cluster, InjectedError, MemoryCollectives
from tests.threads.workload import Plan

HYPER: list[dict[str, Any]] = [{"lr": 1.0}]
SOLO = EagerConfig("solo", 8, 0.0, 0, 1)


def engine() -> Engine:
    """This rank's."""
    found = local_engine()
    assert found is not None
    return found


def vector(value: float, slots: int = 1, slot: int = 0, elements: int = 1) -> Any:
    """``elements`` times the value, and its count."""
    made = np.full(elements + slots, 0.0, np.float32)
    made[:elements] = value
    made[elements + slot] = 1
    return made


def worker(config: EagerConfig, **wire: Any) -> EagerWorker:
    """One whose buckets have one element and a count."""
    empty = np.zeros(2, np.float32)  # always the same one, as bindings have it
    layout = {"zeros": lambda bucket: empty, "nbytes": (8,) * config.buckets, **wire}
    return EagerWorker(engine(), config, GradientFormat(**layout), lambda flush: None)


def test_a_bucket_is_handed_over_once_and_all_are():
    def train(rank: int) -> None:
        one = worker(EagerConfig("all", 0, 0.0, 0, 2))
        with pytest.raises(ReplicaStateError, match="before it was registered"):
            one.hand_over(0, vector(1))
        one.connect(["w"], [1])
        one.hand_over(1, vector(1))
        with pytest.raises(ReplicaStateError, match="bucket 1 was handed over twice"):
            one.hand_over(1, vector(1))
        for rows in ({}, {1: vector(1)}, {0: vector(1), 1: vector(1)}, {0: vector(1), 2: vector(1)}):
            with pytest.raises(ReplicaStateError, match="lacks buckets"):
                one.step(rows, HYPER)
        with pytest.raises(ReplicaStateError, match=r"call optimizer\.step\(\) first"):
            one.check_finished(True)
        rounds: list[ReducedRound] = []
        one.step({0: vector(1)}, HYPER, rounds.append)
        assert [round_.counts for round_ in rounds] == [(2, 2)]
        one.drain()

    Cluster(2).run(train)


# -- sums outside the engine ----------------------------------------------------------------------------------


def take_promised(one: EagerWorker, rows: list[Any]) -> list[Any]:
    """Take a step whose buckets this function sums, as a training graph does, None for an empty one; return the sums,
    or none if no rank had a gradient."""
    one.promise(HYPER)
    sums = []
    for bucket, row in enumerate(rows):
        sent = np.zeros(2, np.float32) if row is None else row
        handle = engine().collectives.allreduce_sum(sent, NAME.format(one.number, bucket, 0))
        assert handle.completes_within(60)  # type: ignore[attr-defined]
        sums.append(handle.result())
    round_ = one.fulfil([each[-1:].tolist() for each in sums], [row is not None for row in rows])
    assert round_.hyper == HYPER
    one.end()
    return sums if round_.gradients else []


def test_a_rank_may_sum_a_step_itself_while_others_have_their_engines_do_it(monkeypatch):
    """Rank 0 sums its steps itself, rank 1 every other one, rank 2 none; bucket 1 of step 3 is empty everywhere."""
    steps = (6, 4, 2)
    monkeypatch.setattr(MemoryCollectives, "sum_in_graph", None, raising=False)

    def train(rank: int) -> tuple[list[list[float]], list[int], Any]:
        one, applied = worker(EagerConfig("all", 4, 0.0, 0, 2)), list[list[float]]()
        one.connect(["w"], [1])

        def apply(round_: ReducedRound) -> None:
            applied.append([float(each[0]) for each in round_.sums])

        one.apply = apply
        for step in range(1, steps[rank] + 1):
            rows = [vector(10.0**rank), None if step == 3 else vector(10.0**rank)]
            if (step + rank) % 2 < 2 - rank:
                applied.append([float(each[0]) for each in take_promised(one, rows)])
            else:
                one.step(dict(enumerate(rows)), HYPER)
            if step == 2:
                one.drain()
        one.drain()
        return applied, one.applied, one.stats()

    expected = [[111.0, 111.0]] * 2 + [[11.0, 0.0], [11.0, 11.0]] + [[1.0, 1.0]] * 2
    for rank, (applied, counts, stats) in enumerate(Cluster(3, jitter=0.001).run(train)):
        assert applied == expected
        assert counts == [12, 10]
        assert (stats.gradients_produced, stats.rounds_applied) == (steps[rank], 6)
        assert (stats.gradients_skipped, stats.staleness) == (rank < 2, {0: steps[rank]})
        assert stats.contributors == {3: 2, 2: 2, 1: 2}
        assert stats.held_bytes == 0


def test_a_promised_step_that_does_not_end_fails_the_job():
    def train(rank: int) -> None:
        one = worker(EagerConfig("all", 0, 0.0, 0, 1))
        one.connect(["w"], [1])
        take_promised(one, [vector(1)])
        one.promise(HYPER)
        if rank == 0:
            with pytest.raises(InjectedError, match="graph did not end"):
                one.drain()
        raise InjectedError("as after a failed graph")

    outcomes = Cluster(2).outcomes(train)
    assert all("as after a failed graph" in str(one) for one in outcomes)


def test_a_step_is_not_promised_while_other_gradients_are_on_their_way():
    def train(rank: int) -> None:
        one = worker(EagerConfig("all", 4, 0.0, 0, 2))
        one.restore([PendingGradient(None, []), PendingGradient(vector(1), [0])])
        one.connect(["w"], [1])
        with pytest.raises(ReplicaStateError, match="HVD_ASYNC_CONFIRM=1"):
            one.promise(HYPER)
        one.step({0: vector(1), 1: vector(1)}, HYPER)
        one.hand_over(0, vector(1))
        with pytest.raises(ReplicaStateError, match="HVD_ASYNC_CONFIRM=1"):
            one.promise(HYPER)
        one.step({1: vector(1)}, HYPER)
        one.drain()

    Cluster(1).run(train)


class Overwriting(MemoryCollectives):
    """Collectives whose sums are in place, as Horovod's: what was handed over is gone, unless it is to be kept."""

    def allreduce_sum(
        self, vector: Any, name: str, process_set: Any = None, keep: bool = False, scale: float = 1.0
    ) -> Any:
        handle = super().allreduce_sum(vector.copy(), name, process_set, keep, scale)
        if not keep:
            vector[:] = np.nan
        return handle


def overwriting(collectives: MemoryCollectives) -> MemoryCollectives:
    collectives.__class__ = Overwriting
    return collectives


# -- empty ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("quorum", ["solo", "all"])
def test_an_empty_bucket_is_a_step_and_no_gradient(quorum, early):
    """Rank 1: bucket 0 empty at step 2, both at step 4."""
    empty = {(1, 2, 0), (1, 4, 0), (1, 4, 1)}

    def train(rank: int) -> tuple[list[float], list[list[int]], Any]:
        one = worker(EagerConfig(quorum, 4, 0.0, 0, 2))
        rounds: list[ReducedRound] = []
        one.connect(["w"], [1])
        for step in range(1, 6):
            rows = {b: None if (rank, step, b) in empty else vector(10.0**rank) for b in range(2)}
            if early:
                one.hand_over(1, rows.pop(1))
            one.step(rows, HYPER, rounds.append)
        one.apply = rounds.append
        one.drain()
        sums = [float(sum(r.sums[b][0] for r in rounds)) for b in range(2)]
        return sums, [[r.counts[b] for r in rounds] for b in range(2)], one.stats()

    for rank, (sums, counts, stats) in enumerate(Cluster(2, jitter=0.001).run(train)):
        assert sums == [5 + 30, 5 + 40]
        assert [sum(each) for each in counts] == [8, 9]
        assert stats.steps == 5
        assert stats.gradients_skipped == (2 if rank else 0)
        assert stats.gradients_produced == (4 if rank else 5)  # of the bucket that had most
        assert sum(stats.staleness.values()) == (3 if rank else 5)  # of bucket 0


def test_rounds_of_nothing_are_distinguished_from_others():
    def train(rank: int) -> list[int]:
        one = worker(SOLO)
        one.connect(["w"], [1])
        rounds: list[ReducedRound] = []
        for value in (None, 1.0, None):
            one.step({0: value and vector(value)}, HYPER, rounds.append)
        one.apply = rounds.append
        one.drain()
        assert one.stats().rounds_applied == 1
        return [r.gradients for r in rounds]

    assert Cluster(1).run(train) == [[0, 1, 0]]


# -- over a cut -----------------------------------------------------------------------------------------------


def segment(
    one: Plan, first: int, states: Any, end: str
) -> list[tuple[list[ReducedRound], list[PendingGradient], int]]:
    """Every rank's steps ``first`` + 1 to ``first`` + its number of steps, on a new cluster; the last rank comes when
    the others have taken theirs. Returns rounds, what is pending, and the version."""
    last = one.size - 1
    taken = [threading.Event() for _ in range(one.size)]

    def train(rank: int) -> tuple[list[ReducedRound], list[PendingGradient], int]:
        mine, rounds = one.worker(engine()), list[ReducedRound]()
        if states is not None:
            mine.restore(states[rank])
        mine.connect(["w"], [1])
        for event in taken[:-1]:
            assert rank != last or event.wait(30)
        for step in range(first + 1, first + one.steps[0][rank] + 1):
            mine.step(one.rows(rank, step), HYPER, rounds.append)
        taken[rank].set()
        mine.apply = rounds.append
        mine.drain(flush=end == "drain")
        return rounds, mine.pending(), mine.version

    return Cluster(one.size, jitter=0.001, wrap=overwriting).run(train)


@pytest.mark.parametrize("buckets", [1, 2])
@pytest.mark.parametrize("quorum", ["solo", 2, "majority"])
def test_cuts_and_new_runs_lose_nothing(quorum, buckets):
    """Three runs of 4 steps: cut, cut, drain. Over all of them every gradient is there once."""
    config = EagerConfig(quorum, 8, 0.0, 0, buckets)
    whole = Plan(config, [(12, 12, 12)])  # (its rows have a place for every gradient)
    states, totals, held = None, [np.zeros(whole.row(0, 1, 0).size)] * buckets, 0

    class Part(Plan):
        row = staticmethod(whole.row)

    for first, end in ((0, "cut"), (4, "cut"), (8, "drain")):
        outcomes = segment(Part(config, [(4, 4, 4)]), first, states, end)
        rounds, _, version = outcomes[0]
        assert [r.index for r in rounds] == list(range(1, version + 1))
        for other, _, _ in outcomes[1:]:
            assert [r.counts for r in other] == [r.counts for r in rounds]
        totals = [total + sum(r.sums[b] for r in rounds) for b, total in enumerate(totals)]
        states = [
            [PendingGradient(v, [at - version for at in versions]) for v, versions in mine]
            for _, mine, version in outcomes
        ]
        assert all(-8 <= at <= 0 for mine in states for _, versions in mine for at in versions)
        held += sum(len(versions) for mine in states for _, versions in mine)
    for total in totals:
        assert total[: whole.total].tolist() == [1.0] * whole.total
        assert total[-1] == whole.total
    assert not any(versions for mine in states or [] for _, versions in mine)
    assert held > 0 or quorum == "majority", "nothing was ever pending: it shows nothing"


def test_pending_is_that_of_the_cut_although_others_have_gone_on():
    """Rank 0 is out of its cut and fires round 2, which takes rank 1's gradient, before rank 1 looks."""
    late, gone_on = threading.Event(), threading.Event()

    def train(rank: int) -> tuple[list[Any], int]:
        one = worker(SOLO)
        one.connect(["w"], [1])
        if rank == 1:
            assert late.wait(30)
        one.step({0: vector(1.0 + rank)}, HYPER)
        late.set()
        one.drain(False)
        if rank == 0:
            one.step({0: vector(5.0)}, HYPER)
            gone_on.set()
        else:
            assert gone_on.wait(30)
            one.engine.wait(lambda: len(one._rounds) == 1)
        version = one.version
        found = [] if rank == 0 else [(v.tolist(), at) for v, at in one.pending()]
        one.drain()
        return found, version

    assert Cluster(2, wrap=overwriting).run(train)[1] == ([([2.0, 1.0], [0])], 1)


# -- counting in half precision -------------------------------------------------------------------------------


def narrow(values: Any) -> Any:
    """Rounded to bfloat16's eight bits, to even."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32)


@pytest.mark.parametrize("slots", [1, 2])
def test_counts_are_exact_with_as_many_slots_as_they_need(slots):
    """Three of four ranks have 100, 100 and 99 gradients pending: one element of eight bits cannot hold 299."""
    staleness, steps = 100, (100, 100, 100, 99)
    assert count_slots(4, staleness, "bfloat16") == 2
    ahead = threading.Event()

    def train(rank: int) -> list[int]:
        one = worker(
            EagerConfig("solo", staleness, 0.0, 0, 1),
            zeros=lambda bucket: np.zeros(1 + slots, np.float32),
            tail=Tail(slots),
            encode=lambda vector, unit: narrow(vector),
            decode=lambda sums, bucket: narrow(sums),
        )
        one.connect(["w"], [1])
        assert rank == 0 or ahead.wait(30)
        rounds: list[ReducedRound] = []
        for _ in range(steps[rank]):
            one.step({0: vector(0.0, slots, rank % slots)}, HYPER, rounds.append)
        ahead.set()
        one.apply = rounds.append
        one.drain()
        return [r.gradients for r in rounds]

    outcomes = Cluster(4).outcomes(train)
    for outcome in outcomes:
        if slots == 1:
            assert isinstance(outcome, GradientLossError)
        else:
            assert outcome == [1] * 100 + [299]


@pytest.mark.parametrize(
    ("size", "staleness", "dtype", "slots"),
    [(1, 0, "bfloat16", 1), (128, 0, "bfloat16", 1), (129, 0, "bfloat16", 2), (8, 126, "bfloat16", 4),
     (3, 254, "bfloat16", 3), (8, 16, "float16", 1), (1000, 16, "float16", 9), (4096, 1000, "float32", 1),
     (4096, 1000, "float64", 1)],
)  # fmt: skip
def test_slots(size, staleness, dtype, slots):
    assert count_slots(size, staleness, dtype) == slots


def test_a_staleness_that_cannot_be_counted_is_refused():
    with pytest.raises(ValueError, match=r"max_staleness=255 is too large for bfloat16.*lower max_staleness"):
        count_slots(1, 255, "bfloat16")


# -- process sets ---------------------------------------------------------------------------------------------


def test_ranks_that_name_different_process_sets_are_refused():
    def train(rank: int) -> None:
        members = ((0, 1), (1, 0))[rank]
        worker(SOLO, process_set=members, members=members, process_set_id=1).connect(["w"], [1])

    for outcome in Cluster(2).outcomes(train):
        assert "Pass the same process_set on every rank of it" in str(outcome)


def test_vectors_that_turn_out_to_hold_nothing_are_neither_produced_nor_applied():
    """On a GPU a vector is emptied, its count too, after it was handed over."""

    def train(rank: int) -> list[int]:
        emptied: list[int] = []

        def take_emptied(wait: bool) -> list[list[int]]:
            found, emptied[:] = list(emptied), []
            return [found] if found else []

        config, zeros = EagerConfig("all", 0, 0.0, 0, 1), np.zeros(2, np.float32)
        wire = GradientFormat(zeros=lambda bucket: zeros, nbytes=(8,))
        one = EagerWorker(engine(), config, wire, lambda flush: None, emptied=take_emptied)
        one.connect(["w"], [1])
        counts: list[int] = []
        for step in range(4):
            bad = step in (1, 3) and (rank == 0 or step == 3)  # one rank's, then those of both
            emptied += [0] * bad
            one.step({0: zeros.copy() if bad else vector(1)}, HYPER, lambda round_: counts.append(round_.gradients))
        one.drain()  # (which checks that as many were applied as produced)
        stats = one.stats()
        assert stats.gradients_skipped == 1 + (rank == 0)
        assert stats.gradients_produced == 4 - stats.gradients_skipped
        return counts

    assert Cluster(2).run(train) == [[2, 1, 2, 0]] * 2
