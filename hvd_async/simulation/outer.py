"""Outer optimizers, simulated: ranks average all weights every so many steps, and take the next ones meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

from hvd_async.algorithms.gossip.config import AverageEntered, StartAverage
from hvd_async.algorithms.gossip.outer import Rhythm
from hvd_async.algorithms.gossip.plan import GossipPlan
from hvd_async.simulation.gossip import GossipJob, GossipRank
from hvd_async.simulation.job import Wait
from hvd_async.simulation.network import sent_bytes
from hvd_async.simulation.outcome import Setup


class OuterJob(GossipJob):
    """Local SGD, SlowMo and DiLoCo: they differ in numbers alone."""

    def __init__(self, arm: str, setup: Setup, plan: GossipPlan) -> None:
        super().__init__(arm, setup, plan)
        self._rhythm = Rhythm(plan.config.average_every, plan.config.fragments)
        self._next = [0] * setup.ranks
        """The number of the average that each rank takes next."""

    def _step(self, rank: GossipRank) -> Iterator[Wait]:
        step, late, rhythm = rank.steps + 1, self.config.max_staleness, self._rhythm
        yield self.seconds_of(rank)
        last = rhythm.until(step) - 1
        if last >= 0 and rhythm.step(last) == step:
            self._produced += 1
            self.send(rank, AverageEntered(0, last + 1, [1.0], rhythm.fragment(last)))
        while rhythm.step(self._next[rank.index]) + late <= step:
            average = self._next[rank.index]
            yield lambda average=average: average + 1 in self.averages  # type: ignore[misc]
            self.staleness[step - rhythm.step(average)] += 1
            self._next[rank.index] += 1

    def _average_bytes(self) -> float:
        return sent_bytes(self.setup.megabytes, "none") / self.config.fragments

    def _start_average(self, command: StartAverage) -> None:
        self._applied += len(command.ranks)
        if self.config.compression == "none":
            super()._start_average(command)
            return
        # Compressed, an average is two exchanges: of parts to the rank that adds them up, and of its means to all.
        ranks = len(self.ranks)
        part = self.message_bytes / self.config.fragments / ranks
        seconds = self.setup.network.alltoall_seconds((ranks - 1) * part, ranks)
        self.sent += 2 * (ranks - 1) * part
        self.wire.submit(seconds, lambda: self.wire.submit(seconds, self._end_average, command.index))
