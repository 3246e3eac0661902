"""State machine of gossip: which messages travel together, which ranks are averaged as pairs.

The laws it keeps:

1. *One exchange at a time*, each one collective of all ranks. When the last has completed and every active rank has a
   message for the next, or waits itself for a message that was in none so far, the next starts. Else it starts once it
   could have started for as long as an exchange takes: waiting longer would cost more than a second exchange, waiting
   less would make many small ones of one. In AD-PSGD no step waits for an exchange, so the next starts when its first
   rank has waited so long. When all active ranks have announced messages of one step, and all of earlier steps have
   gone, their exchange starts at once, beside the last one: engines submit it when their messages are queued, so no
   rank waits for the coordinator then.
2. *In order.* A rank's messages go in the order in which it queued them, one step's in an exchange. When several ranks
   have messages, only those of the earliest step go: in one step of a graph no rank receives more than others, and
   ranks fall into step so. Hierarchical gossip is excepted, since its messages of one step are of three stages. When
   messages are more than ``AHEAD`` sending steps ahead of the slowest active rank, they wait: they would pile up where
   that rank sleeps. When a rank has no message in a step it announces so: it takes no part in the exchange, and is not
   waited for.
3. *Pairs* (AD-PSGD). When a rank requests a pair, it gets a neighbour that requests one too, the longest-waiting ranks
   first; when there is none, an active neighbour that does not. A rank is in one pair of an exchange at most. So nobody
   waits for a neighbour that computes. Of hosts one rank requests pairs for all, and an exchange has either messages,
   for which only the sending hosts' ranks are waited, or pairs, whichever has waited longer.
4. *Averages.* When every active rank has entered its average of that number, the average over all that have entered
   starts. A rank under an outer optimizer goes on before that: it may enter the next ones, and finish.
5. *Ends.* When a rank finishes, all are told: nobody may wait for messages that it will not send. When all have
   finished, queued messages are sent, and averages that some have entered start, before the ranks are told; and hosts
   that are averaged in pairs gather last, if any rank has taken a step.
6. *Illegal moves change nothing.* They raise ProtocolError.

The graph, and who waits for whom in it, is the ranks' own business: they need no permission for a step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hvd_async.algorithms.gossip.messages import (
    AverageEntered,
    ExchangeDone,
    GossipConfig,
    MessageComing,
    MessageQueued,
    NoMessage,
    PairRequested,
    RankFinished,
    StartAverage,
    StartExchange,
    WaitingForMessage,
)
from hvd_async.algorithms.gossip.options import ALGORITHMS
from hvd_async.errors import ProtocolError
from hvd_async.runtime.messages import Command, OptimizerEvent, Registered
from hvd_async.runtime.state_machine import StateMachine

SMOOTHING = 0.2
"""Weight of the last exchange in the running mean of their durations."""
AHEAD = 8
"""Sending steps that a rank's messages may be ahead of the slowest rank (law 2)."""


@dataclass(frozen=True)
class _Offer:
    key: int
    at: float


class GossipStateMachine(StateMachine[GossipConfig]):
    """Exchanges, pairs and averages of one optimizer."""

    def __init__(self, optimizer: int, ranks: Sequence[int]) -> None:
        super().__init__(optimizer, ranks)
        self._offers: dict[int, deque[_Offer]] = {rank: deque() for rank in self.ranks}
        self._wants: dict[int, float] = {}
        """Ranks that requested a pair, in order, and when."""
        self._gone: dict[int, int] = {}
        """The last step of each rank whose messages were sent, since the last drain."""
        self._told: dict[int, int] = {}
        """The last step of which each rank has queued messages, or announced none, since the last drain."""
        self._coming: dict[int, int] = {}
        """The step of which each rank will have messages once it has those of earlier steps."""
        self._granted: dict[int, int] = {}
        """The last step of each rank whose exchange started before its messages were queued, since the last drain."""
        self._starved: dict[int, int] = {}
        """Ranks that wait for a message, and how many exchanges they had seen then."""
        self._met: dict[int, int] = dict.fromkeys(self.ranks, 0)
        """The last exchange in which a rank was averaged."""
        self._averages: dict[int, dict[int, AverageEntered]] = {}
        """Averages that have not started, by number: the ranks that entered."""
        self._entered: dict[int, int] = {}
        """The last average that each rank has entered, since the last drain."""
        self._bases: dict[int, int] = dict.fromkeys(self.ranks, 0)
        """Each rank's steps at the last drain."""
        self._round = 0
        self._flights: dict[int, float] = {}
        """Exchanges that have not completed, and when they started."""
        self._duration = 0.0
        """Mean duration of an exchange, in seconds."""
        self._free_since = -math.inf
        """When the last exchange completed."""
        self._wake_at: float | None = None

    def tick(self, now: float) -> list[Command]:
        """Start the exchange that only waited for more ranks."""
        return self._advance(now)

    def deadline(self) -> float | None:
        """Return when an exchange starts, whoever is in it."""
        return self._wake_at

    def _blocked_on(self) -> tuple[str, frozenset[int]] | None:
        if self._averages:
            number = min(self._averages)
            return f"average {number} over all ranks", frozenset(self._active() - self._averages[number].keys())
        return None

    def _on_registered(self, rank: int, event: Registered[Any], now: float) -> list[Command]:
        commands = super()._on_registered(rank, event, now)
        if self._config is not None:  # ranks that had finished before are announced now
            commands[1:1] = [self._retired(done) for done in sorted(self._done)]
        return commands

    def _on_all_registered(self, config: Any) -> GossipConfig:
        assert isinstance(config, GossipConfig)
        if config.algorithm not in ALGORITHMS:
            raise ProtocolError(f"optimizer {self._optimizer} gossips by {config.algorithm!r}, which is no algorithm")
        size = len(self.ranks)
        places, left = divmod(size, max(1, config.local_size))
        fit = not left and len(config.neighbours) == places
        fit = fit and all(0 <= peer < places for own in config.neighbours for peer in own)
        if ALGORITHMS[config.algorithm].pairs and not fit:
            raise ProtocolError(f"optimizer {self._optimizer} has neighbours that are none of its {size} ranks")
        return config

    def _on_event(self, rank: int, event: OptimizerEvent, now: float) -> list[Command]:
        match event:
            case MessageComing(_, key):
                self._check_offer(rank, event, key)
                if rank in self._coming or key <= self._told.get(rank, 0):
                    raise ProtocolError(f"rank {rank} announced message {key} after others")
                self._coming[rank] = key
            case MessageQueued(_, key) | NoMessage(_, key) if key == self._granted.get(rank):
                pass  # it was sent before this rank knew
            case MessageQueued(_, key):
                self._check_offer(rank, event, key)
                self._offers[rank].append(_Offer(key, now))
                self._told[rank] = key
                self._coming.pop(rank, None)
                self._starved.pop(rank, None)
            case NoMessage(_, key):
                self._check_offer(rank, event, key)
                self._told[rank] = self._gone[rank] = key
                self._coming.pop(rank, None)
                self._starved.pop(rank, None)
            case PairRequested():
                self._wanted(rank, event, now)
            case WaitingForMessage(_, seen):
                self._running(rank, event)
                self._starved[rank] = seen
            case AverageEntered(_, index, weights):
                parts = self._running(rank, event).local_size
                if len(weights) != parts:
                    raise ProtocolError(f"rank {rank} is in an average with {len(weights)} weights, and has {parts}")
                last = self._entered.get(rank, 0)
                if index != last + 1 or (self._is_in_average(rank) and not self._goes_on):
                    raise ProtocolError(f"rank {rank} is in average {index}, and entered {last} before")
                self._averages.setdefault(index, {})[rank] = event
                self._entered[rank] = index
            case ExchangeDone(_, number):
                self._landed(rank, number, now)
            case _:
                raise ProtocolError(f"rank {rank} sent {type(event).__name__} of a gossip")
        return self._advance(now)

    def _check_offer(self, rank: int, event: OptimizerEvent, key: int) -> None:
        if self._config is None:
            self._running(rank, event)
        elif rank in self._done and self._config.local_size == 1:  # else its engine still serves its host
            raise ProtocolError(f"rank {rank} offered message {key} although it is done")
        if any(offer.key == key for offer in self._offers[rank]):
            raise ProtocolError(f"rank {rank} offered message {key} twice")

    def _wanted(self, rank: int, event: OptimizerEvent, now: float) -> None:
        if not ALGORITHMS[self._running(rank, event).algorithm].pairs:
            raise ProtocolError(f"rank {rank} wants to be averaged with a neighbour, which only AD-PSGD does")
        self._wants.setdefault(rank, now)  # sent again, if a pair that it did not request was in flight

    def _landed(self, rank: int, number: int, now: float) -> None:
        if not 1 <= number <= self._round:
            raise ProtocolError(f"rank {rank} saw exchange {number} land, of {self._round}")
        if number in self._flights:
            took = now - self._flights.pop(number)
            self._duration += (took - self._duration) * (SMOOTHING if self._duration else 1.0)
            self._free_since = now

    # -- what goes --------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> list[Command]:
        self._wake_at = None
        if self._config is None:
            return []
        return [*self._due_averages(), *self._due_exchange(now), *self._announced_exchange(now)]

    def _due_exchange(self, now: float) -> list[Command]:
        """Start an exchange of waiting messages and pairs, if it is time."""
        assert self._config is not None
        group = self._group()
        waits = [self._offers[rank][0].at for rank in group] + list(self._wants.values())
        if self._flights or not waits or self._is_ahead(group):
            return []
        there = self._accounted(group)
        since = min(waits) if ALGORITHMS[self._config.algorithm].pairs else max(self._free_since, min(waits))
        if not self._active() <= there and now < since + self._duration:
            self._wake_at = since + self._duration
            return []
        exchange = self._next(now)
        if exchange is None:
            return []
        self._flights[exchange.round] = now
        return [exchange]

    def _announced_exchange(self, now: float) -> list[Command]:
        """Start the exchange of a step's messages before they are queued, if all active ranks will have some."""
        active, keys = self._active(), set(self._coming.values())
        if self._coming.keys() != active or len(keys) != 1 or any(self._offers.values()):
            return []
        messages = [(rank, key) for key in keys for rank in sorted(active)]
        self._coming.clear()
        self._round += 1
        for record in (self._granted, self._told, self._gone):
            record.update(messages)
        self._flights[self._round] = now
        return [StartExchange(self._optimizer, self._round, messages)]

    def _group(self) -> list[int]:
        """Return the ranks whose first messages go together."""
        keys = {rank: offers[0].key for rank, offers in self._offers.items() if offers}
        assert self._config is not None
        if self._config.local_size > 1:
            return list(keys)
        earliest = min(keys.values(), default=0)
        return [rank for rank, key in keys.items() if key == earliest]

    def _is_ahead(self, group: Sequence[int]) -> bool:
        """Return whether the messages of these ranks must wait for the slowest rank."""
        assert self._config is not None
        if not group or self._config.local_size > 1:
            return False
        slowest = min((self._told.get(rank, 0) for rank in self._active()), default=0)
        return self._offers[group[0]][0].key > slowest + AHEAD * self._config.period

    def _accounted(self, group: Sequence[int]) -> set[int]:
        """Return the ranks that are in the next exchange, or cannot be before it has completed."""
        there = {rank for rank, offers in self._offers.items() if offers} | self._wants.keys()
        there |= {rank for rank, seen in self._starved.items() if seen >= self._round}
        there.update(*self._averages.values())
        if self._pairs_hosts:
            there |= self._elsewhere(group) if group else set(self.ranks) - self._elsewhere(self._wants)
        elif group and not self._of_hosts:
            earliest = self._offers[group[0]][0].key
            there |= {rank for rank, key in self._gone.items() if key >= earliest}
        return there

    def _elsewhere(self, ranks: Iterable[int]) -> set[int]:
        """Return the ranks of hosts that have none of these."""
        hosts = set(map(self._first, ranks))
        return {rank for rank in self.ranks if self._first(rank) not in hosts}

    def _due_averages(self) -> list[Command]:
        due: list[Command] = []
        for index in sorted(self._averages):
            if self._averages[index].keys() >= self._active():
                # in one order, so that sums are the same to the bit
                there = sorted(self._averages.pop(index).items())
                weights = [sum(part) for part in zip(*(own.weights for _, own in there), strict=True)]
                part = there[0][1].part
                due.append(StartAverage(self._optimizer, index, [rank for rank, _ in there], weights, part))
        return due

    def _next(self, now: float) -> StartExchange | None:
        """Return the next exchange, of all waiting messages and pairs; None if no waiting rank has a partner."""
        group, pairs = self._group(), self._pair()
        if self._pairs_hosts and group and pairs:
            if min(self._wants.values()) < min(self._offers[rank][0].at for rank in group):
                group = []
            else:
                pairs = []
        messages = [(rank, self._offers[rank].popleft().key) for rank in group]
        self._gone |= {rank: max(key, self._gone.get(rank, key)) for rank, key in messages}
        if not messages and not pairs:
            return None
        self._round += 1
        paired = {rank for pair in pairs for rank in pair}
        self._wants = {rank: at for rank, at in self._wants.items() if self._first(rank) not in paired}
        self._met.update(dict.fromkeys(paired, self._round))
        return StartExchange(self._optimizer, self._round, messages, pairs)

    def _pair(self) -> list[tuple[int, int]]:
        """Return pairs by law 3, of hosts by their first ranks; of several neighbours the one whose last average is
        longest ago."""
        assert self._config is not None
        size, asking = self._config.local_size, dict.fromkeys(map(self._first, self._wants))
        active = set(map(self._first, self._active()))
        taken: set[int] = set()
        pairs: list[tuple[int, int]] = []
        for wanting in (True, False):
            for rank in asking:
                if rank in taken:
                    continue
                peers = (self.ranks[place * size] for place in self._config.neighbours[self.ranks.index(rank) // size])
                free = [p for p in peers if p in active and p not in taken and (p in asking) == wanting]
                if free:
                    partner = min(free, key=lambda peer: self._met[peer])
                    taken |= {rank, partner}
                    pairs.append((rank, partner))
        return pairs

    def _first(self, rank: int) -> int:
        """Return the first rank of a rank's host; the rank itself where hosts are not averaged."""
        place = self.ranks.index(rank)
        return self.ranks[place - place % self._config.local_size] if self._config is not None else rank

    # -- ends -------------------------------------------------------------------------------------------------

    def _check_finished(self, rank: int) -> None:
        if self._is_in_average(rank) and not self._goes_on:
            raise ProtocolError(f"rank {rank} is done although it waits for an average")

    def _forget(self, rank: int) -> None:
        for there in self._averages.values():
            there.pop(rank, None)
        self._averages = {index: there for index, there in self._averages.items() if there}

    def _on_event_of_absent(self, rank: int, event: OptimizerEvent, now: float) -> list[Command]:
        """Handle an event of a rank whose optimizer is deleted: its engine completes exchanges, and serves its host."""
        serves = isinstance(event, ExchangeDone) or (isinstance(event, MessageQueued) and self._of_hosts)
        return self._on_event(rank, event, now) if serves else []

    @property
    def _of_hosts(self) -> bool:
        return self._config is not None and self._config.local_size > 1

    def _is_in_average(self, rank: int) -> bool:
        return any(rank in there for there in self._averages.values())

    @property
    def _goes_on(self) -> bool:
        """Whether ranks that have entered an average go on before it starts."""
        return self._config is not None and ALGORITHMS[self._config.algorithm].outer is not None

    @property
    def _pairs_hosts(self) -> bool:
        return self._config is not None and self._of_hosts and ALGORITHMS[self._config.algorithm].pairs

    def _on_rank_finished(self, rank: int, now: float) -> list[Command]:
        if self._config is None:
            return []  # others may not have registered: they are told when all have
        self._coming.pop(rank, None)
        self._wants.pop(rank, None)
        self._starved.pop(rank, None)
        return [self._retired(rank), *self._advance(now)]

    def _retired(self, rank: int) -> RankFinished:
        return RankFinished(self._optimizer, rank, self._produced[rank][0] - self._bases[rank], rank in self._absent)

    def _on_all_finished(self, rank: int, now: float) -> tuple[list[Command], int]:
        """Start exchanges of all queued messages."""
        self._wants.clear()
        self._starved.clear()
        commands: list[Command] = [*self._due_averages()]
        while any(self._offers.values()):
            exchange = self._next(now)
            assert exchange is not None
            commands.append(exchange)
        if self._pairs_hosts and any(own[0] != self._bases[rank] for rank, own in self._produced.items()):
            self._round += 1
            commands.append(StartExchange(self._optimizer, self._round, gathers=True))
        for record in (self._gone, self._told, self._coming, self._granted, self._entered):
            record.clear()
        self._flights.clear()  # ranks know themselves which exchanges they have not completed
        self._averages.clear()
        self._bases = {done: produced[0] for done, produced in self._produced.items()}
        self._wake_at = None
        return commands, self._round
