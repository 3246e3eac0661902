"""Ledger of the events and commands of gossip's coordinator, independent of it, checked against the laws."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf

from hvd_async.algorithms.gossip.config import (
    ALGORITHMS,
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
from hvd_async.algorithms.gossip.machine import AHEAD
from hvd_async.runtime.protocol import Accepted, Command, Drained, Finished, OptimizerEvent, Registered, Resumed

EPSILON = 1e-9


class GossipLedger:
    """Checks every command as it comes.

    Attributes:
        offers: rank -> (key, when) of what no exchange has taken yet.
        wants: rank -> since when it wants to be averaged, the ones that have waited longest first.
        exchanges: that went.
        average: the number of the last average that went since the last drain.
        inside: by number, ranks that are in an average that has not started, and their push-sum weights.
        entered: rank -> the last average that it has entered since the last drain.
        bases: rank -> its steps at the last drain.
    """

    def __init__(self, config: GossipConfig, ranks: Sequence[int]) -> None:
        self.config, self.ranks = config, tuple(ranks)
        self.hosts = config.local_size > 1
        self.neighbours = {
            rank: {ranks[place] for place in places} for rank, places in zip(ranks, config.neighbours, strict=False)
        }
        self.opened: set[int] = set()
        self.agreed = False
        self.done: set[int] = set()
        self.flush = False
        self.offers: dict[int, deque[tuple[int, float]]] = {rank: deque() for rank in ranks}
        self.wants: dict[int, float] = {}
        self.met = dict.fromkeys(ranks, 0)
        self.exchanges = self.average = 0
        self.inside: dict[int, dict[int, float]] = {}
        self.entered: dict[int, int] = {}
        self.continues = ALGORITHMS[config.algorithm].outer is not None
        self.produced = dict.fromkeys(ranks, 0)
        self.bases = dict.fromkeys(ranks, 0)
        self.announced: set[int] = set()
        self.durations: list[float] = []
        self.partial = self.whole = 0
        """Exchanges that some active rank had nothing for; that all had something for."""
        self.starved: dict[int, int] = {}
        """Ranks that wait for a message, and how many exchanges they had seen."""
        self.gone: dict[int, int] = {}
        self.reported: dict[int, int] = {}
        """The last step of which a rank has offered something, or said that it has nothing."""
        self.coming: dict[int, int] = {}
        """Steps that ranks have announced, and offered nothing of yet."""
        self.early: dict[int, int] = {}
        """The last step of each rank that went before it was offered."""
        self.freed = 0.0
        self.resumes, self.resuming = False, set[int]()
        """Whether ranks report that they have completed an end, and the ones that have yet to."""
        self._flights: dict[int, float] = {}

    def active(self) -> set[int]:
        """Ranks that are not done."""
        return set(self.ranks) - self.done

    def hear(self, rank: int, event: OptimizerEvent, now: float) -> None:
        """An event that is about to reach the state machine."""
        match event:
            case Registered():
                self.opened.add(rank)
            case MessageComing(_, key):
                self.coming[rank] = key
            case MessageQueued(_, key) | NoMessage(_, key) if self.early.get(rank) == key:
                pass
            case MessageQueued(_, key):
                self.coming.pop(rank, None)
                self.offers[rank].append((key, now))
                self.reported[rank] = key
                self.starved.pop(rank, None)
            case NoMessage(_, key):
                self.coming.pop(rank, None)
                self.reported[rank] = self.gone[rank] = key
                self.starved.pop(rank, None)
            case WaitingForMessage(_, seen):
                self.starved[rank] = seen
            case PairRequested():
                self.wants.setdefault(rank, now)
            case AverageEntered(_, index, [weight]):
                self.inside.setdefault(index, {})[rank] = weight
                self.entered[rank] = index
            case ExchangeDone(_, number):
                if number in self._flights:
                    self.durations.append(now - self._flights.pop(number))
                    self.freed = now
            case Finished(_, (steps,), flush):
                self.done.add(rank)
                self.wants.pop(rank, None)
                self.starved.pop(rank, None)
                self.flush = self.flush or flush
                self.resumes = self.resumes or event.resumes
                self.produced[rank] = steps
            case Resumed():
                self.resuming.discard(rank)

    def check(self, commands: list[Command], rank: int | None, now: float, deadline: float | None) -> None:
        """The commands that came of it.

        Args:
            rank: whose event it was; None if it was only time.
            deadline: the state machine's, now.

        Raises:
            AssertionError: one breaks a law, or one is missing.
        """
        ending = any(isinstance(command, Drained) for command in commands)
        for command in commands:
            match command:
                case Accepted():
                    assert self.opened == set(self.ranks)
                    self.agreed = True
                case RankFinished():
                    self._check_retired(command)
                case StartExchange():
                    self._check_exchange(command, ending, now)
                case StartAverage():
                    self._check_average(command)
                case Drained():
                    self._check_drained(command, rank)
                case other:
                    raise AssertionError(f"{other} of a gossip")
        if self.agreed:
            assert self.announced == self.done, "a rank is done, and the others do not know"
            going = [there for there in self.inside.values() if there.keys() >= self.active()]
            assert not going, "all are in an average that does not go"
            self._check_nothing_is_due(now, deadline)

    def check_end(self) -> None:
        """After the last drain."""
        assert not any(self.offers.values()), "an offer stayed behind"
        assert not self.done

    def _there(self) -> set[int]:
        """Ranks that offer something, or cannot before the next exchange has landed."""
        offering = {rank for rank, offers in self.offers.items() if offers}
        if offering and not self.hosts:
            earliest = min(offers[0][0] for offers in self.offers.values() if offers)
            offering |= {rank for rank, key in self.gone.items() if key >= earliest}
        starving = {rank for rank, seen in self.starved.items() if seen == self.exchanges}
        return offering | starving | self.wants.keys() | self.waiting()

    def waiting(self) -> set[int]:
        """Ranks that are in an average that has not started."""
        return {rank for there in self.inside.values() for rank in there}

    def _group(self) -> list[int]:
        """Ranks whose first offers go together."""
        first = {rank: offers[0][0] for rank, offers in self.offers.items() if offers}
        return [rank for rank, key in first.items() if self.hosts or key == min(first.values())]

    def _first(self) -> float:
        """Since when it could have gone; in AD-PSGD, when the first that waits came."""
        first = min([self.offers[rank][0][1] for rank in self._group()] + list(self.wants.values()))
        return first if self.neighbours else max(first, self.freed)

    def _is_ahead(self) -> bool:
        """Law 2: whether what could go now is too far beyond the slowest rank."""
        if not any(self.offers.values()) or self.hosts:
            return False
        slowest = min((self.reported.get(rank, 0) for rank in self.active()), default=inf)
        earliest = min(offers[0][0] for offers in self.offers.values() if offers)
        return earliest > slowest + AHEAD * self.config.period

    def _can_go(self) -> bool:
        if self._is_ahead():
            return False
        active = self.active()
        return any(self.offers.values()) or any(self.neighbours[rank] & active for rank in self.wants)

    def _check_nothing_is_due(self, now: float, deadline: float | None) -> None:
        """Law 1: what can go now has gone, and there is a deadline for what only waits for others."""
        if self.resuming:
            return
        assert not self._all_coming(), "all have announced a step, and it does not go"
        if self._flights or not self._can_go():
            return
        assert not self._there() >= self.active(), "all have something, and nothing goes"
        assert now < self._first() + max(self.durations, default=0.0), "it has waited longer than any exchange took"
        assert deadline is not None
        assert deadline <= self._first() + max(self.durations) + EPSILON

    def _all_coming(self) -> bool:
        """Whether all active ranks have announced messages of one step, after all before it have gone."""
        alike = len(set(self.coming.values())) == 1 and not any(self.offers.values())
        return alike and self.coming.keys() == self.active()

    def _check_exchange(self, exchange: StartExchange, ending: bool, now: float) -> None:
        assert not self.resuming, "an exchange starts while a rank is in an end"
        all_there = self._there() >= self.active()
        self.exchanges += 1
        assert exchange.round == self.exchanges
        if self._all_coming():
            assert (sorted(exchange.messages), exchange.pairs) == (sorted(self.coming.items()), [])
            self.early |= self.coming
            self.reported |= self.coming
            self.gone |= self.coming
            self.coming.clear()
            self._flights[exchange.round] = now
            self.whole += 1
            return
        assert exchange.messages or exchange.pairs, "an exchange of nothing"
        if ending:
            assert self.done == set(self.ranks)
            assert not exchange.pairs
        else:
            assert not self._flights, "two exchanges at once"
            assert not self._is_ahead(), "messages pile up"
            assert all_there or now >= self._first() + min(self.durations, default=0.0) - EPSILON, "too early"
            self.whole += all_there
            self.partial += not all_there
        expected = [(rank, self.offers[rank][0][0]) for rank in self._group()]
        assert sorted(exchange.messages) == sorted(expected), "not the first offers that are of the earliest step"
        for rank, key in expected:
            self.offers[rank].popleft()
            self.gone[rank] = max(key, self.gone.get(rank, key))
        self._check_pairs(exchange.pairs)
        if not ending:
            self._flights[exchange.round] = now

    def _check_pairs(self, pairs: list[tuple[int, int]]) -> None:
        """Law 3."""
        taken = [rank for pair in pairs for rank in pair]
        assert len(set(taken)) == len(taken), "a rank is in two pairs"
        assert self.done.isdisjoint(taken)
        order = {rank: place for place, rank in enumerate(self.wants)}
        partner = dict(pairs) | {b: a for a, b in pairs}
        for asks, other in pairs:
            assert asks in order, "neither rank of a pair wants it"
            assert other in self.neighbours[asks], "averaged with a rank that is no neighbour"
            left = (self.neighbours[asks] & self.active()) - partner.keys()
            rivals = [peer for peer in left if (peer in order) == (other in order)]
            assert all(self.met[other] <= self.met[peer] for peer in rivals), "another neighbour has met less"
            if other not in order:
                free = [peer for peer in self.neighbours[asks] & order.keys() if partner.get(peer) not in order]
                assert not free, "a rank that asks is averaged with one that does not, although another rank does"
        for rank, place in order.items():
            if rank in partner:
                continue
            for peer in self.neighbours[rank] & self.active():
                assert peer in partner, "a neighbour was free"
                askers = [order.get(peer, inf), order.get(partner[peer], inf)]
                assert place > min(askers), "one that asked later was served first"
        for rank in taken:
            self.met[rank] = self.exchanges
            self.wants.pop(rank, None)

    def _check_average(self, average: StartAverage) -> None:
        self.average += 1
        assert average.index == self.average
        there = self.inside.pop(average.index)
        assert average.ranks == sorted(there)
        assert there.keys() >= self.active()
        assert self.continues or there.keys() == self.active()
        assert average.weights == [sum(there[rank] for rank in average.ranks)]

    def _check_retired(self, retired: RankFinished) -> None:
        assert self.agreed, "ranks are reported of another before they know one another"
        assert retired.rank in self.done - self.announced
        assert retired.step == self.produced[retired.rank] - self.bases[retired.rank]
        self.announced.add(retired.rank)

    def _check_drained(self, drained: Drained, rank: int | None) -> None:
        assert self.done == set(self.ranks)
        assert drained.last == rank
        assert drained.flushed == self.flush
        assert drained.rounds == self.exchanges
        assert drained.produced == [sum(self.produced.values())]
        assert not any(self.offers.values()), "an offer stayed behind"
        assert not self.inside, "an average stayed behind"
        self.entered.clear()
        self.bases = dict(self.produced)
        self.done.clear()
        self.announced.clear()
        self.wants.clear()
        self.gone.clear()
        self.reported.clear()
        self.starved.clear()
        self.coming.clear()
        self.early.clear()
        self._flights.clear()
        self.resuming = set(self.ranks) if self.resumes else set()
        self.flush, self.average = False, 0
