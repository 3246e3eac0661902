"""Gossip, simulated: exchanges by one ``alltoall`` at a time and averages of all ranks, whatever the algorithm.

As ``GossipWorker`` and ``MessageExchange``; ``push_sum``, ``pairs`` and ``outer`` have the training threads.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hvd_async.algorithms.gossip.config import ALGORITHMS, ExchangeDone, StartAverage, StartExchange
from hvd_async.algorithms.gossip.machine import GossipStateMachine
from hvd_async.algorithms.gossip.plan import GossipPlan
from hvd_async.runtime.messages import Command, Drained
from hvd_async.simulation.job import Job, Rank
from hvd_async.simulation.network import ring_bytes, sent_bytes
from hvd_async.simulation.outcome import Setup
from hvd_async.simulation.wire import Delayed

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
