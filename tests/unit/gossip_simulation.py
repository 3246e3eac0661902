"""A gossiping job without threads: simulated ranks around the coordinator's state machine, in any order a seed finds.

As ``simulation``: all that travels waits in first-in-first-out queues, each move takes one thing from one queue, and
the laws are checked by a ledger of its own (``gossip_ledger``).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from hvd_async.algorithms.eager.config import GradientReady, StepEntered
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
from hvd_async.errors import ProtocolError
from hvd_async.runtime.protocol import Accepted, Command, Drained, Finished, OptimizerEvent, Registered
from tests.unit.gossip_job import Job, Rank
from tests.unit.gossip_ledger import GossipLedger
from tests.unit.simulation import snapshot


class Simulation:
    """Runs a job to its end.

    Attributes:
        sent: (end, receiver, sender, its step) of all messages, as the sender has addressed them.
        submitted: exchange -> the ranks that have.
        carried: exchange -> (sender, its step, receivers).
        log: all commands.
    """

    def __init__(self, job: Job) -> None:
        self.job, self.plan, self.config = job, job.plan, job.plan.config
        self.random = random.Random(job.seed)
        self.machine = GossipStateMachine(0, job.ranks)
        self.ledger = GossipLedger(self.config, job.ranks)
        self.now = 0.0
        self.ranks = [Rank(index, number) for index, number in enumerate(job.ranks)]
        self.threads = [self._train(rank) for rank in self.ranks]
        self.sent: list[tuple[int, int, int, int]] = []
        self.submitted: dict[int, set[int]] = {}
        self.carried: dict[int, list[tuple[int, int, list[int]]]] = {}
        self.log: list[Command] = []
        self.illegal_tried = 0
        self.offered: list[list[int]] = [[] for _ in self.ranks]
        """The steps of which each rank has offered messages, in order."""
        self.ahead = self.config.algorithm == "dpsgd"
        """Whether a step's messages are offered at the end of the step before."""

    # -- training threads -------------------------------------------------------------------------------------

    def _train(self, rank: Rank) -> Iterator[None]:
        rank.outbox.append(Registered(0, self.config, ["w"], [1]))
        if rank.index not in self.job.hasty:
            yield from self._until(rank, lambda: rank.agreed)
        for end, counts in enumerate(self.job.steps):
            for step in range(1, counts[rank.index] + 1):
                rank.steps += 1
                yield from self._pair(rank) if self.config.algorithm == "adpsgd" else self._push(rank, end, step)
            rank.outbox.append(Finished(0, [rank.steps], (end, rank.index) not in self.job.cuts))
            yield from self._until(rank, lambda: rank.drained is not None and rank.landed >= rank.drained.rounds)
            assert rank.drained is not None
            assert rank.drained.flushed == self.job.flushes(end)
            mine = [(sender, key) for at, to, sender, key in self.sent if (at, to) == (end, rank.index)]
            assert sorted(rank.come) == sorted(mine), "lost or twice"
            rank.come, rank.drained, rank.last, rank.local = [], None, None, 0
            self._submit(rank)
        rank.finished = True

    def _until(self, rank: Rank, ready: Callable[[], bool]) -> Iterator[None]:
        rank.waits = ready
        yield  # resumed only when ``ready``
        rank.waits = None

    def _push(self, rank: Rank, end: int, step: int) -> Iterator[None]:
        """A step of SGP, OSGP, D-PSGD or of averages only."""
        yield
        late = self.config.max_staleness
        if self.ledger.goes_on:
            yield from self._average_later(rank, step)
            return
        if late:
            self._announce(rank, step)
        if self.plan.moves(step):
            yield from self._until(rank, lambda: rank.offered - rank.gone <= (0 if late else 1))
        if ALGORITHMS[self.config.algorithm].has_graph:
            if not late and (step == 1 or not self.ahead):
                self._offer(rank, end, step)
            if self.ahead:
                self._announce(rank, step + 1)
            rank.owed = [(s, k) for k in range(1, step - late + 1) for s, _ in self.plan.in_edges(rank.index, k)]
            self._tell_starved(rank)
            yield from self._until(rank, lambda: self._is_fed(rank))
            rank.owed = []
            if late:
                self._offer(rank, end, step)
        if self.config.average_every and step % self.config.average_every == 0:
            number = step // self.config.average_every
            rank.outbox.append(AverageEntered(0, number, [1.0 + rank.index]))
            yield from self._until(rank, lambda: number in rank.averages)
        if self.ahead:
            self._offer(rank, end, step + 1)

    def _average_later(self, rank: Rank, step: int) -> Iterator[None]:
        """A step's end under an outer optimizer."""
        rhythm = Rhythm(self.config.average_every, self.config.fragments)
        last = rhythm.until(step)
        if last > rhythm.until(step - 1):
            rank.outbox.append(AverageEntered(0, last, [1.0 + rank.index], rhythm.fragment(last - 1)))
        needed = rhythm.until(max(0, step - self.config.max_staleness))
        yield from self._until(rank, lambda: not needed or needed in rank.averages)

    def _receivers(self, rank: Rank, step: int) -> list[int]:
        return [to for to, _ in self.plan.out_edges(rank.index, step) if step <= self._last(rank, to, step)]

    def _announce(self, rank: Rank, step: int) -> None:
        if self._receivers(rank, step):
            rank.coming.add(step)
            rank.outbox.append(MessageComing(0, step))

    def _offer(self, rank: Rank, end: int, step: int) -> None:
        if not self.plan.moves(step):
            return
        out = self._receivers(rank, step)
        if out:
            self.offered[rank.index].append(step)
            rank.offered += 1
        if out or step in rank.coming:
            rank.letters[step] = out
        rank.coming.discard(step)
        self.sent += [(end, to, rank.index, step) for to in out]
        if any((rank.number, step) in exchange.messages for exchange in rank.held):
            self._submit(rank)
        else:
            rank.outbox.append(MessageQueued(0, step) if out else NoMessage(0, step))

    def _last(self, rank: Rank, other: int, step: int) -> int:
        """The last step of which another rank sends messages, as far as is known."""
        last = rank.retired.get(other, step)
        return last + 1 if self.ahead and 0 < last < step else last

    def _is_fed(self, rank: Rank) -> bool:
        return all((s, step) in rank.come or step > self._last(rank, s, step) for s, step in rank.owed)

    def _tell_starved(self, rank: Rank) -> None:
        if not self._is_fed(rank):
            rank.outbox.append(WaitingForMessage(0, rank.landed))

    def _pair(self, rank: Rank) -> Iterator[None]:
        """A step of AD-PSGD."""
        yield
        neighbours = self.config.neighbours[rank.index]
        most = self.config.max_local_steps
        yield from self._until(rank, lambda: rank.local < most or all(peer in rank.retired for peer in neighbours))
        rank.local += 1
        if not rank.asked and self.random.random() < 0.8:
            self._want(rank)

    def _want(self, rank: Rank) -> None:
        rank.asked = True
        rank.outbox.append(PairRequested(0))

    # -- moves ------------------------------------------------------------------------------------------------

    def run(self) -> Simulation:
        """Until every rank has finished.

        Raises:
            AssertionError: a promise is broken, or nobody can move (a deadlock).
        """
        while not all(rank.finished for rank in self.ranks):
            if not self._move():
                waiting = [rank.number for rank in self.ranks if not rank.finished]
                raise AssertionError(f"deadlock: ranks {waiting} wait for {self.machine.blocked_on()}")
        for rank in self.ranks:
            assert not rank.held
            while rank.outbox:  # tidings of the last exchanges
                self._deliver(rank)
        self.ledger.check_end()
        return self

    def _move(self) -> bool:
        self._probe()
        kinds = {"deliver": self._deliver, "on_command": self._on_command, "land": self._land}
        moves = [(rank, kinds[kind]) for rank in self.ranks for kind in kinds if self._can(rank, kind)]
        trains = [rank for rank in self.ranks if not rank.finished and (rank.waits is None or rank.waits())]
        weights = [self.job.speeds[rank.index] for rank in trains]
        share = sum(weights)
        deadline = self.machine.deadline()
        if deadline is not None and (not (moves or share) or self.random.random() < 0.1):
            assert deadline > self.now, "late, and nobody was told"
            self.now = deadline
            self._advance(self.machine.tick(self.now), None)
        elif moves and self.random.random() * (len(moves) + share) >= share:
            rank, move = self.random.choice(moves)
            move(rank)
        elif share:
            next(self.threads[self.random.choices(trains, weights)[0].index], None)
        elif trains:  # speed 0: only when nothing else can happen
            next(self.threads[self.random.choice(trains).index], None)
        else:
            wanting = [r for r in self.ranks if not r.asked and r.waits is not None and self._starves(r)]
            if not wanting:
                return False
            self._want(self.random.choice(wanting))
        return True

    def _starves(self, rank: Rank) -> bool:
        """Whether it waits for an averaging (a real rank has asked for it by then)."""
        done = rank.number in self.ledger.done or any(isinstance(event, Finished) for event in rank.outbox)
        return rank.local >= self.config.max_local_steps > 0 and not done

    def _can(self, rank: Rank, kind: str) -> bool:
        if kind == "land":
            return any(len(self.submitted[exchange.round]) == len(self.ranks) for exchange in rank.flying)
        return bool(rank.outbox if kind == "deliver" else rank.inbox)

    def _land(self, rank: Rank) -> None:
        whole = [exchange for exchange in rank.flying if len(self.submitted[exchange.round]) == len(self.ranks)]
        exchange = self.random.choice(whole)
        rank.flying.remove(exchange)
        rank.landed += 1
        for sender, key, receivers in self.carried.get(exchange.round, []):
            rank.gone += sender == rank.index and bool(receivers)
            if rank.index in receivers:
                rank.come.append((sender, key))
        if any(rank.number in pair for pair in exchange.pairs):
            rank.local = 0
            rank.averagings += 1
        if self._tells(rank, exchange):
            rank.outbox.append(ExchangeDone(0, exchange.round))
        self._tell_starved(rank)

    def _tells(self, rank: Rank, exchange: StartExchange) -> bool:
        """Whether this rank says that an exchange has landed: to whom its first rank sends; itself, if to nobody."""
        if not exchange.messages:
            return rank.number == exchange.pairs[0][1]
        first = self.job.ranks.index(exchange.messages[0][0])
        carried = [there for sender, _, there in self.carried[exchange.round] if sender == first]
        return any(rank.index in there or (rank.index == first and not there) for there in carried)

    def _on_command(self, rank: Rank) -> None:
        command = rank.inbox.popleft()
        match command:
            case Accepted():
                rank.agreed = True
            case StartExchange():
                rank.asked = rank.asked and not any(rank.number in pair for pair in command.pairs)
                rank.held.append(command)
                self._submit(rank)
            case StartAverage(_, index):
                rank.averages.add(index)
            case RankFinished(_, number, step):
                assert rank.agreed, "told of a rank that it does not know yet"
                rank.retired[self.job.ranks.index(number)] = step
            case Drained():
                assert rank.drained is None
                rank.drained, rank.last, rank.asked = command, command.rounds, False
                rank.retired.clear()
                rank.averages.clear()

    def _submit(self, rank: Rank) -> None:
        while rank.held and (rank.last is None or rank.held[0].round <= rank.last):
            if any(sender == rank.number and key in rank.coming for sender, key in rank.held[0].messages):
                return
            exchange = rank.held.popleft()
            self.submitted.setdefault(exchange.round, set()).add(rank.index)
            for key in (key for sender, key in exchange.messages if sender == rank.number):
                self.carried.setdefault(exchange.round, []).append((rank.index, key, rank.letters.pop(key)))
            rank.flying.append(exchange)

    # -- the coordinator --------------------------------------------------------------------------------------

    def _deliver(self, rank: Rank) -> None:
        event = rank.outbox.popleft()
        deadline = self.machine.deadline()
        later = self.now + self.random.choice([0.0, 0.01, 0.3]) * self.random.random()
        self.now = later if deadline is None else min(later, deadline)
        rank.opened = rank.opened or isinstance(event, Registered)
        self.ledger.hear(rank.number, event, self.now)
        self._advance(self.machine.handle(rank.number, event, self.now), rank.number)

    def _advance(self, commands: list[Command], rank: int | None) -> None:
        self.ledger.check(commands, rank, self.now, self.machine.deadline())
        self.log += commands
        for each in self.ranks:
            each.inbox.extend(commands)

    # -- illegal moves ----------------------------------------------------------------------------------------

    def _probe(self) -> None:
        """Sometimes try a move that is not allowed now: it must raise and change nothing."""
        if self.random.random() > 0.1:
            return
        rank = self.random.choice(self.ranks)
        event = self.random.choice(self._illegal(rank))
        before = snapshot(self.machine)
        with pytest.raises(ProtocolError, match=f"rank {rank.number}"):
            self.machine.handle(rank.number, event, self.now + 1e6)
        assert snapshot(self.machine) == before
        self.illegal_tried += 1

    def _illegal(self, rank: Rank) -> list[OptimizerEvent]:
        ledger, number = self.ledger, rank.number
        if not rank.opened:
            return [
                MessageQueued(0, 1),
                NoMessage(0, 1),
                PairRequested(0),
                AverageEntered(0, 1, [1.0]),
                ExchangeDone(0, 1),
                Finished(0, [0]),
            ]
        moves: list[OptimizerEvent] = [
            Registered(0, self.config, ["w"], [1]),
            StepEntered(0, 1, []),
            GradientReady(0, [0], 1),
            ExchangeDone(0, 0),
            ExchangeDone(0, ledger.exchanges + 1),
            Finished(0, [10**6, 10**6]),
            Finished(0, []),
            *(MessageQueued(0, key) for key, _ in ledger.offers[number]),
            *(MessageComing(0, key) for key in (ledger.told.get(number), ledger.coming.get(number)) if key),
        ]
        if ledger.bases[number]:
            moves.append(Finished(0, [ledger.bases[number] - 1]))
        if self.config.algorithm != "adpsgd":
            moves.append(PairRequested(0))
        if not ledger.goes_on:
            moves.append(AverageEntered(0, ledger.average + 2, [1.0]))
        entered = ledger.entered.get(number, 0)
        moves += [AverageEntered(0, entered, [1.0]), AverageEntered(0, entered + 2, [1.0])]
        if number in ledger.done or not ledger.agreed:
            moves += [
                MessageQueued(0, 10**6),
                NoMessage(0, 10**6),
                PairRequested(0),
                AverageEntered(0, entered + 1, [1.0]),
            ]
        if number in ledger.done:
            moves.append(Finished(0, [10**6]))
        if number in ledger.waiting() and not ledger.goes_on:
            moves += [AverageEntered(0, ledger.average + 1, [1.0]), Finished(0, [10**6])]
        return moves
