"""Gossip, simulated: exchanges by one ``alltoall`` at a time and averages of all ranks, whatever the algorithm.

``GossipJob`` is as ``GossipWorker`` and ``MessageExchange``; the other jobs add the algorithms' training threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hvd_async.algorithms.gossip.adpsgd import Pairing
from hvd_async.algorithms.gossip.config import (
    ALGORITHMS,
    AverageEntered,
    ExchangeDone,
    MessageComing,
    MessageQueued,
    NoMessage,
    PairRequested,
    RankFinished,
    StartAverage,
    StartExchange,
    WaitingForMessage,
)
from hvd_async.algorithms.gossip.machine import GossipStateMachine
from hvd_async.algorithms.gossip.outer import Rhythm
from hvd_async.algorithms.gossip.plan import GossipPlan
from hvd_async.runtime.protocol import Command, Drained
from hvd_async.simulation.job import Delayed, Job, Rank, Setup, Wait
from hvd_async.simulation.network import ring_bytes, sent_bytes

# -- what all algorithms share -----------------------------------------------------------------------------------------


Message = tuple[int, int, tuple[int, ...]]
"""A sender, its step, its receivers."""


@dataclass(eq=False, slots=True)
class GossipRank(Rank):
    """A rank that gossips.

    Attributes:
        received: messages that are here and not taken: (sender, its step).
        expected: messages that its steps so far need, and that were not taken.
        begun: the last step whose messages were waited for.
        offered, sent: steps of which messages were queued, and those that an exchange has carried.
        outbox: receivers of the messages queued, by step.
        coming: steps whose messages were announced and not queued yet.
        averagings: of this rank with another (AD-PSGD).
    """

    received: set[tuple[int, int]] = field(default_factory=set)
    expected: set[tuple[int, int]] = field(default_factory=set)
    begun: int = 0
    offered: int = 0
    sent: int = 0
    outbox: dict[int, tuple[int, ...]] = field(default_factory=dict)
    coming: set[int] = field(default_factory=set)
    averagings: int = 0


class GossipJob(Job):
    """Exchanges and averages of one algorithm.

    Args:
        arm: its name.
        setup: what is simulated.
        plan: who sends to whom.
    """

    ranks: list[GossipRank]

    def __init__(self, arm: str, setup: Setup, plan: GossipPlan) -> None:
        kind = ALGORITHMS[plan.config.algorithm]
        self.plan, self.config, self.sends_early = plan, plan.config, kind.sends_before_update
        self.message_bytes = sent_bytes(setup.megabytes, plan.config.compression)
        self.averages: set[int] = set()
        """Averages that have completed."""
        self.completed = 0
        """Exchanges that have."""
        self._delayed = Delayed()
        self._lacking: dict[tuple[int, int], set[tuple[int, int]]] = {}
        """What exchanges that were commanded wait for, by (sender, step)."""
        self._under_way = 0
        self._produced = self._applied = 0
        machine, ranks = GossipStateMachine(0, range(setup.ranks)), [GossipRank(i) for i in range(setup.ranks)]
        super().__init__(arm, setup, machine, plan.config, ranks, own_pace=kind.pairs)

    def _has_all(self, drained: Drained[Any]) -> bool:
        return self.completed >= drained.rounds and not self._under_way

    def _conserved(self) -> tuple[int, int]:
        return self._produced, self._applied

    # -- engines ------------------------------------------------------------------------------------------------

    def queued(self, rank: int, step: int) -> bool:
        """Note that a rank has queued a step's messages, or has none; return whether an exchange has waited for it."""
        lacking = self._lacking.pop((rank, step), None)
        if lacking is None:
            return False
        lacking.discard((rank, step))
        if not lacking:
            self._delayed.advance()
        return True

    def _on_command(self, command: Command) -> None:
        match command:
            case StartExchange():
                # A rank that has announced a step's messages submits when it has queued them.
                lacking = {(sender, step) for sender, step in command.messages if step in self.ranks[sender].coming}
                self._lacking.update(dict.fromkeys(lacking, lacking))
                self._under_way += 1
                self._delayed.add(lacking, lambda: self._submit(command))
            case StartAverage():
                self._under_way += 1
                self._start_average(command)

    def _submit(self, command: StartExchange) -> None:
        messages: list[Message] = [
            (sender, step, self.ranks[sender].outbox.pop(step, ())) for sender, step in command.messages
        ]
        self._on_submit(command)
        out = Counter({sender: len(receivers) for sender, _, receivers in messages})
        into = Counter(to for _, _, receivers in messages for to in receivers)
        for pair in command.pairs:
            out.update(pair)
            into.update(pair)
        ranks, size = len(self.ranks), self.message_bytes
        busiest = size * max([*out.values(), *into.values()], default=0)
        self.sent += size * out.total() / ranks
        self._produced += out.total()
        seconds = self.setup.network.alltoall_seconds(busiest, ranks)
        self.wire.submit(seconds, self._complete, command, messages)

    def _complete(self, command: StartExchange, messages: list[Message]) -> None:
        self.completed += 1
        self._under_way -= 1
        for sender, step, receivers in messages:
            self.ranks[sender].sent += bool(receivers)
            for to in receivers:
                self.ranks[to].received.add((sender, step))
        self._applied += 2 * len(command.pairs)
        if messages:  # the first sender's receiver reports it; itself, if it sends to nobody
            first, _, receivers = messages[0]
            self.send(self.ranks[receivers[0] if receivers else first], ExchangeDone(0, command.round))
        elif command.pairs:
            self.send(self.ranks[command.pairs[0][1]], ExchangeDone(0, command.round))
        self._on_complete(command)
        self._wake()
        self._after_exchange()

    def _on_submit(self, command: StartExchange) -> None:
        """Note that all ranks have submitted an exchange."""

    def _on_complete(self, command: StartExchange) -> None:
        """Note that an exchange has completed, before ranks go on."""

    def _after_exchange(self) -> None:
        """Do what engines do after an exchange."""

    def _start_average(self, command: StartAverage) -> None:
        size, ranks = self._average_bytes(), len(self.ranks)
        self.sent += ring_bytes(size, ranks)
        self.wire.submit(self.setup.network.allreduce_seconds(size, ranks), self._end_average, command.index)

    def _average_bytes(self) -> float:
        """Return the bytes of what is averaged over all ranks: it is not compressed."""
        return sent_bytes(self.setup.megabytes, "none")

    def _end_average(self, index: int) -> None:
        self._under_way -= 1
        self.averages.add(index)
        self._wake()

    def count_taken(self, messages: int) -> None:
        """Count messages that ranks have mixed in."""
        self._applied += messages


# -- push-sum ----------------------------------------------------------------------------------------------------------
# Push-sum, simulated: SGP, OSGP, D-PSGD, exact diffusion, NoLoCo and averages, as ``PushSumWorker``'s training thread.
#
# What differs is when a rank sends, and for which messages it waits; the numbers that are mixed take no part in that.
# All ranks take as many steps, so that nobody has to be told after which step another one has finished.


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


# -- AD-PSGD -----------------------------------------------------------------------------------------------------------
# AD-PSGD, simulated: engines average pairs of ranks that compute, by the production's ``Pairing``.


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


# -- outer optimizers --------------------------------------------------------------------------------------------------
# Outer optimizers, simulated: ranks average all weights every so many steps, and take the next ones meanwhile.


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
