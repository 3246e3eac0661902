"""Gradients of a rank that steps with its host: which of them a round takes, and that an end counts again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvd_async.algorithms.eager.config import HostSteps, StartRound
from hvd_async.algorithms.eager.gradient_format import GradientFormat, ReducedRound
from hvd_async.algorithms.eager.rank import RoundsInFlight


class Bench:
    """Rank 2, the first of host 1 of two, whose collectives bring back what it gives when a test says so."""

    def __init__(self, elastic: bool = False) -> None:
        self.taken: list[float] = []
        self.landing: list[Callable[[], None]] = []
        self.delivered: list[ReducedRound] = []
        engine: Any = SimpleNamespace(
            rank=2,
            turn=lambda: None,
            submit=self._submit,
            collectives=self,
            elastic=elastic,
            clock=time.monotonic,
            changed=threading.RLock(),
        )
        wire = GradientFormat(zeros=lambda bucket: np.zeros(2), nbytes=(16,))
        self.rounds = RoundsInFlight(engine, wire, self.delivered.extend, range(4), 1)

    def allreduce_sum(self, vector: Any, name: str, process_set: Any, keep: bool, *_: Any) -> Any:
        """Take what the rank gives; the sum of all takes its place, unless it is to be kept."""
        self.taken.append(float(vector[0]))
        sums = vector + 0 if keep else vector
        sums += 1000.0
        return sums

    def _submit(self, start: Callable[[], Any], done: Callable[[Any], None], **_: Any) -> None:
        given = start()
        self.landing.append(lambda: done(given))

    def arrive(self, value: float | None, version: int = 0) -> None:
        """A gradient; None for an empty one."""
        self.rounds.arrive(0, None if value is None else np.array([value, 1.0]), version)

    def go(self, round_: int, whole: int) -> None:
        """A round starts, and this many steps of host 1 are whole."""
        self.rounds.go(StartRound(0, [0], round_, 0, [2], settled=True, hyper=[], whole=HostSteps(9, {1: whole})))


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_round_takes_what_is_whole_and_no_more(bench: Bench) -> None:
    for value in (1.0, 10.0, 100.0):
        bench.arrive(value)
    bench.go(1, 0)
    bench.go(2, 2)
    bench.go(3, 3)
    assert bench.taken == [0.0, 11.0, 100.0]


def test_an_empty_gradient_is_one_of_the_hosts_steps(bench: Bench) -> None:
    bench.arrive(None)
    bench.arrive(1.0)
    bench.go(1, 1)
    bench.go(2, 2)
    assert bench.taken == [0.0, 1.0]


def test_late_steps_are_added_up_when_they_are_whole(bench: Bench) -> None:
    for value, whole in ((1.0, 1), (10.0, 2)):
        bench.rounds.count_bytes(16)
        bench.arrive(value)
        bench.rounds.end_step(whole)
    assert [vector.tolist() for vector, _ in bench.rounds.pending()] == [[11.0, 2.0]]
    assert bench.rounds.counts()["held_bytes"] == 16


def test_a_late_step_is_kept_from_rounds_that_started_before(bench: Bench) -> None:
    """Round 5 waits for the name of round 1, which is in flight here."""
    for round_ in range(1, 6):
        bench.go(round_, 0)
    bench.arrive(1.0)
    bench.rounds.end_step(1)
    bench.landing[0]()
    bench.go(6, 1)
    bench.landing[1]()
    assert bench.taken == [0.0] * 5 + [1.0]


def test_what_lands_after_an_end_tells_nothing_of_the_steps_after_it(bench: Bench) -> None:
    bench.arrive(1.0)
    bench.go(1, 1)
    for round_ in range(2, 6):
        bench.go(round_, 1)
    bench.rounds.end()
    for land in list(bench.landing):
        land()
    bench.landing[-1]()
    assert [round_.whole for round_ in bench.delivered] == [0] * 5
    bench.arrive(10.0)
    bench.go(6, 0)
    bench.go(7, 1)
    assert bench.taken == [1.0, *[0.0] * 5, 10.0]


@pytest.mark.parametrize("host", [1, None])
def test_what_a_round_under_way_will_carry_is_not_saved_by_a_cut(bench: Bench, host: int | None) -> None:
    """The fifth round waits for the name of the first, and takes what is pending when that has landed."""
    bench.rounds._host = host
    for round_ in range(1, 6):
        bench.go(round_, 0)
    bench.arrive(7.0)
    bench.rounds.end()
    bench.rounds.keep_for_cut()
    kept = bench.rounds.at_cut
    bench.landing[0]()
    assert bench.taken == [0.0, 0.0, 0.0, 0.0, 7.0]
    assert [(vector, versions) for vector, versions in kept or []] == [(None, [])]


def test_what_no_round_will_carry_is_saved_by_a_cut(bench: Bench) -> None:
    bench.go(1, 0)
    bench.arrive(7.0)
    bench.rounds.end()
    bench.rounds.keep_for_cut()
    assert [vector.tolist() for vector, _ in bench.rounds.at_cut or []] == [[7.0, 1.0]]


def test_where_training_continues_without_lost_ranks_gradients_are_kept_until_their_round_is_there() -> None:
    bench = Bench(elastic=True)
    for value in (1.0, 10.0):
        bench.arrive(value)
    bench.go(1, 1)
    bench.go(2, 2)
    bench.landing[0]()
    assert list(bench.rounds.unfinished()) == [2]
    (kept,) = bench.rounds.unfinished()[2]
    assert (float(kept.vector[0]), kept.versions) == (10.0, [0])
