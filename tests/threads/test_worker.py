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
        assert one.pending() == [PendingGradient(None, [])] * 2

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
