"""Push-sum, simulated: SGP, OSGP, D-PSGD, exact diffusion, NoLoCo and averages, as ``PushSumWorker``'s training thread.

What differs is when a rank sends, and for which messages it waits; the numbers that are mixed take no part in that. All
ranks take as many steps, so that nobody has to be told after which step another one has finished.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hvd_async.algorithms.gossip.config import (
    AverageEntered,
    MessageComing,
    MessageQueued,
    NoMessage,
    WaitingForMessage,
)
from hvd_async.runtime.messages import Drained
from hvd_async.simulation.gossip import GossipJob, GossipRank
from hvd_async.simulation.job import Wait


class PushSumJob(GossipJob):
    """Ranks that send weights to the next ones of a graph and wait for theirs."""

    def _step(self, rank: GossipRank) -> Iterator[Wait]:
        step, late = rank.steps + 1, self.config.max_staleness
        yield self.seconds_of(rank)
        if late:
            self._announce(rank, step)
        if self.plan.moves(step):  # back-pressure
            yield lambda: rank.offered - rank.sent <= (0 if late else 1)
        if late:
            yield from self._await_messages(rank, step)
            self._take(rank, step, step - 1)
        if step == 1 or not self.sends_early:
            self._offer(rank, step)
        if self.sends_early:
            self._announce(rank, step + 1)
        if not late:
            yield from self._await_messages(rank, step)
        self._take(rank, step, step)
        if self.plan.averages(step):
            index = step // self.config.average_every
            self.send(rank, AverageEntered(0, index, [1.0]))
            yield lambda: index in self.averages
        if self.sends_early:
            self._offer(rank, step + 1)

    def _announce(self, rank: GossipRank, step: int) -> None:
        if self.plan.out_edges(rank.index, step):
            rank.coming.add(step)
            self.send(rank, MessageComing(0, step))

    def _offer(self, rank: GossipRank, step: int) -> None:
        if not self.plan.moves(step):
            return
        receivers = tuple(receiver for receiver, _ in self.plan.out_edges(rank.index, step))
        rank.offered += bool(receivers)
        if receivers or step in rank.coming:
            rank.outbox[step] = receivers
        rank.coming.discard(step)
        if not self.queued(rank.index, step):
            self.send(rank, MessageQueued(0, step) if receivers else NoMessage(0, step))

    def missing(self, rank: GossipRank) -> set[int]:
        """Return the ranks whose messages a rank's step still waits for."""
        latest = rank.begun - self.config.max_staleness
        return {sender for sender, step in rank.expected - rank.received if step <= latest}

    def _await_messages(self, rank: GossipRank, step: int) -> Iterator[Wait]:
        rank.begun = step
        rank.expected.update((sender, step) for sender, _ in self.plan.in_edges(rank.index, step))
        if self.missing(rank):
            self.send(rank, WaitingForMessage(0, self.completed))
            yield lambda: not self.missing(rank)

    def _take(self, rank: GossipRank, step: int, until: int) -> None:
        taken = [message for message in rank.received if message[1] <= until]
        self.staleness.update(max(0, step - sent) for _, sent in taken)
        rank.received.difference_update(taken)
        rank.expected.difference_update(taken)
        self.count_taken(len(taken))

    def _after_exchange(self) -> None:
        """Ranks that still wait for a message announce that they have none for the next exchange."""
        for waiting in self._waiting.values():
            if self.missing(self.ranks[waiting.index]):
                self.send(waiting, WaitingForMessage(0, self.completed))

    def _has_all(self, drained: Drained[Any]) -> bool:
        if not super()._has_all(drained):
            return False
        for rank in self.ranks:  # at the end all that is left is mixed in; of no step: discarded at both ends
            self.count_taken(len(rank.received))
            rank.received.clear()
        return True
