"""One event covers all buckets of a step that the engine finds when it wakes up, after the rank reported the step."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvd_async.algorithms.eager.config import GradientReady, StepEntered
from hvd_async.algorithms.eager.gradient_format import GradientFormat
from hvd_async.algorithms.eager.rank import Entered, HandedOver, RoundsInFlight


class Bench:
    """Engine side of a rank with four buckets.

    Attributes:
        sent: events.
    """

    def __init__(self) -> None:
        self.sent: list[Any] = []
        engine: Any = SimpleNamespace(rank=0, send=self.sent.append, changed=threading.Condition())
        wire = GradientFormat(zeros=lambda bucket: np.zeros(1), nbytes=(8,) * 4)
        self.rounds = RoundsInFlight(engine, wire, lambda rounds: None, [0])

    def give(self, *buckets: int, step: int = 1, in_step: bool = False) -> None:
        """Hand over buckets of a step, ``in_step`` the rest of it; bucket 1 is empty."""
        self.rounds.is_entering = in_step
        for bucket in buckets:
            self.rounds.give(HandedOver(bucket, None if bucket == 1 else np.zeros(1), 0, step))

    def enter(self, step: int = 1) -> None:
        """Report the step."""
        self.rounds.give(Entered(step, None))
        self.rounds.is_entering = False

    def report(self, step: int = 1) -> list[Any]:
        """Return the events that the engine sends when it wakes up."""
        self.sent.clear()
        self.rounds.report(7, step)
        return list(self.sent)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_one_event_covers_all_that_backward_has_brought(bench: Bench) -> None:
    bench.give(3, 1)
    assert bench.report() == [GradientReady(7, [3, 1], 1, 0, empty=[1])]
    assert bench.report() == []


def test_what_comes_with_the_step_is_reported_with_it_and_with_the_rest(bench: Bench) -> None:
    bench.give(3)
    bench.give(2, 0, in_step=True)
    assert bench.report() == [], "the training thread is about to report the step"
    bench.enter()
    assert bench.report() == [StepEntered(7, 1, None, [3, 2, 0])]


def test_a_step_is_reported_without_buckets_too(bench: Bench) -> None:
    bench.enter()
    assert bench.report() == [StepEntered(7, 1, None)]


def test_the_next_step_is_not_taken_for_this_one(bench: Bench) -> None:
    bench.give(3)
    bench.enter()
    bench.give(2, step=2)
    assert bench.report() == [StepEntered(7, 1, None, [3])]
    bench.give(0, step=2, in_step=True)
    bench.enter(2)
    assert bench.report() == []
    assert bench.report(step=2) == [StepEntered(7, 2, None, [2, 0])]
    assert sum(len(pending.versions) for pending in bench.rounds.pending()) == 3


def test_the_peak_is_never_below_what_is_held(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """``stats()`` takes no lock, so it may read between any two assignments."""
    seen: list[bool] = []

    def set_and_look(rounds: RoundsInFlight, name: str, value: Any) -> None:
        object.__setattr__(rounds, name, value)
        counts = rounds.counts()
        seen.append(counts["held_bytes"] <= counts["peak_bytes"])

    monkeypatch.setattr(RoundsInFlight, "__setattr__", set_and_look)
    bench.rounds.count_bytes(8)
    bench.rounds.count_bytes(-8)
    assert seen
    assert all(seen)
