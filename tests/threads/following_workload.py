"""Ranks that follow a leader as threads, on least squares in float64: the worker itself, without a framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvd_async.algorithms.leader.config import LeaderConfig
from hvd_async.algorithms.leader.rank import LeaderWorker
from hvd_async.algorithms.leader.selection import Strengths
from hvd_async.runtime.lifecycle import local_engine
from hvd_async.runtime.process_sets import RankGroup
from hvd_async.stats import LeaderStats
from tests.conformance.gossip_reference import Problem
from tests.conformance.leader_reference import Following
from tests.conformance.reference import Array, start


class Follower:
    """One rank, for ``leader_drive``.

    Attributes:
        opt: itself.
        path: the weights after each step.
        calls: what is done before each step, with its number from 1.
    """

    def __init__(self, problem: Problem, following: Following, rank: int) -> None:
        engine, size = local_engine(), len(problem.start)
        assert engine is not None
        easgd = following.algorithm == "easgd"
        groups = [list(range(size))] if easgd else [list(ranks) for ranks in following.groups]
        config = LeaderConfig(
            following.algorithm,
            groups,
            following.global_period if easgd else following.local_period,
            following.global_period,
            "",
            loss_window=following.loss_window,
        )
        strengths = Strengths(
            following.local_pull, following.global_pull, following.local_prox, following.global_prox,
            following.beta / size if following.alpha is None else following.alpha, following.beta,
        )  # fmt: skip
        own = next(ranks for ranks in groups if rank in ranks)
        self._worker = LeaderWorker(
            engine, config, strengths, RankGroup(None, tuple(range(size)), rank, 0, size),
            own if len(groups) > 1 else None, following.loss_window, self._finish,
        )  # fmt: skip
        self.problem, self.following, self.rank = problem, following, rank
        self.path: list[Array] = []
        self.x, self.state = problem.start[rank].copy(), start(problem.start[rank])
        self.opt = self
        self.calls: list[Callable[[int], object]] = []

    def worker(self) -> LeaderWorker:
        """The first call meets the other ranks."""
        if not self._worker.agreed:
            self._worker.begin(self.x.copy())
            self._worker.connect(["w"], [1])
        return self._worker

    def step(self) -> None:
        """One; it must wait for no rank."""
        number = len(self.path) + 1
        for call in self.calls:
            call(number)
        worker, loss = self.worker(), self.following.loss_of(self.x, self.rank, number)
        if loss is not None:
            worker.record_loss(loss)
        wait = worker.engine.wait
        worker.engine.wait = waits  # type: ignore[method-assign]
        try:
            worker.check_step()
            gradient = self.problem.gradient(self.x, self.rank, number)
            after, self.state = self.problem.update(self.x, gradient, self.state)
            self.x = worker.mix(self.x, after)
            worker.publish(self.x)
        finally:
            worker.engine.wait = wait  # type: ignore[method-assign]
        self.path.append(self.weights())

    def train(self, steps: int) -> Follower:
        """Several."""
        for _ in range(steps):
            self.step()
        return self

    def weights(self) -> Array:
        return self.x.copy()

    def drain(self, flush: bool = True) -> None:
        """Or cut."""
        self.worker().engine.drain(flush)

    def stats(self) -> LeaderStats:
        return self._worker.stats()

    def _finish(self, flush: bool) -> None:
        self.x = self._worker.gather(self.x.copy(), flush)


def waits(*args: Any) -> None:
    """Instead of ``Engine.wait``."""
    raise AssertionError("a step waits for others")
