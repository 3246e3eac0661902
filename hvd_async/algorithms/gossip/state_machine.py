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
   that rank sleeps. (Messages of hosts that are averaged in pairs stay in their host.) When a rank has no message in a
   step it announces so: it takes no part in the exchange, and is not waited for.
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

What an event costs does not grow with the number of ranks: changes are noted as they happen. Work on all ranks is done
where as many events have led to it: when an exchange of their messages starts, or an average of theirs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hvd_async.algorithms.gossip.message_queues import MessageQueues
from hvd_async.algorithms.gossip.messages import (
    STAGES,
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
    senders_of,
    spans_of,
)
from hvd_async.algorithms.gossip.options import ALGORITHMS
from hvd_async.algorithms.gossip.pair_requests import PairRequests
from hvd_async.algorithms.gossip.readiness import Readiness, Reason
from hvd_async.errors import ProtocolError
from hvd_async.runtime.messages import Command, OptimizerEvent, Registered
from hvd_async.runtime.state_machine import StateMachine

SMOOTHING = 0.2
"""Weight of the last exchange in the running mean of their durations."""
AHEAD = 8
"""Sending steps that a rank's messages may be ahead of the slowest rank (law 2)."""


class GossipStateMachine(StateMachine[GossipConfig]):
    """Exchanges, pairs and averages of one optimizer."""

    def __init__(self, optimizer: int, ranks: Sequence[int]) -> None:
        super().__init__(optimizer, ranks)
        self._queues = MessageQueues(self.ranks)
        self._requests = PairRequests(self.ranks)
        self._readiness = Readiness(self.ranks, self.ranks)
        """Anew after each end. All three are of use once all ranks have registered."""
        self._coming: dict[int, int] = {}
        """The step of which each rank will have messages once it has those of earlier steps."""
        self._coming_steps: dict[int, int] = {}
        """How many ranks have announced messages of each step."""
        self._granted: dict[int, int] = {}
        """The last step of each rank whose exchange started before its messages were queued, since the last drain."""
        self._starved: dict[int, int] = {}
        """Ranks that wait for a message that no exchange so far has had, and how many exchanges they had seen then."""
        self._averages: dict[int, dict[int, AverageEntered]] = {}
        """Averages that have not started, by number: the ranks that entered."""
        self._inside: dict[int, int] = {}
        """How many active ranks have entered each of these."""
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
        pairs = ALGORITHMS[config.algorithm].pairs
        if pairs and not fit:
            raise ProtocolError(f"optimizer {self._optimizer} has neighbours that are none of its {size} ranks")
        self._queues = MessageQueues(self.ranks, STAGES if config.local_size > 1 else 1)
        if pairs:
            self._requests = PairRequests(self.ranks, config.neighbours, config.local_size)
        self._readiness = self._all_ready(config)
        for rank in self._done:
            self._readiness.finish(rank)
            self._requests.finish(rank)
        return config

    def _all_ready(self, config: GossipConfig) -> Readiness:
        """Return the readiness of ranks of which none has done anything yet."""
        by_host = config.local_size > 1 and ALGORITHMS[config.algorithm].pairs
        return Readiness(self.ranks, self.ranks, config.local_size, by_host)

    def _on_event(self, rank: int, event: OptimizerEvent, now: float) -> list[Command]:
        match event:
            case MessageComing(_, key):
                self._check_offer(rank, event, key)
                if rank in self._coming or key <= self._readiness.told(rank):
                    raise ProtocolError(f"rank {rank} announced message {key} after others")
                self._coming[rank] = key
                self._coming_steps[key] = self._coming_steps.get(key, 0) + 1
            case MessageQueued(_, key) | NoMessage(_, key) if key == self._granted.get(rank):
                pass  # it was sent before this rank knew
            case MessageQueued(_, key):
                self._check_offer(rank, event, key)
                if not self._queues.has(rank):
                    self._readiness.add(rank, Reason.MESSAGE)
                self._queues.add(rank, key, now)
                self._has_told(rank, key)
            case NoMessage(_, key):
                self._check_offer(rank, event, key)
                self._readiness.send(rank, key)
                self._has_told(rank, key)
            case PairRequested():
                self._wanted(rank, event, now)
            case WaitingForMessage(_, seen):
                self._running(rank, event)
                self._feed(rank)
                if seen >= self._round:
                    self._starved[rank] = seen
                    self._readiness.add(rank, Reason.STARVING)
            case AverageEntered():
                self._enter(rank, event)
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
        if self._queues.holds(rank, key):
            raise ProtocolError(f"rank {rank} offered message {key} twice")

    def _has_told(self, rank: int, step: int) -> None:
        """Note that a rank has queued messages of a step, or announced none."""
        self._readiness.tell(rank, step)
        self._comes_no_more(rank)
        self._feed(rank)

    def _comes_no_more(self, rank: int) -> None:
        step = self._coming.pop(rank, None)
        if step is not None:
            self._coming_steps[step] -= 1
            if not self._coming_steps[step]:
                del self._coming_steps[step]

    def _feed(self, rank: int) -> None:
        """Note that a rank waits no more for a message that was in no exchange before."""
        if self._starved.pop(rank, None) is not None:
            self._readiness.drop(rank, Reason.STARVING)

    def _wanted(self, rank: int, event: OptimizerEvent, now: float) -> None:
        if not ALGORITHMS[self._running(rank, event).algorithm].pairs:
            raise ProtocolError(f"rank {rank} wants to be averaged with a neighbour, which only AD-PSGD does")
        if self._requests.add(rank, now):  # sent again, if a pair that it did not request was in flight
            self._readiness.add(rank, Reason.PAIR)

    def _enter(self, rank: int, event: AverageEntered) -> None:
        parts, index = self._running(rank, event).local_size, event.index
        if len(event.weights) != parts:
            raise ProtocolError(f"rank {rank} is in an average with {len(event.weights)} weights, and has {parts}")
        last = self._entered.get(rank, 0)
        if index != last + 1 or (self._is_in_average(rank) and not self._goes_on):
            raise ProtocolError(f"rank {rank} is in average {index}, and entered {last} before")
        self._averages.setdefault(index, {})[rank] = event
        self._inside[index] = self._inside.get(index, 0) + 1
        self._entered[rank] = index
        self._readiness.add(rank, Reason.AVERAGE)

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
        averages, due = self._due_averages(), [] if self._flights else self._due_exchange(now)
        return [*averages, *due, *self._announced_exchange(now)]

    def _due_exchange(self, now: float) -> list[Command]:
        """Start an exchange of waiting messages and pairs, if it is time and none is under way."""
        until, wants = self._limit(), bool(self._requests.waiting)
        queued = self._queues.since(until)
        if self._config is None or (queued is None and not wants):
            return []
        waits = min(math.inf if queued is None else queued, self._requests.since if wants else math.inf)
        since = waits if ALGORITHMS[self._config.algorithm].pairs else max(self._free_since, waits)
        lacks = self._readiness.lacks(None if queued is None else self._queues.earliest)
        if lacks and now < since + self._duration:
            self._wake_at = since + self._duration
            return []
        exchange = self._next(until)
        if exchange is None:
            return []
        self._flights[exchange.round] = now
        return [exchange]

    def _announced_exchange(self, now: float) -> list[Command]:
        """Start the exchange of a step's messages before they are queued, if all active ranks will have some."""
        active = self._readiness.active
        alike = len(self._coming_steps) == 1 and len(self._coming) == len(active)  # (comparing all ranks takes long)
        if self._queues or not alike or self._coming.keys() != active:
            return []
        messages = [(rank, key) for key in self._coming_steps for rank in sorted(active)]
        self._coming.clear()
        self._coming_steps.clear()
        self._begin_round()
        self._granted.update(messages)
        for rank, key in messages:
            self._readiness.tell(rank, key)
            self._readiness.send(rank, key)
        self._flights[self._round] = now
        return [StartExchange(self._optimizer, self._round, senders_of(messages))]

    def _begin_round(self) -> None:
        """Count an exchange; what ranks wait for may be in it."""
        self._round += 1
        for rank in [rank for rank, seen in self._starved.items() if seen < self._round]:
            self._feed(rank)

    def _limit(self) -> float:
        """Return the last step of which messages may go; hosts that are averaged in pairs wait for no other."""
        assert self._config is not None
        if self._pairs_hosts:
            return math.inf
        slowest = self._readiness.slowest // (STAGES if self._of_hosts else 1)
        return slowest + AHEAD * self._config.period

    def _due_averages(self) -> list[Command]:
        """Start averages that all active ranks have entered: they enter them in order."""
        due: list[Command] = []
        while self._averages:
            index = next(iter(self._averages))
            if self._inside[index] < len(self._readiness.active):
                break
            due.append(self._start_average(index))
        return due

    def _start_average(self, index: int) -> Command:
        there = sorted(self._averages.pop(index).items())  # in one order, so that sums are the same to the bit
        del self._inside[index]
        for rank, _ in there:
            self._readiness.drop(rank, Reason.AVERAGE)
        weights = [sum(part) for part in zip(*(own.weights for _, own in there), strict=True)]
        return StartAverage(self._optimizer, index, spans_of(rank for rank, _ in there), weights, there[0][1].part)

    def _next(self, until: float = math.inf) -> StartExchange | None:
        """Return the next exchange, of waiting messages of steps up to ``until`` and of pairs; None if there are no
        such messages, and no waiting rank has a partner."""
        queued, can_pair = self._queues.since(until), self._requests.can_pair
        if self._pairs_hosts and queued is not None and can_pair:
            can_pair = self._requests.since < queued
            queued = None if can_pair else queued
        if queued is None and not can_pair:
            return None
        messages = [] if queued is None else self._queues.take(until)
        self._begin_round()
        for rank, key in messages:
            if not self._queues.has(rank):
                self._readiness.drop(rank, Reason.MESSAGE)
            self._readiness.send(rank, max(key, self._readiness.sent(rank)))
        pairs, met = self._requests.pair(self._round) if can_pair else ([], [])
        for rank in met:
            self._readiness.drop(rank, Reason.PAIR)
        return StartExchange(self._optimizer, self._round, senders_of(messages), pairs)

    # -- ends -------------------------------------------------------------------------------------------------

    def _check_finished(self, rank: int) -> None:
        if self._is_in_average(rank) and not self._goes_on:
            raise ProtocolError(f"rank {rank} is done although it waits for an average")

    def _forget(self, rank: int) -> None:
        for index in [index for index, there in self._averages.items() if there.pop(rank, None) is not None]:
            self._readiness.drop(rank, Reason.AVERAGE)
            self._inside[index] -= rank in self._readiness.active
            if not self._averages[index]:
                del self._averages[index], self._inside[index]

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
        self._comes_no_more(rank)
        self._feed(rank)
        if self._requests.finish(rank):
            self._readiness.drop(rank, Reason.PAIR)
        self._readiness.finish(rank)
        for index, there in self._averages.items():
            self._inside[index] -= rank in there
        return [self._retired(rank), *self._advance(now)]

    def _retired(self, rank: int) -> RankFinished:
        return RankFinished(self._optimizer, rank, self._produced[rank][0] - self._bases[rank], rank in self._absent)

    def _on_all_finished(self, rank: int, now: float) -> tuple[list[Command], int]:
        assert self._config is not None
        self._requests.restart()
        commands: list[Command] = [self._start_average(index) for index in sorted(self._averages)]
        while self._queues:
            commands += [exchange for exchange in [self._next()] if exchange is not None]
        if self._pairs_hosts and any(own[0] != self._bases[rank] for rank, own in self._produced.items()):
            self._round += 1
            commands.append(StartExchange(self._optimizer, self._round, gathers=True))
        self._readiness = self._all_ready(self._config)
        for record in (self._coming, self._coming_steps, self._granted, self._starved, self._entered):
            record.clear()
        self._flights.clear()  # ranks know themselves which exchanges they have not completed
        self._bases = {done: produced[0] for done, produced in self._produced.items()}
        self._wake_at = None
        return commands, self._round
