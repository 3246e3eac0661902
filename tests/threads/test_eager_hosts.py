"""Partial allreduce whose ranks step host by host: a host's gradients of a step go together, whatever else happens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import pytest

from hvd_async.algorithms.eager.config import EagerConfig
from hvd_async.algorithms.eager.gradient_format import ReducedRound
from hvd_async.algorithms.eager.rank import EagerWorker
from hvd_async.errors import ReplicaStateError
from hvd_async.runtime.lifecycle import local_engine
from hvd_async.testing import Cluster
from tests.conftest import LONG_RUN
from tests.covering import covering
from tests.threads.workload import GATE_TIMEOUT, Plan, Record, check_promises, plan, run, work

DIMENSIONS: list[tuple[Any, ...]] = [
    ("solo", "majority", 2, 0.75, "all", "auto"),
    (0, 1, 2, 16),  # staleness
    ((1, 2), (1, 3), (2, 2), (2, 3), (3, 2)),  # hosts, and their ranks
    (None, 0, -1),  # the slow one
    ((1, False), (2, False), (3, True)),  # buckets, and whether some leave before the step
]


def carried(plan: Plan, record: Record, bucket: int) -> list[dict[int, list[int]]]:
    """The steps of each rank that each round has carried, read off its values."""
    counts = [sum(segment[rank] for segment in plan.steps) for rank in range(plan.size)]
    starts = [0, *accumulate(counts)]
    rounds = [np.flatnonzero(round_.sums[bucket][: plan.total]) for round_ in record.rounds]
    return [
        {rank: [int(at) - starts[rank] + 1 for at in places if starts[rank] <= at < starts[rank + 1]]
         for rank in range(plan.size)}
        for places in rounds
    ]  # fmt: skip


def check_together(plan: Plan, records: Sequence[Record]) -> None:
    """The promises, and that each round carries the same steps of all of a host's ranks, as far as they have them.

    Raises:
        AssertionError: it is not so.
    """
    check_promises(plan, records)
    size, ends = plan.config.local_size, len(plan.steps)
    if ends > 1:
        return  # (steps are counted from 0 again after each end)
    for bucket in range(plan.config.buckets):
        for steps in carried(plan, records[0], bucket):
            for first in range(0, plan.size, size):
                least = min(plan.steps[0][first : first + size])
                own = [[step for step in steps[rank] if step <= least] for rank in range(first, first + size)]
                assert own == own[:1] * size, f"the ranks of a host went apart: {steps}"


def joined(plan: Plan, kept: Sequence[Any] | None = None) -> tuple[EagerWorker, Record]:
    """A rank that has met the others, and the rounds that it applies; ``kept``: gradients pending at an earlier cut."""
    engine = local_engine()
    assert engine is not None
    worker, record = plan.worker(engine), Record()
    worker.apply = record.rounds.append
    if kept is not None:
        worker.restore(list(kept))
    worker.connect(["w"], [1])
    return worker, record


@pytest.mark.parametrize(
    ("quorum", "staleness", "shape", "slow", "buckets"), covering(DIMENSIONS, 3 if LONG_RUN else 2), ids=str
)
def test_hosts_go_together(quorum, staleness, shape, slow, buckets):
    (hosts, local), (count, early) = shape, buckets
    quorum, size = min(quorum, hosts) if quorum == 2 else quorum, hosts * local
    slow = None if slow is None or quorum == "auto" else slow % size
    one = plan(quorum, staleness, [5] * size, slow, count, early=early, local_size=local)
    records = run(one, jitter=0.002 * ((size + staleness) % 2))
    check_together(one, records)
    for rank, record in enumerate(records):
        assert record.per_step == records[rank - rank % local].per_step, "a host's ranks continued with other weights"
        if hosts == 1:
            assert record.stats is not None
            assert [round_.gradients for round_ in record.rounds] == [size] * 5, "one host is all"
            assert set(record.stats.staleness) == {0}


def test_a_count_is_of_hosts():
    one = plan(2, 16, [6] * 6, slow=5, local_size=2)
    records = run(one)
    check_together(one, records)
    given = [round_.gradients for round_ in records[0].rounds]
    assert all(count >= 4 for count in given[:6])
    assert all(count % 2 == 0 for count in given)


@pytest.mark.parametrize("staleness", [1, 2, 5])
def test_staleness_reaches_its_bound_on_all_ranks_of_a_slow_host(staleness):
    one = plan("solo", staleness, [staleness + 4] * 4, slow=3, local_size=2)
    records = run(one)
    check_together(one, records)
    bounds = [max(record.stats.staleness) for record in records if record.stats is not None]
    assert bounds[2:] == [staleness] * 2


@pytest.mark.parametrize("quorum", ["solo", "majority", 2, "all"])
@pytest.mark.parametrize("steps", [(5, 0), (0, 4, 3, 0), (0, 0, 5, 5), (1, 7, 3, 3), (0, 4, 9, 2)])
def test_uneven_and_zero_batches(quorum, steps):
    """A host continues with its ranks that have batches left."""
    one = plan(min(quorum, len(steps) // 2) if quorum == 2 else quorum, 2, steps, local_size=2)
    check_together(one, run(one, jitter=0.001))


@pytest.mark.parametrize("quorum", ["solo", 2])
@pytest.mark.parametrize("staleness", [0, 3])
@pytest.mark.parametrize("pace", ["steps", "rounds"])
def test_drains_in_the_middle_and_training_on(quorum, staleness, pace):
    if pace == "rounds" and not staleness:
        staleness = 1  # (it needs some)
    config = EagerConfig(quorum, staleness, 0.0, 5, 2, pace, local_size=2)
    one = Plan(config, [(3, 2, 4, 4), (0, 0, 0, 0), (0, 3, 1, 1), (2, 2, 2, 2)])
    check_together(one, run(one, jitter=0.001))


def test_a_late_host_finds_the_same_three_rounds_on_its_ranks():
    """Both hand their first step over when host 0 has finished three, one long after the other; then none is left."""
    one_is_in = threading.Event()
    one = plan("solo", 16, [3] * 4, local_size=2)

    def train(rank: int) -> tuple[list[int], list[dict[int, list[int]]]]:
        worker, record = joined(one)
        returned = []
        for step in range(1, 4):
            if rank >= 2 and step == 1:
                worker.engine.wait(lambda: len(worker._rounds) == 3)
            if rank == 3 and step == 1:
                assert one_is_in.wait(GATE_TIMEOUT)
            rows = one.rows(rank, step)
            if rank == 2 and step == 1:
                worker.hand_over(0, rows.pop(0))
                worker.engine.call_soon(one_is_in.set)  # (after what was posted before)
            returned.append(worker.step(rows, [{"lr": 1.0}], record.rounds.append))
        worker.drain()
        return returned, carried(one, record, 0)

    results = Cluster(4).run(train)
    assert [returned for returned, _ in results] == [[1, 1, 1]] * 2 + [[3, 0, 0]] * 2
    alone = [{0: [step], 1: [step], 2: [], 3: []} for step in (1, 2, 3)]
    assert all(rounds == [*alone, {0: [], 1: [], 2: [1, 2, 3], 3: [1, 2, 3]}] for _, rounds in results)


def test_rounds_that_come_while_a_late_rank_wakes_belong_to_its_next_step():
    """Rank 2 continues two rounds later than rank 3, after the same rounds; what was late is one vector by then."""
    ended = threading.Event()
    one = plan("solo", 16, [5, 5, 1, 1], local_size=2)

    def train(rank: int) -> list[int]:
        worker, record = joined(one)
        waits = worker.engine.wait

        def late(*wait: Any) -> None:
            worker.engine.wait = waits  # type: ignore[method-assign]
            waits(*wait)
            assert worker._in_flight.pending()[0].versions == [0]
            ended.set()
            worker.engine.wait(lambda: len(worker._rounds) == 5)

        if rank >= 2:
            worker.engine.wait(lambda: len(worker._rounds) == 3)
        if rank == 2:
            worker.engine.wait = late  # type: ignore[method-assign]
        returned = []
        for step in range(1, 6 if rank < 2 else 2):
            if step == 4:
                assert ended.wait(GATE_TIMEOUT)
            returned.append(worker.step(one.rows(rank, step), [{"lr": 1.0}], record.rounds.append))
        worker.drain()
        return returned

    assert Cluster(4).run(train) == [[1] * 5, [1] * 5, [3], [3]]


def test_an_empty_gradient_of_one_rank_leaves_the_others_of_its_host_in():
    """NaN on rank 1: its second step goes empty, with rank 0's."""
    one = plan("all", 4, [3] * 4, local_size=2)

    def train(rank: int) -> list[dict[int, list[int]]]:
        worker, record = joined(one)
        for step in range(1, 4):
            empty = (rank, step) == (1, 2)
            worker.step({0: None} if empty else one.rows(rank, step), [{"lr": 1.0}], record.rounds.append)
        worker.drain()
        assert worker.stats().gradients_applied == 11
        return carried(one, record, 0)

    for rounds in Cluster(4).run(train):
        assert rounds == [{rank: [step] if (rank, step) != (1, 2) else [] for rank in range(4)} for step in (1, 2, 3)]


def test_after_a_cut_each_rank_keeps_its_own_and_a_new_job_takes_it_up():
    """Host 1 is late with two steps when all cut; what it has pending goes in the resumed job's first round."""
    one = plan("solo", 16, [2] * 4, local_size=2)

    def cut(rank: int) -> Any:
        engine = local_engine()
        assert engine is not None
        worker = one.worker(engine)
        worker.connect(["w"], [1])
        if rank >= 2:
            worker.engine.wait(lambda: len(worker._rounds) == 2)
        for step in (1, 2):
            worker.step(one.rows(rank, step), [{"lr": 1.0}])
        worker.drain(flush=False)
        held = worker.pending()
        assert [len(versions) for _, versions in held] == [2 * (rank >= 2)]
        return held

    kept = Cluster(4).run(cut)

    def resume(rank: int) -> list[int]:
        worker, record = joined(one, kept[rank])
        worker.drain()
        assert [list(places) for places in (carried(one, record, 0)[0][2], carried(one, record, 0)[0][3])] == [
            [1, 2]
        ] * 2
        return [round_.gradients for round_ in record.rounds]

    assert Cluster(4).run(resume) == [[4]] * 4


@pytest.mark.parametrize("handed", [0, 1, 2])
def test_a_host_continues_without_a_rank_whose_optimizer_is_gone(handed):
    """Rank 1 discards its optimizer in its second step, when ``handed`` of the two buckets have been handed over."""
    one = plan("solo", 4, [4, 4, 4, 4], buckets=2, local_size=2)

    def train(rank: int) -> list[ReducedRound]:
        worker, record = joined(one)
        for step in range(1, 5):
            rows = one.rows(rank, step)
            if rank == 1 and step == 2:
                for bucket in range(handed):
                    worker.hand_over(bucket, rows[bucket])
                worker.delete()
                return []
            worker.step(rows, [{"lr": 1.0}], record.rounds.append)
        worker.drain()
        return record.rounds

    results = Cluster(4).run(train)
    for rounds in (results[0], results[2], results[3]):
        assert [sum(round_.counts[bucket] for round_ in rounds) for bucket in (0, 1)] == [
            13 + (handed > bucket) for bucket in (0, 1)
        ]


def times_out(worker: EagerWorker, monkeypatch: pytest.MonkeyPatch, step: Callable[[], object]) -> None:
    """A step waits for its host's other ranks longer than it may."""
    monkeypatch.setattr(worker.engine, "timeout", 0.05)
    with pytest.raises(Exception, match="waited longer than"):
        step()
    monkeypatch.setattr(worker.engine, "timeout", float("inf"))
    assert not worker.ready


@pytest.mark.parametrize("late", [1, 2])
def test_a_step_that_was_broken_off_while_it_waited_for_its_host_is_ended_by_the_next_call(late, monkeypatch):
    """Rank 2 is late with host 1 and times out in this step while rank 3 computes; its next call brings no gradient. In
    the second step it has seen the rounds of all its steps before."""
    timed_out = threading.Event()
    one = plan("solo", 16, [3] * 4, local_size=2)

    def train(rank: int) -> tuple[list[int], int]:
        worker, record = joined(one)
        if rank >= 2:
            worker.engine.wait(lambda: len(worker._rounds) == 3)

        def step(number: int) -> int:
            return worker.step(one.rows(rank, number), [{"lr": 1.0}], record.rounds.append)

        for number in range(1, 4):
            if rank == 2 and number == late:
                times_out(worker, monkeypatch, lambda number=number: step(number))  # type: ignore[misc]
                timed_out.set()
                assert step(number) == (3 if late == 1 else 0)
                continue
            if rank == 3 and number == late:
                assert timed_out.wait(GATE_TIMEOUT)
            step(number)
        worker.drain()
        return [round_.gradients for round_ in record.rounds], worker.stats().gradients_produced

    assert Cluster(4).run(train) == [([2, 2, 2, 6], 3)] * 4


def test_a_step_waits_for_all_buckets_of_its_host(monkeypatch):
    """The first bucket of host 1 is in round 1, the second is not, as rank 3 has not handed it over."""
    first_in, timed_out = threading.Barrier(3), threading.Event()
    one = plan("solo", 16, [1] * 4, buckets=2, local_size=2)

    def train(rank: int) -> list[tuple[int, ...]]:
        worker, record = joined(one)
        rows = one.rows(rank, 1)
        if rank >= 2:
            worker.hand_over(0, rows.pop(0))
            worker.engine.wait(lambda: worker._in_flight.landed[0] == 1 or bool(worker._in_flight._flights))
        if rank != 1:
            first_in.wait(GATE_TIMEOUT)
        if rank == 1:
            worker.engine.wait(lambda: bool(worker._in_flight._flights))
        if rank >= 2:
            worker.engine.wait(lambda: worker._in_flight.landed[1] == 1)
        if rank == 2:
            times_out(worker, monkeypatch, lambda: worker.step(rows, [{"lr": 1.0}], record.rounds.append))
            timed_out.set()
        if rank == 3:
            assert timed_out.wait(GATE_TIMEOUT)
        worker.step(rows, [{"lr": 1.0}], record.rounds.append)
        worker.drain()
        return [round_.counts for round_ in record.rounds]

    results = Cluster(4).run(train)
    assert results == [results[0]] * 4
    assert [sum(counts) for counts in zip(*results[0], strict=True)] == [4, 4]


def test_one_round_a_step_is_refused_where_ranks_skip_rounds_together():
    def train(rank: int) -> None:
        engine = local_engine()
        assert engine is not None
        one = Plan(EagerConfig("solo", 4, 0.0, 0, 1, "rounds", local_size=2), [(1, 1)])
        worker = one.worker(engine)
        worker.connect(["w"], [1])
        with pytest.raises(ReplicaStateError, match="applies one round per step"):
            worker.finish_step(one.rows(rank, 1), [{"lr": 1.0}], 1)
        worker.step(one.rows(rank, 1), [{"lr": 1.0}])
        worker.drain()

    Cluster(2).run(train)


# -- do these tests see a bug? --------------------------------------------------------------------------------


def _takes_all(worker: EagerWorker) -> None:
    """Take what is here, and not what is whole."""
    release = worker._in_flight.release
    worker._in_flight.release = lambda bucket, whole: release(bucket, None)  # type: ignore[method-assign]


def test_the_test_of_hosts_goes_red():
    """A rank whose host is not whole gives its gradient to another host's round."""
    in_first, first_round = threading.Event(), threading.Event()
    one = plan("solo", 2, [2] * 4, local_size=2)

    def tweak(worker: EagerWorker) -> None:
        _takes_all(worker)
        rank, step = worker.engine.rank, worker.step

        def gated(*given: Any) -> int:
            if rank == 3 and not worker.version:
                assert first_round.wait(GATE_TIMEOUT)
            if rank < 2 and not worker.version:
                assert in_first.wait(GATE_TIMEOUT)
            if rank == 2 and not worker._steps:
                worker.hand_over(0, given[0].pop(0))
                worker.engine.call_soon(in_first.set)  # (after what was posted before)
            count = step(*given)
            if rank == 0:
                first_round.set()
            return count

        worker.step = gated  # type: ignore[method-assign, assignment]

    records = Cluster(4).run(work(one, tweak))
    with pytest.raises(AssertionError, match="went apart"):
        check_together(one, records)
