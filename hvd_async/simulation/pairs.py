"""AD-PSGD, simulated: engines average pairs of ranks that compute, by the production's ``Pairing``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from hvd_async.algorithms.gossip.adpsgd import Pairing
from hvd_async.algorithms.gossip.config import PairRequested, RankFinished, StartExchange
from hvd_async.algorithms.gossip.plan import GossipPlan
from hvd_async.runtime.messages import Command, Drained
from hvd_async.simulation.gossip import GossipJob, GossipRank
from hvd_async.simulation.job import Rank, Wait
from hvd_async.simulation.outcome import Setup


class PairJob(GossipJob):
    """Ranks that are averaged with a neighbour while they compute."""

    def __init__(self, arm: str, setup: Setup, plan: GossipPlan) -> None:
        super().__init__(arm, setup, plan)
        self._announced: set[int] = set()
        self._pairings = [
            Pairing(self.config.max_local_steps, plan.config.neighbours[rank.index], self._may_ask(rank), ask)
            for rank in self.ranks
            for ask in [lambda rank=rank: self.send(rank, PairRequested(0))]
        ]

    def _may_ask(self, rank: Rank) -> Callable[[], bool]:
        return lambda: rank.index not in self._announced

    def _step(self, rank: GossipRank) -> Iterator[Wait]:
        pairing, before = self._pairings[rank.index], rank.averagings
        yield self.seconds_of(rank)
        yield pairing.may_step
        self.staleness[rank.averagings - before] += 1
        pairing.stepped()
        pairing.ask()

    def _counts(self, rank: Rank) -> list[int]:
        self._announced.add(rank.index)  # it finishes, and requests no more
        return super()._counts(rank)

    def _on_submit(self, command: StartExchange) -> None:
        for pair in command.pairs:
            for rank in pair:
                self._pairings[rank].granted()

    def _on_complete(self, command: StartExchange) -> None:
        for pair in command.pairs:
            for rank in pair:
                self.ranks[rank].averagings += 1
                self._pairings[rank].averaged()

    def _on_command(self, command: Command) -> None:
        super()._on_command(command)
        if isinstance(command, RankFinished):
            for pairing in self._pairings:
                pairing.finished(command.rank)

    def _has_all(self, drained: Drained[Any]) -> bool:
        return self.completed >= drained.rounds
