"""Drives ranks with weights of their own, each in a thread, and records what they did. Framework-free."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvd_async.algorithms.leader.rank import LeaderWorker
from hvd_async.testing import Cluster
from tests.conformance.leader_reference import ALL, Following, Outcome
from tests.conformance.reference import Array

TIMEOUT = 30.0


class Seen:
    """Record of one rank with weights of its own, which meets the others here.

    Attributes:
        path: what the model held after each step since then, once ``end_path`` is called.
        moved: by what each local update changed this rank's (biased) weights.
        log: the worker's.
        weight: the push-sum weight at the end of the path.
        drained: what the model held at the end.
        stats: at the end.
    """

    def __init__(self, one: Any) -> None:
        self.path, self.moved, self.log = list[Array](), list[Array](), list[Any]()
        self.weight, self.drained, self.stats = 1.0, np.zeros(0), None
        self._one, self._before, worker = one, len(one.path), one.worker()
        worker.log, mix = self.log, worker.mix

        def spied_mix(before: Any, after: Any) -> Any:
            self.moved.append(np.asarray(after).astype(np.float64) - worker.weight * one.before)
            return mix(before, after)

        worker.mix = spied_mix

    def end_path(self) -> None:
        """Note what the steps so far have come to."""
        self.path = self._one.path[self._before :]
        self.weight = getattr(self._one.opt.stats(), "push_sum_weight", 1.0)

    def drain(self) -> Seen:
        """End the run by a drain."""
        self.end_path()
        self._one.opt.drain()
        self.drained, self.stats = self._one.weights(), self._one.opt.stats()
        return self


class Pace:
    """Lets each rank take a step only when the fastest has taken this many.

    Args:
        behind: for each rank, how many steps the fastest takes while it takes one; the lowest of them is 1.
    """

    def __init__(self, behind: Sequence[int]) -> None:
        self._behind, self._changed = behind, threading.Condition()
        self._steps = [0] * len(behind)
        self._over = False

    def wait(self, rank: int) -> None:
        """Before each step."""
        with self._changed:
            needed = self._steps[rank] * self._behind[rank]
            assert self._changed.wait_for(lambda: self._over or max(self._steps) >= needed, TIMEOUT)

    def stepped(self, rank: int) -> None:
        """After each."""
        with self._changed:
            self._steps[rank] += 1
            self._changed.notify_all()

    def end(self) -> None:
        """This rank has finished: no rank waits any more."""
        with self._changed:
            self._over = True
            self._changed.notify_all()


def wait_for_pulls(worker: LeaderWorker, count: int) -> None:
    """Until this many pulls have landed here, and all statistics that accompany them."""
    pulls = worker._carrier
    worker.engine.wait(lambda: pulls.completed >= count and pulls.is_idle)


def in_step(trainer: Any, steps: int, first: int = 0) -> None:
    """Take steps, and after each wait until the pulls that are due have landed, of a rank that follows.

    Args:
        trainer: a ``weight_ranks.Rank``.
        first: pulls that the optimizer does not count: those of an earlier job.
    """
    for _ in range(steps):
        trainer.step()
        if trainer.leads:
            wait_for_pulls(trainer.worker(), trainer.following.pulls(trainer.rank, len(trainer.path)) - first)


def run(
    make: Callable[[int], Any],
    steps: int | Sequence[int],
    cluster: Cluster,
    together: bool = False,
    behind: Sequence[int] = (),
) -> list[Seen]:
    """Train on all ranks, and drain.

    Args:
        make: makes a ``weight_ranks.Rank``.
        steps: of each rank, or of all.
        together: no rank continues before the pulls that its step has made due have landed, nor is done while others
            still step, so that nothing is left to chance.
        behind: see ``Pace``; empty: no rank waits for another.
    """
    meeting, pace = threading.Barrier(cluster.size), Pace(behind or [0] * cluster.size)

    def train(rank: int) -> Seen:
        trainer = make(rank)
        seen = Seen(trainer)
        meeting.wait(TIMEOUT)  # (pulls and messages are logged from the first on)
        try:
            for _ in range(steps if isinstance(steps, int) else steps[rank]):
                pace.wait(rank)
                in_step(trainer, 1) if together else trainer.step()
                pace.stepped(rank)
        finally:
            pace.end()
        if together:
            meeting.wait(TIMEOUT)  # (what is due is so for fewer ranks when others are done, which are sent less)
        return seen.drain()

    return cluster.run(train)


def check(outcome: Outcome, seen: Sequence[Seen], relative: float = 1e-5) -> None:
    """Models after each step, and what a drain makes of them: the same bits everywhere."""
    for rank, own in enumerate(seen):
        for step, (held, expected) in enumerate(zip(own.path, outcome.path[rank], strict=True), 1):
            _close(held, expected, relative, f"rank {rank}, step {step}")
        assert own.drained.tobytes() == seen[0].drained.tobytes()
        apart = float(np.mean(outcome.distances[rank] or [0.0]))
        assert abs(own.stats.distance - apart) <= 100 * relative * max(apart, 1e-2)
    _close(seen[0].drained, outcome.drained[-1], relative, "drained")


def _close(held: Array, expected: Array, relative: float, where: str) -> None:
    scale = float(np.abs(expected).max())
    np.testing.assert_allclose(held, expected, rtol=0, atol=relative * scale, err_msg=where)


def check_leaders(outcome: Outcome, following: Following, steps: int) -> set[int]:
    """Of ranks in step: each pull was due when its period was over, and the best by then led it; returns who led."""
    led = set()
    for rank, taken in enumerate(outcome.taken):
        assert len(taken) == steps
        groups = following.periods(rank)
        for step, fresh in enumerate(taken, 1):
            expected = {}
            for group, period in groups.items():
                ranks = range(len(outcome.taken)) if group == ALL else following.groups[group]
                if step > 1 and (step - 1) % period == 0:
                    expected[group] = outcome.best(ranks, step - 1)
            assert {group: leader for group, (_, leader) in fresh.items()} == expected, f"rank {rank}, step {step}"
            led |= set(expected.values())
    return led
