"""Gossip: which rank waits for which when a rank is slow, stuck, done, or has gone on already."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from hvd_async.algorithms.gossip.rank import PushSumWorker
from tests.threads.gossip_holdups import Watch, at
from tests.threads.gossip_workload import check, job, run


def missing(worker: PushSumWorker) -> tuple[int, set[int]]:
    """Its step, and the ranks whose messages it lacks."""
    return worker._step, worker._receive_buffer.missing()


# -- push-sum -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["sgp", "dpsgd", "exact-diffusion"])
def test_a_slow_rank_holds_up_ones_that_the_graph_says(algorithm):
    """Rank 0 of a ring of 8 is stuck before its step 3: news of that travels one rank a step."""
    watch, one = Watch(), job([10] * 8, algorithm)
    stuck = 4 if algorithm == "dpsgd" else 3  # D-PSGD's messages of the step have gone ahead
    expected = {
        1: (stuck, {0}),
        2: (stuck + 1, {1}),
        3: (stuck + 2, {2}),
        4: (stuck + 3, {3, 5}),
        5: (stuck + 2, {6}),
        6: (stuck + 1, {7}),
        7: (stuck, {0}),
    }
    records = run(one, before_step=at(0, 3, lambda worker: watch.until(expected, missing)), tweak=watch.tweak)
    check(one, records)
    waited = [record.stats.waited_for for record in records]
    assert min(waited[1][0], waited[7][0]) > 0
    assert [place for place in range(8) if waited[place][0] > 0] == [1, 7]
    for place, record in enumerate(records):
        assert max(waited[place]) <= record.stats.wait_s


def test_what_comes_while_messages_are_taken_in_is_not_seen_in_between():
    """The engine adds to what has come only under the lock that the training thread holds when it looks."""

    class Guarded(dict[Any, Any]):
        def __init__(self, worker: PushSumWorker) -> None:
            self.lock, self.count = worker.engine.changed, 0

        def __setitem__(self, key: Any, value: Any) -> None:
            assert self.lock._is_owned()  # type: ignore[attr-defined]
            self.count += 1
            super().__setitem__(key, value)

    guarded: list[Guarded] = []

    def tweak(worker: PushSumWorker) -> None:
        guarded.append(Guarded(worker))
        worker._receive_buffer.received = guarded[-1]

    one = job([4, 4])
    check(one, run(one, tweak=tweak))
    assert [each.count for each in guarded] == [4, 4]


# -- pairs ----------------------------------------------------------------------------------------------------


def finishing(count: threading.Semaphore) -> Callable[[PushSumWorker], None]:
    """A ``tweak``: a rank says when it has taken all its steps."""

    def tweak(worker: PushSumWorker) -> None:
        announce_finished = worker.announce_finished

        def reported(flush: bool) -> None:
            count.release()
            announce_finished(flush)

        worker.announce_finished = reported  # type: ignore[method-assign]

    return tweak
