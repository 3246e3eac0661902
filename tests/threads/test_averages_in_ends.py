"""Averages on a rank that has finished early, while the others take many more: they must not pile up there."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from hvd_async.algorithms.gossip.outer_worker import OuterWorker
from tests.threads.gossip_holdups import GATE_TIMEOUT
from tests.threads.gossip_workload import EXACT, job, run
from tests.threads.test_outer import OUTER

STEPS, MORE = 4, 60


class Waits:
    """The others step only while no more than so many averages wait on rank 0, once it has finished.

    Args:
        most: averages.

    Attributes:
        followed: averages that rank 0 has taken in ends.
    """

    def __init__(self, most: int) -> None:
        self._most, self._taken = most, threading.Condition()
        self._first: Any = None
        self.followed = 0

    def tweak(self, worker: Any) -> None:
        """Watch rank 0's worker."""
        assert isinstance(worker, OuterWorker)
        if worker.engine.rank:
            return
        self._first, take = worker, worker._take

        def taken(*args: Any) -> None:
            take(*args)
            with self._taken:
                self.followed += worker._moved is not None
                self._taken.notify_all()

        worker._take = taken  # type: ignore[method-assign]

    def before_step(self, place: int, step: int, worker: Any) -> None:
        """Wait for rank 0 to take averages."""
        if place and step > STEPS:
            with self._taken:
                assert self._taken.wait_for(lambda: len(self._first._averages.results()) <= self._most, GATE_TIMEOUT), (
                    "averages pile up on a rank that has finished"
                )


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("more", [{}, {"max_staleness": 3, "fragments": 3}, {"max_staleness": 0}], ids=str)
@pytest.mark.parametrize("algorithm", OUTER)
def test_they_are_taken_as_they_come(algorithm: str, more: dict[str, Any], cut: bool, monkeypatch: Any) -> None:
    """No more wait than a rank that goes on may have under way; what comes out is as if all were taken last."""
    ends = ((STEPS, MORE, MORE), (9, 9, 9))
    one = job(ends, algorithm, None, average_every=4, cuts=frozenset({0} if cut else ()), **more)
    waits = Waits(one.plan.config.fragments)
    records = run(one, tweak=waits.tweak, before_step=waits.before_step)
    assert waits.followed >= (MORE - STEPS) // 4 - 1
    monkeypatch.setattr(OuterWorker, "_follows", False)
    for record, last in zip(records, run(one), strict=True):
        for segment, other in zip(record.segments, last.segments, strict=True):
            np.testing.assert_allclose(np.array(segment.path), np.array(other.path), **EXACT)
            np.testing.assert_allclose(segment.z, other.z, **EXACT)
