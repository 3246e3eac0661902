"""State machine of gossip: groups messages into exchanges, and pairs ranks.

Its invariants ("laws"):

1. *One exchange at a time*; each is one collective of all ranks. The next exchange starts when the last has completed
   and every active rank has a message for it, or waits itself for a message that was in none so far. Otherwise it
   starts after a delay of the mean duration of an exchange: waiting longer would cost more than a second exchange,
   waiting less would split one exchange into many small ones. In AD-PSGD no step waits for an exchange, so this delay
   counts from the first rank's request. When all active ranks have announced messages of one step, and all messages of
   earlier steps were sent, their exchange starts at once, concurrently with the last one. Engines submit it when their
   messages are queued, so no rank waits for the coordinator.
2. *In order.* A rank's messages are sent in the order in which they were queued, those of one step per exchange. If
   several ranks have messages, only those of the earliest step are sent: in one step of a graph no rank receives more
   than others, and ranks fall into step. Hosts are exempt, since their messages of one step have several stages.
   Messages more than ``AHEAD`` sending steps ahead of the slowest active rank wait, since they would pile up on that
   rank. (Queued messages of hosts that do not gossip stay within their host.) A rank without a message in a step
   announces so; it is then not in the exchange, and not waited for.
3. *Pairs* (AD-PSGD). A rank that requests a pair gets a neighbour that also requests one, the longest-waiting ranks
   first; if there is none, an active neighbour that does not. A rank is in at most one pair per exchange. So no rank
   waits for a neighbour that computes. On hosts one rank requests pairs for all. An exchange then has either messages
   or pairs, whichever has waited longer. For messages of hosts that do not gossip, only the ranks of the sending hosts
   are waited for.
4. *Averages.* The average number n starts, over all ranks that have entered it, when every active rank has. A rank
   under an outer optimizer continues before that: it may enter the next averages, and finish.
5. *Ends.* When a rank finishes, all ranks are notified: no rank may wait for messages that it will not send. When all
   have finished, queued messages are sent, and averages that some have entered start, before the ranks are notified.
   Hosts that are averaged in pairs gather last, if any rank has taken a step.
6. *Illegal moves change nothing.* They raise ProtocolError.

Ranks follow the graph on their own, and wait for their neighbours' messages: they need no permission for a step.

In this file: ``MessageQueues`` (law 2), ``Readiness`` (law 1), ``PairRequests`` (law 3), then ``GossipStateMachine``.

The cost of an event does not depend on the number of ranks. Work over all ranks is done only when an exchange of their
messages, or an average, starts: as many events have led to it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hvd_async.algorithms.gossip import outer
from hvd_async.algorithms.gossip.config import (
    ALGORITHMS,
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
from hvd_async.errors import ProtocolError
from hvd_async.runtime.machine import StateMachine
from hvd_async.runtime.protocol import Command, OptimizerEvent, Registered

# -- queued messages ---------------------------------------------------------------------------------------------------
# Messages that ranks have queued and no exchange has taken: each rank's in order, and the first messages by their step,
# so that the next exchange is found without a loop over all ranks.


@dataclass
class _Group:
    """Ranks whose first messages are of one step.

    Attributes:
        step: that step.
        since: time at which the first of these messages was queued.
        ranks: the ranks.
    """

    step: int
    since: float
    ranks: set[int] = field(default_factory=set)


@dataclass(init=False)
class MessageQueues:
    """Queues of unsent messages, one per rank.

    Args:
        ranks: all ranks, in order.
        stages: stages per step, each with a key of its own. Above 1 (hierarchical gossip) the first messages of all
            ranks are sent together, whatever their step. At 1 a message's key is its step, and an exchange has messages
            of one step only.
    """

    _place: dict[int, int]
    _stages: int
    _queues: dict[int, dict[int, float]]
    """Time at which each message was queued, by rank and key, in queueing order."""
    _groups: list[_Group]
    """Ranks grouped by the step of their first message, in ascending order."""

    def __init__(self, ranks: Sequence[int], stages: int = 1) -> None:
        self._place, self._stages = {rank: place for place, rank in enumerate(ranks)}, stages
        self._queues = {rank: {} for rank in ranks}
        self._groups = []

    def __bool__(self) -> bool:
        return bool(self._groups)

    def has(self, rank: int) -> bool:
        """Return whether a rank has any queued message."""
        return bool(self._queues[rank])

    def holds(self, rank: int, key: int) -> bool:
        """Return whether a rank's message with this key is queued."""
        return key in self._queues[rank]

    def add(self, rank: int, key: int, now: float) -> None:
        """Queue a message."""
        queue = self._queues[rank]
        queue[key] = now
        if len(queue) == 1:
            self._lead(rank, key, now)

    def _lead(self, rank: int, key: int, at: float) -> None:
        """Add a rank's first message to the groups."""
        step = key // self._stages
        place = bisect_left(self._groups, step, key=lambda group: group.step)
        if place == len(self._groups) or self._groups[place].step != step:
            self._groups.insert(place, _Group(step, at))
        group = self._groups[place]
        group.since = min(group.since, at)
        group.ranks.add(rank)

    @property
    def earliest(self) -> int:
        """The earliest step with queued messages; there must be some."""
        return self._groups[0].step

    def since(self, until: float) -> float | None:
        """Return the time at which the first message of the next exchange was queued; None if there is none.

        Args:
            until: the last step whose messages may be sent.
        """
        if self._stages == 1:  # (called after each event)
            return self._groups[0].since if self._groups and self._groups[0].step <= until else None
        return min((group.since for group in self._next(until)), default=None)

    def _next(self, until: float) -> list[_Group]:
        """Return the groups of the next exchange."""
        groups = self._groups if self._stages > 1 else self._groups[:1]
        return [group for group in groups if group.step <= until]

    def take(self, until: float) -> list[tuple[int, int]]:
        """Remove and return the next exchange's messages: (rank, key), in rank order; ``until`` as in ``since``."""
        groups = self._next(until)
        del self._groups[: len(groups)]
        taken = []
        for rank in sorted({rank for group in groups for rank in group.ranks}, key=self._place.__getitem__):
            queue = self._queues[rank]
            key = next(iter(queue))
            del queue[key]
            taken.append((rank, key))
        for rank, _ in taken:
            for key, at in self._queues[rank].items():
                self._lead(rank, key, at)
                break
        return taken


# -- ranks that the next exchange waits for ----------------------------------------------------------------------------


class Levels(Counter[int]):
    """A multiset of whole numbers with its minimum.

    It holds few distinct values at a time: ranks that are waited for are at steps close to each other.
    """

    def move(self, value: int, to: int) -> None:
        """Replace one occurrence of ``value``, which must be present."""
        self[to] += 1
        self.remove(value)

    def remove(self, value: int) -> None:
        """Remove one occurrence of ``value``, which must be present."""
        self[value] -= 1
        if not self[value]:
            del self[value]

    @property
    def least(self) -> int:
        """The minimum; 0 if empty."""
        return min(self, default=0)


class Reason(Enum):
    """Reason not to wait for a rank: it has something for the next exchange, or is blocked until that completes."""

    MESSAGE = "it has queued a message"
    PAIR = "it has requested a pair"
    STARVING = "it waits for a message"
    AVERAGE = "it is in an average"


@dataclass
class _Host:
    """Numbers of a host's ranks that are waited for, have queued messages, have requested a pair."""

    open: int
    sending: int = 0
    asking: int = 0


@dataclass
class HostCounts:
    """Numbers of ranks that are waited for, if an exchange waits for some hosts only.

    Attributes:
        hosts: counts per host.
        of_senders: ranks waited for on hosts with queued messages.
        of_others: ranks waited for on hosts without a pair request.
    """

    hosts: list[_Host]
    of_senders: int
    of_others: int

    def change(self, host: int, opened: int = 0, sending: int = 0, asking: int = 0) -> None:
        """Adjust a host's counts by these numbers."""
        own = self.hosts[host]
        self.of_senders -= own.open if own.sending else 0
        self.of_others -= 0 if own.asking else own.open
        own.open, own.sending, own.asking = own.open + opened, own.sending + sending, own.asking + asking
        self.of_senders += own.open if own.sending else 0
        self.of_others += 0 if own.asking else own.open


@dataclass(init=False)
class Readiness:
    """Progress of all ranks between two ends, and the ranks that an exchange waits for.

    Args:
        ranks: all ranks, in order.
        active: ranks that have not finished.
        local_size: ranks per host; 1: hosts have no meaning of their own.
        by_host: whether an exchange waits for some hosts only.

    Attributes:
        active: ranks that have not finished; ``finish`` removes a rank.
    """

    active: set[int]
    _place: dict[int, int]
    _local_size: int
    _reasons: dict[int, int]
    """Number of reasons not to wait, per rank."""
    _reported: dict[int, int]
    """The last step of each rank with queued messages, or with an announcement that there are none."""
    _sent: dict[int, int]
    """The last step of each rank whose messages were sent, or that has none."""
    _reported_by_active: Levels
    _sent_by_open: Levels
    _hosts: HostCounts | None

    def __init__(
        self, ranks: Sequence[int], active: Collection[int], local_size: int = 1, by_host: bool = False
    ) -> None:
        self.active = set(active)
        self._place, self._local_size = {rank: place for place, rank in enumerate(ranks)}, local_size
        self._reasons, self._reported, self._sent = (dict.fromkeys(ranks, 0) for _ in range(3))
        self._reported_by_active, self._sent_by_open = (Levels([0] * len(self.active)) for _ in range(2))
        self._hosts = None
        if by_host:
            self._hosts = HostCounts([_Host(0) for _ in range(len(ranks) // local_size)], 0, 0)
            for rank in self.active:
                self._hosts.change(self._place[rank] // local_size, opened=1)

    # -- what a rank has ----------------------------------------------------------------------------------------

    def add(self, rank: int, reason: Reason) -> None:
        """Add a reason not to wait for a rank; the same reason may be added several times (averages)."""
        self._reasons[rank] += 1
        if self._reasons[rank] == 1 and rank in self.active:
            self._close(rank)
        self._count(rank, reason, 1)

    def drop(self, rank: int, reason: Reason) -> None:
        """Remove a reason not to wait for a rank."""
        self._reasons[rank] -= 1
        if not self._reasons[rank] and rank in self.active:
            self._sent_by_open[self._sent[rank]] += 1
            if self._hosts is not None:
                self._hosts.change(self._place[rank] // self._local_size, opened=1)
        self._count(rank, reason, -1)

    def _close(self, rank: int) -> None:
        self._sent_by_open.remove(self._sent[rank])
        if self._hosts is not None:
            self._hosts.change(self._place[rank] // self._local_size, opened=-1)

    def _count(self, rank: int, reason: Reason, by: int) -> None:
        if self._hosts is not None:
            host = self._place[rank] // self._local_size
            if reason is Reason.MESSAGE:
                self._hosts.change(host, sending=by)
            elif reason is Reason.PAIR:
                self._hosts.change(host, asking=by)

    def finish(self, rank: int) -> None:
        """Record that a rank has finished: it is no longer waited for."""
        self.active.discard(rank)
        self._reported_by_active.remove(self._reported[rank])
        if not self._reasons[rank]:
            self._close(rank)

    # -- steps --------------------------------------------------------------------------------------------------

    def reported(self, rank: int) -> int:
        """Return the last step for which a rank has queued messages or announced that it has none; initially 0."""
        return self._reported[rank]

    def report(self, rank: int, step: int) -> None:
        """Set the last step for which a rank has queued messages or announced that it has none."""
        if rank in self.active:
            self._reported_by_active.move(self._reported[rank], step)
        self._reported[rank] = step

    def send(self, rank: int, step: int) -> None:
        """Set the last step whose messages a rank has sent, or that has none."""
        if rank in self.active and not self._reasons[rank]:
            self._sent_by_open.move(self._sent[rank], step)
        self._sent[rank] = step

    def sent(self, rank: int) -> int:
        """Return the last step whose messages a rank has sent, or that has none."""
        return self._sent[rank]

    @property
    def slowest(self) -> int:
        """The minimum of ``reported`` over the active ranks."""
        return self._reported_by_active.least

    # -- ranks that an exchange waits for -----------------------------------------------------------------------------

    def lacks(self, step: int | None) -> bool:
        """Return whether an exchange still waits for an active rank.

        Args:
            step: the step of the exchange's messages; None: it has no messages.
        """
        if self._hosts is not None:
            return bool(self._hosts.of_others if step is None else self._hosts.of_senders)
        if not self._sent_by_open:
            return False
        return step is None or self._local_size > 1 or self._sent_by_open.least < step


# -- pairs (law 3) -----------------------------------------------------------------------------------------------------


@dataclass(init=False)
class PairRequests:
    """Requests to be averaged with a neighbour, and the pairs made of them.

    A place is the position of a rank or, if hosts are averaged, of a host.

    Args:
        ranks: all ranks, in order.
        neighbours: the neighbours of each place, as places; empty if the algorithm has no pairs.
        local_size: ranks per place.

    Attributes:
        waiting: time of each rank's request for a pair, in the order of the requests.
    """

    waiting: dict[int, float]
    _firsts: tuple[int, ...]
    """The first rank of each place."""
    _place: dict[int, int]
    _local_size: int
    _neighbours: list[frozenset[int]]
    _neighbour_of: list[list[int]]
    """The places that have each place as a neighbour."""
    _met: list[int]
    """(The last exchange in which a place was averaged) x places + place: a total order without ties."""
    _present: list[int]
    """Number of unfinished ranks per place."""
    _active: set[int]
    """Places with unfinished ranks."""
    _left: list[int]
    """Number of active neighbours per place."""
    _asking: list[int]
    """Number of ranks with a pending request, per place."""
    _served: int
    """Number of ranks that have a pending request and an active neighbour."""

    def __init__(self, ranks: Sequence[int], neighbours: Sequence[Sequence[int]] = (), local_size: int = 1) -> None:
        self._place = {rank: place // local_size for place, rank in enumerate(ranks)}
        self._firsts, self._local_size = tuple(ranks[::local_size]), local_size
        self._neighbours = [frozenset(own) for own in neighbours]
        self._neighbour_of = [[] for _ in self._neighbours]
        for place, own in enumerate(self._neighbours):
            for other in own:
                self._neighbour_of[other].append(place)
        self._met = list(range(len(self._firsts)))
        self.restart()

    def restart(self) -> None:
        """Start after a drain or cut: there are no requests, and all ranks are active."""
        self.waiting = {}
        self._present = [self._local_size] * len(self._firsts)
        self._active = set(range(len(self._firsts)))
        self._left = list(map(len, self._neighbours))
        self._asking = [0] * len(self._firsts)
        self._served = 0

    def add(self, rank: int, now: float) -> bool:
        """Record a request; return whether this rank had none pending."""
        if rank in self.waiting:
            return False
        self.waiting[rank] = now
        self._count(rank, 1)
        return True

    def _count(self, rank: int, by: int) -> None:
        place = self._place[rank]
        self._asking[place] += by
        self._served += by if self._left[place] else 0

    def finish(self, rank: int) -> bool:
        """Record that a rank has finished; return whether it had a pending request, which is dropped."""
        had = self.waiting.pop(rank, None) is not None
        if had:
            self._count(rank, -1)
        place = self._place[rank]
        self._present[place] -= 1
        if not self._present[place] and self._neighbours:
            self._active.discard(place)
            for other in self._neighbour_of[place]:
                self._left[other] -= 1
                if not self._left[other]:
                    self._served -= self._asking[other]
        return had

    @property
    def since(self) -> float:
        """Time of the earliest pending request; there must be one."""
        return next(iter(self.waiting.values()))

    @property
    def can_pair(self) -> bool:
        """Whether any rank with a pending request has an active neighbour."""
        return self._served > 0

    def pair(self, exchange: int) -> tuple[list[tuple[int, int]], list[int]]:
        """Return the pairs of an exchange, by their places' first ranks, and the ranks whose requests they meet.

        Places that have waited longest are paired first. A place prefers a neighbour that also requests a pair, and
        among several the one with the oldest last average.
        """
        asking = dict.fromkeys([self._place[rank] for rank in self.waiting])
        unpaired, taken = set(asking), set[int]()
        pairs: list[tuple[int, int]] = []
        for wanting in (True, False):
            for place in asking:
                if place in taken:
                    continue
                own = self._neighbours[place]
                free = own & unpaired if wanting else (own & self._active).difference(asking, taken)
                if free:
                    partner = min(free, key=self._met.__getitem__)
                    both = (place, partner)
                    taken.update(both)
                    unpaired.difference_update(both)
                    pairs.append((self._firsts[place], self._firsts[partner]))
        for place in taken:
            self._met[place] = exchange * len(self._firsts) + place
        met = [rank for rank in self.waiting if self._place[rank] in taken]
        for rank in met:
            self._count(rank, -1)
        self.waiting = {rank: at for rank, at in self.waiting.items() if self._place[rank] not in taken}
        return pairs, met


# -- the state machine -------------------------------------------------------------------------------------------------


SMOOTHING = 0.2
"""Weight of the last exchange in the running mean of their durations."""
AHEAD = 8
"""Sending steps that a rank's messages may be ahead of the slowest rank (law 2)."""


def _stays_inside(config: GossipConfig) -> bool:
    """Return whether queued messages stay within the sender's host."""
    kind = ALGORITHMS[config.algorithm]
    return config.local_size > 1 and (kind.pairs or kind.outer is not None)


class GossipStateMachine(StateMachine[GossipConfig]):
    """State machine of one optimizer's exchanges, pairs and averages."""

    def __init__(self, optimizer: int, ranks: Sequence[int]) -> None:
        super().__init__(optimizer, ranks)
        self._queues = MessageQueues(self.ranks)
        self._requests = PairRequests(self.ranks)
        self._readiness = Readiness(self.ranks, self.ranks)
        """Replaced after each end. All three are valid once all ranks have registered."""
        self._coming: dict[int, int] = {}
        """The step of the messages that a rank has announced and not queued yet, by rank."""
        self._coming_steps: dict[int, int] = {}
        """Number of ranks that have announced messages, by step."""
        self._granted: dict[int, int] = {}
        """The last step of each rank whose exchange started before its messages were queued, since the last end."""
        self._weights: dict[tuple[int, int], float] = {}
        """Push-sum weights of queued messages other than 1, by rank and key."""
        self._starved: dict[int, int] = {}
        """Ranks that wait for a message that was in no exchange so far, with the exchanges that they had seen."""
        self._averages: dict[int, dict[int, AverageEntered]] = {}
        """Events of the ranks that have entered averages which have not started, by the average's number and rank."""
        self._inside: dict[int, int] = {}
        """Number of active ranks that have entered each of these averages."""
        self._entered: dict[int, int] = {}
        """The last average that each rank has entered since the last end."""
        self._bases: dict[int, int] = dict.fromkeys(self.ranks, 0)
        """Steps of each rank at the last end."""
        self._round = 0
        self._flights: dict[int, float] = {}
        """Start times of the exchanges that have not completed."""
        self._in_the_way: set[int] = set()
        """Numbers of the exchanges that the next one waits for."""
        self._duration = 0.0
        """Mean duration of an exchange, in seconds."""
        self._free_since = -math.inf
        """Time since which no exchange is in the way of the next one."""
        self._wake_at: float | None = None

    def tick(self, now: float) -> list[Command]:
        """Start an exchange whose delay has passed."""
        return self._advance(now)

    def deadline(self) -> float | None:
        """Return the time at which the next exchange starts without the missing ranks; None if none is due."""
        return self._wake_at

    def _blocked_on(self) -> tuple[str, frozenset[int]] | None:
        if self._averages:
            number = min(self._averages)
            return f"average {number} over all ranks", frozenset(self.computing - self._averages[number].keys())
        return None

    def _on_registered(self, rank: int, event: Registered[Any], now: float) -> list[Command]:
        commands = super()._on_registered(rank, event, now)
        if self._config is not None:  # ranks that had finished before are announced now
            commands[1:1] = [self._retired(done) for done in sorted(self._done)]
        return commands

    def _on_all_registered(self, config: Any) -> GossipConfig:
        assert isinstance(config, GossipConfig)
        if config.algorithm not in ALGORITHMS:
            raise ProtocolError(
                f"algorithm of optimizer {self._optimizer} must be one of {', '.join(ALGORITHMS)}, "
                f"got {config.algorithm!r}"
            )
        size = len(self.ranks)
        places, left = divmod(size, max(1, config.local_size))
        fit = not left and len(config.neighbours) == places
        fit = fit and all(0 <= peer < places for own in config.neighbours for peer in own)
        pairs = ALGORITHMS[config.algorithm].pairs
        if pairs and not fit:
            raise ProtocolError(f"neighbours of optimizer {self._optimizer} must be among its {size} ranks")
        self._queues = MessageQueues(self.ranks, STAGES if config.local_size > 1 else 1)
        if pairs:
            self._requests = PairRequests(self.ranks, config.neighbours, config.local_size)
        self._readiness = self._all_ready(config)
        for rank in self._done:
            self._readiness.finish(rank)
            self._requests.finish(rank)
        return config

    def _all_ready(self, config: GossipConfig) -> Readiness:
        """Return the initial readiness, with all ranks active."""
        return Readiness(self.ranks, self.ranks, config.local_size, _stays_inside(config))

    def _on_event(self, rank: int, event: OptimizerEvent, now: float) -> list[Command]:
        match event:
            case MessageComing(_, key):
                self._check_offer(rank, event, key)
                if rank in self._coming or key <= self._readiness.reported(rank):
                    raise ProtocolError(f"rank {rank} announced message {key} out of order")
                self._coming[rank] = key
                self._coming_steps[key] = self._coming_steps.get(key, 0) + 1
            case MessageQueued(_, key) | NoMessage(_, key) if key == self._granted.get(rank):
                pass  # its exchange started before this rank queued it
            case MessageQueued(_, key, weight):
                self._check_offer(rank, event, key)
                if weight != 1.0:
                    self._weights[rank, key] = weight
                if not self._queues.has(rank):
                    self._readiness.add(rank, Reason.MESSAGE)
                self._queues.add(rank, key, now)
                self._on_reported(rank, key)
            case NoMessage(_, key):
                self._check_offer(rank, event, key)
                self._readiness.send(rank, key)
                self._on_reported(rank, key)
            case PairRequested():
                self._request_pair(rank, event, now)
            case WaitingForMessage(_, seen):
                self._running(rank, event)
                self._end_starvation(rank)
                if seen >= self._round:
                    self._starved[rank] = seen
                    self._readiness.add(rank, Reason.STARVING)
            case AverageEntered():
                self._enter(rank, event)
            case ExchangeDone(_, number, complete):
                self._landed(rank, number, complete, now)
            case _:
                raise ProtocolError(f"rank {rank} sent {type(event).__name__}, which gossip does not handle")
        return self._advance(now)

    def _check_offer(self, rank: int, event: OptimizerEvent, key: int) -> None:
        if self._config is None:
            self._running(rank, event)
        elif rank in self._done and self._config.local_size == 1:  # else its engine still serves its host
            raise ProtocolError(f"rank {rank} offered message {key} after it finished")
        if self._queues.holds(rank, key):
            raise ProtocolError(f"rank {rank} offered message {key} twice")

    def _on_reported(self, rank: int, step: int) -> None:
        """Record that a rank has queued messages of a step, or announced that it has none."""
        self._readiness.report(rank, step)
        self._drop_announcement(rank)
        self._end_starvation(rank)

    def _drop_announcement(self, rank: int) -> None:
        step = self._coming.pop(rank, None)
        if step is not None:
            self._coming_steps[step] -= 1
            if not self._coming_steps[step]:
                del self._coming_steps[step]

    def _end_starvation(self, rank: int) -> None:
        """Record that a rank no longer waits for a message that was in no exchange before."""
        if self._starved.pop(rank, None) is not None:
            self._readiness.drop(rank, Reason.STARVING)

    def _request_pair(self, rank: int, event: OptimizerEvent, now: float) -> None:
        if not ALGORITHMS[self._running(rank, event).algorithm].pairs:
            raise ProtocolError(f"rank {rank} requested a pair, which only AD-PSGD supports")
        if self._requests.add(rank, now):  # sent again, if a pair that it did not request was in flight
            self._readiness.add(rank, Reason.PAIR)

    def _enter(self, rank: int, event: AverageEntered) -> None:
        config, index = self._running(rank, event), event.index
        parts = 1 if self._overlaps_averages else config.local_size
        if len(event.weights) != parts:
            raise ProtocolError(f"rank {rank} must enter an average with {parts} weights, got {len(event.weights)}")
        last = self._entered.get(rank, 0)
        if index != last + 1 or (self._is_in_average(rank) and not self._overlaps_averages):
            raise ProtocolError(f"rank {rank} entered average {index} out of order, after average {last}")
        self._averages.setdefault(index, {})[rank] = event
        self._inside[index] = self._inside.get(index, 0) + 1
        self._entered[rank] = index
        if not self._overlaps_averages:
            self._readiness.add(rank, Reason.AVERAGE)

    def _landed(self, rank: int, number: int, complete: bool, now: float) -> None:
        if not 1 <= number <= self._round:
            raise ProtocolError(f"rank {rank} reported exchange {number} as done; exchanges so far: {self._round}")
        if number in self._in_the_way:
            self._in_the_way.discard(number)
            self._free_since = now
        if complete and number in self._flights:
            took = now - self._flights.pop(number)
            self._duration += (took - self._duration) * (SMOOTHING if self._duration else 1.0)

    # -- exchanges and averages that start --------------------------------------------------------------------

    def _advance(self, now: float) -> list[Command]:
        self._wake_at = None
        if self._config is None:
            return []
        averages = self._due_averages()
        if self._resuming:
            return averages
        due = [] if self._in_the_way else self._due_exchange(now)
        return [*averages, *due, *self._announced_exchange(now)]

    def _start_due(self, now: float) -> list[Command]:
        return self._advance(now)

    def _due_exchange(self, now: float) -> list[Command]:
        """Return the exchange of waiting messages and pairs, if it is due."""
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
        self._in_the_way.add(exchange.round)
        return [exchange]

    def _announced_exchange(self, now: float) -> list[Command]:
        """Return the exchange of a step's messages before they are queued, if all active ranks have announced some."""
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
            self._readiness.report(rank, key)
            self._readiness.send(rank, key)
        self._flights[self._round] = now
        self._in_the_way.add(self._round)
        return [StartExchange(self._optimizer, self._round, senders_of(messages))]

    def _begin_round(self) -> None:
        """Count an exchange; the messages that ranks wait for may be in it."""
        self._round += 1
        for rank in [rank for rank, seen in self._starved.items() if seen < self._round]:
            self._end_starvation(rank)

    def _limit(self) -> float:
        """Return the last step whose messages may be sent; there is no limit for messages that stay within a host."""
        assert self._config is not None
        if _stays_inside(self._config):
            return math.inf
        slowest = self._readiness.slowest // (STAGES if self._of_hosts else 1)
        return slowest + AHEAD * self._config.period

    def _due_averages(self) -> list[Command]:
        """Return the averages that all active ranks have entered; ranks enter them in order."""
        due: list[Command] = []
        while self._averages:
            index = next(iter(self._averages))
            if self._inside[index] < len(self._readiness.active):
                break
            due.append(self._start_average(index))
        return due

    def _start_average(self, index: int) -> Command:
        there = sorted(self._averages.pop(index).items())  # fixed order: sums are the same to the bit
        del self._inside[index]
        for rank, _ in there if not self._overlaps_averages else ():
            self._readiness.drop(rank, Reason.AVERAGE)
        weights = [sum(part) for part in zip(*(own.weights for _, own in there), strict=True)]
        spans, moved = spans_of(rank for rank, _ in there), outer.union(own.moved for _, own in there)
        return StartAverage(self._optimizer, index, spans, weights, there[0][1].part, moved)

    def _next(self, until: float = math.inf) -> StartExchange | None:
        """Return the next exchange, of queued messages of steps up to ``until`` and of pairs; None if it would be
        empty."""
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
        weights = [(*message, self._weights.pop(message)) for message in messages if message in self._weights]
        return StartExchange(self._optimizer, self._round, senders_of(messages), pairs, weights=weights)

    # -- ends -------------------------------------------------------------------------------------------------

    def _check_finished(self, rank: int) -> None:
        if self._is_in_average(rank) and not self._overlaps_averages:
            raise ProtocolError(f"rank {rank} finished while it waits for an average")

    def _forget(self, rank: int) -> None:
        for index in [index for index, there in self._averages.items() if there.pop(rank, None) is not None]:
            if not self._overlaps_averages:
                self._readiness.drop(rank, Reason.AVERAGE)
            self._inside[index] -= rank in self._readiness.active
            if not self._averages[index]:
                del self._averages[index], self._inside[index]

    def _on_event_of_absent(self, rank: int, event: OptimizerEvent, now: float) -> list[Command]:
        """Handle an event of a rank whose optimizer is deleted: its engine completes exchanges, serves its host."""
        serves = isinstance(event, ExchangeDone) or (isinstance(event, MessageQueued) and self._of_hosts)
        return self._on_event(rank, event, now) if serves else []

    @property
    def _of_hosts(self) -> bool:
        return self._config is not None and self._config.local_size > 1

    def _is_in_average(self, rank: int) -> bool:
        return any(rank in there for there in self._averages.values())

    @property
    def _overlaps_averages(self) -> bool:
        """Whether ranks continue with their steps while an average that they have entered is pending."""
        return self._config is not None and ALGORITHMS[self._config.algorithm].outer is not None

    @property
    def _pairs_hosts(self) -> bool:
        return self._config is not None and self._of_hosts and ALGORITHMS[self._config.algorithm].pairs

    def _on_rank_finished(self, rank: int, now: float) -> list[Command]:
        if self._config is None:
            return []  # some ranks may not have registered: they receive this when all have
        self._drop_announcement(rank)
        self._end_starvation(rank)
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
        self._in_the_way.clear()
        self._weights.clear()
        self._flights.clear()  # each rank tracks which exchanges it has not completed
        self._bases = {done: produced[0] for done, produced in self._produced.items()}
        self._wake_at = None
        return commands, self._round
