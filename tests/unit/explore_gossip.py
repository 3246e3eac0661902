"""Gossip for ``explore``: model ranks that offer messages, take part in exchanges, and wait for what others send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
from hvd_async.algorithms.gossip.plan import GossipPlan
from hvd_async.runtime.machine import StateMachine
from hvd_async.runtime.protocol import Command, Drained, OptimizerEvent
from tests.unit.explore_gossip_state import GossipBook, GossipRank
from tests.unit.explore_world import Program, World


class GossipWorld(World):
    """Times count in units of an exchange's mean duration, which is given to the machine and stays as it is."""

    rank_type, book_type = GossipRank, GossipBook
    ranks: list[GossipRank]

    def __init__(
        self,
        machine: type[StateMachine[Any]],
        plan: GossipPlan,
        programs: Sequence[Program],
        opening: bool = False,
        slow: bool = False,
    ) -> None:
        self.plan, self.slow = plan, slow
        super().__init__(machine, plan.config, programs, opening)
        self.timed = slow  # type: ignore[misc]

    def begin(self) -> None:
        machine: Any = self.machine
        machine._duration = 1.0 if self.slow else 0.0
        self.book.offers = {rank: [] for rank in self.numbers}
        self.book.bases = dict.fromkeys(self.numbers, 0)

    @property
    def _ahead(self) -> bool:
        """Whether a step's messages are offered at the end of the step before."""
        return self.plan.config.algorithm == "dpsgd"

    @property
    def _goes_on(self) -> bool:
        """Whether ranks go on before an average that they have entered starts."""
        return ALGORITHMS[self.plan.config.algorithm].outer is not None

    # -- training threads: phase 0 before a step, 1 to 4 within it ------------------------------------------------

    def can_step(self, rank: GossipRank) -> bool:
        config = self.plan.config
        if config.algorithm == "adpsgd":
            left = [peer for peer in config.neighbours[rank.place] if peer not in rank.retired]
            return rank.local < config.max_local_steps or not left
        if rank.phase == 0:
            most = 0 if config.max_staleness else 1
            return not self.plan.moves(rank.step + 1) or rank.offered - rank.gone <= most
        if rank.phase == 1:
            return self._is_fed(rank)
        return rank.average >= (rank.step - (config.max_staleness if self._goes_on else 0)) // config.average_every

    def step(self, rank: GossipRank) -> None:
        config = self.plan.config
        if config.algorithm == "adpsgd":
            rank.local += 1
            rank.produced[0] += 1
            if not rank.asked:
                rank.asked = True
                rank.outbox.append(PairRequested(0))
            rank.at += 1
            return
        late = config.max_staleness
        if rank.phase == 0:
            rank.step += 1
            rank.produced[0] += 1
            if late:
                self._announce(rank, rank.step)
            if ALGORITHMS[config.algorithm].has_graph:
                if not late and (rank.step == 1 or not self._ahead):
                    self._offer(rank, rank.step)
                if self._ahead:
                    self._announce(rank, rank.step + 1)
                rank.phase = 1
                self._tell_starved(rank)
                return
        if rank.phase == 1 and late:
            self._offer(rank, rank.step)
        due = bool(config.average_every) and rank.step % config.average_every == 0
        if rank.phase < 2 and due:
            rank.outbox.append(AverageEntered(0, rank.step // config.average_every, [1.0 + rank.place]))
        if rank.phase < 2 and (due or self._goes_on):
            rank.phase = 2
            return
        if self._ahead:
            self._offer(rank, rank.step + 1)
        rank.at, rank.phase = rank.at + 1, 0

    def _receivers(self, rank: GossipRank, step: int) -> list[int]:
        return [to for to, _ in self.plan.out_edges(rank.place, step) if step <= self._last(rank, to, step)]

    def _announce(self, rank: GossipRank, step: int) -> None:
        if self._receivers(rank, step):
            rank.coming.add(step)
            rank.outbox.append(MessageComing(0, step))

    def _offer(self, rank: GossipRank, step: int) -> None:
        if not self.plan.moves(step):
            return
        out = self._receivers(rank, step)
        if out or step in rank.coming:
            rank.letters[step] = out
        rank.coming.discard(step)
        rank.offered += bool(out)
        self.book.sent |= {((rank.ends, rank.place, step), to) for to in out}
        if any(step in exchange.keys_of(rank.number) for exchange in rank.held):
            self._submit(rank)
        else:
            rank.outbox.append(MessageQueued(0, step) if out else NoMessage(0, step))

    def _last(self, rank: GossipRank, other: int, step: int) -> int:
        last = rank.retired.get(other, step)
        return last + 1 if self._ahead and 0 < last < step else last

    def _is_fed(self, rank: GossipRank) -> bool:
        if self.token(rank) != "step" or rank.phase != 1:
            return True
        steps = range(1, rank.step - self.plan.config.max_staleness + 1)
        owed = [(sender, step) for step in steps for sender, _ in self.plan.in_edges(rank.place, step)]
        return all(one in rank.come or one[1] > self._last(rank, *one) for one in owed)

    def _tell_starved(self, rank: GossipRank) -> None:
        if not self._is_fed(rank):
            rank.outbox.append(WaitingForMessage(0, rank.landed))

    def has_all(self, rank: GossipRank) -> bool:
        assert rank.drained is not None
        return rank.landed >= rank.drained.rounds

    def after_end(self, rank: GossipRank) -> None:
        lost = [message for message, to in self.book.sent if to == rank.place and message[0] == rank.ends]
        assert not lost, f"messages {lost} to rank {rank.number} were lost"
        rank.come, rank.last, rank.local, rank.step, rank.average = set(), None, 0, 0, 0
        rank.ends += 1
        self._submit(rank)

    def left(self, rank: GossipRank) -> None:
        rank.deaf, rank.last = True, None
        self._submit(rank)

    # -- engines ----------------------------------------------------------------------------------------------

    def on_command(self, rank: GossipRank, command: Any) -> None:
        match command:
            case StartExchange():
                rank.asked = rank.asked and not any(rank.number in pair for pair in command.pairs)
                rank.held.append(command)
                self._submit(rank)
            case StartAverage(_, index):
                rank.average = index
            case RankFinished(_, number, step):
                assert rank.agreed, "told of a rank that it does not know yet"
                rank.retired[number] = step
            case _:
                super().on_command(rank, command)
                if isinstance(command, Drained):
                    rank.last, rank.asked = (None if rank.deaf else command.rounds), False
                    rank.retired = dict.fromkeys(command.gone, 0)

    def _submit(self, rank: GossipRank) -> None:
        while rank.held and (rank.last is None or rank.held[0].round <= rank.last):
            if any(key in rank.coming for key in rank.held[0].keys_of(rank.number)):
                return
            exchange = rank.held.pop(0)
            assert exchange.round == rank.submitted + 1, "exchanges out of order"
            rank.submitted = exchange.round
            for key in exchange.keys_of(rank.number):
                assert key in rank.letters, f"message {key} of rank {rank.number} was never offered, or goes twice"
                self.book.carried.setdefault(exchange.round, []).append((rank.place, key, rank.letters.pop(key)))
                self.book.carried[exchange.round].sort()
            rank.flying.append(exchange)

    def landing(self, rank: GossipRank) -> list[int]:
        """In the order in which they were submitted, as Horovod's are."""
        least = min(each.submitted for each in self.ranks)
        return [exchange.round for exchange in rank.flying[:1] if exchange.round <= least]

    def land(self, rank: GossipRank, what: int) -> None:
        exchange = next(exchange for exchange in rank.flying if exchange.round == what)
        rank.flying.remove(exchange)
        rank.landed += 1
        told = False
        for sender, key, receivers in self.book.carried.get(what, []):
            rank.gone += sender == rank.place and bool(receivers)
            told |= sender == rank.place == exchange.messages[0][0] and not receivers
            if rank.place not in receivers:
                continue
            told |= sender == exchange.messages[0][0]
            mine = [one for one in self.book.sent if one[0][1:] == (sender, key) and one[1] == rank.place]
            assert mine, f"message {key} of rank {sender} comes twice"
            self.book.sent.remove(min(mine))
            rank.come.add((sender, key))
            assert rank.deaf or min(mine)[0][0] == rank.ends, "a message of before an end, or of after it"
        rank.local = 0 if any(rank.number in pair for pair in exchange.pairs) else rank.local
        if told or (not exchange.messages and rank.number == exchange.pairs[0][1]):
            rank.outbox.append(ExchangeDone(0, what))
        if all(exchange not in each.flying and each.submitted >= what for each in self.ranks):
            self.book.carried.pop(what, None)
        if not rank.deaf:
            self._tell_starved(rank)

    def obeys_surely(self, rank: GossipRank) -> bool:
        """Of push-sum, exchanges and averages only bring what a thread waits for. That another is done is looked at
        by the thread: it must wait for what can only come after this command."""
        if self.in_end(rank) or not rank.agreed:
            return True
        if self.plan.config.algorithm == "adpsgd":
            return False
        command = rank.inbox[0]
        if isinstance(command, StartExchange | StartAverage):  # (where this rank's message comes yet, both tell of it)
            own = command.messages if isinstance(command, StartExchange) else []
            return not any(sender == rank.number and key in rank.coming for sender, key in own)
        if self.token(rank) != "step" or self.can_go_on(rank):
            return False
        flies = any(sender == rank.number for exchange in rank.flying for sender, _ in exchange.messages)
        return rank.phase == 2 or (rank.phase == 0 and not flies)

    def lands_surely(self, rank: GossipRank) -> bool:
        """The thread is over, in an end, or waits for this; no other news lets it go on sooner."""
        if self.in_end(rank):
            return True
        if self.token(rank) != "step" or self.can_go_on(rank) or self.plan.config.algorithm == "adpsgd":
            return False
        if rank.phase != 1:
            return True
        mail = self.book.carried.get(rank.flying[0].round, [])
        come, before = {(sender, key) for sender, key, receivers in mail if rank.place in receivers}, rank.come
        rank.come = before | come
        fed, rank.come = self._is_fed(rank), before
        return fed

    def save(self) -> bytes:
        machine: Any = self.machine
        machine._duration = 1.0 if self.slow else 0.0
        if not self.slow:
            machine._free_since = 0.0
        return super().save()

    # -- laws -------------------------------------------------------------------------------------------------

    def hear(self, rank: GossipRank, event: OptimizerEvent) -> None:
        book = self.book
        match event:
            case MessageComing(_, key):
                book.coming = dict(sorted({**book.coming, rank.number: key}.items()))
            case MessageQueued(_, key) | NoMessage(_, key) if book.early.get(rank.number) == key:
                pass
            case MessageQueued(_, key):
                book.coming.pop(rank.number, None)
                book.offers[rank.number].append(key)
            case NoMessage():
                book.coming.pop(rank.number, None)
            case PairRequested():
                book.wants += [] if rank.number in book.wants else [rank.number]
            case AverageEntered(_, index, [weight]):
                inside = {**book.inside.get(index, {}), rank.number: weight}
                book.inside[index] = dict(sorted(inside.items()))
            case ExchangeDone(_, number):
                book.flights.discard(number)
        if rank.number in book.done:
            book.wants = [other for other in book.wants if other != rank.number]

    def check(self, command: Command, ending: bool) -> None:
        book = self.book
        active = set(self.numbers) - book.done.keys()
        match command:
            case StartExchange():
                self._check_exchange(command, active, ending)
            case StartAverage(_, index, _, weights):
                assert index == book.average + 1
                inside = {rank: weight for rank, weight in book.inside.pop(index).items() if rank not in book.gone}
                assert set(command.ranks) == inside.keys() >= active
                assert self._goes_on or inside.keys() == active
                assert weights == [sum(inside.values())]
                book.average = index
            case RankFinished(_, number, step):
                assert number in book.done.keys() - book.announced
                assert step == book.told[number][0] - book.bases[number]
                book.announced.add(number)
            case _:
                raise AssertionError(f"{command} of a gossip")

    def _check_exchange(self, exchange: StartExchange, active: set[int], ending: bool) -> None:
        book = self.book
        book.exchanges += 1
        assert exchange.round == book.exchanges
        assert exchange.messages or exchange.pairs, "an exchange of nothing"
        book.flights.add(exchange.round)
        if self._all_coming(active):
            assert (sorted(exchange.messages), exchange.pairs) == (sorted(book.coming.items()), [])
            book.early, book.coming = dict(sorted({**book.early, **book.coming}.items())), {}
            return
        assert ending or book.flights == {exchange.round}, "two exchanges at once"
        first = {rank: keys[0] for rank, keys in book.offers.items() if keys}
        earliest = min(first.values(), default=0)
        expected = sorted((rank, key) for rank, key in first.items() if key == earliest)
        assert sorted(exchange.messages) == expected, f"{exchange.messages} go before {expected}"
        for rank, _ in expected:
            book.offers[rank].pop(0)
        paired = [rank for pair in exchange.pairs for rank in pair]
        assert len(set(paired)) == len(paired), "a rank is in two pairs"
        assert active.issuperset(paired), "averaged with a rank that is done"
        for asks, other in exchange.pairs:
            assert asks in book.wants, "neither rank of a pair wants it"
            assert other in self.plan.config.neighbours[asks], "averaged with a rank that is no neighbour"
        book.wants = [rank for rank in book.wants if rank not in paired]

    def _all_coming(self, active: set[int]) -> bool:
        """Whether all have announced messages of one step, after all before it have gone."""
        book = self.book
        alike = len(set(book.coming.values())) == 1 and not any(book.offers.values())
        return alike and book.coming.keys() == active

    def check_due(self, event: OptimizerEvent) -> None:
        book = self.book
        active = set(self.numbers) - book.done.keys()
        neighbours = self.plan.config.neighbours
        pairs = any(active.intersection(neighbours[rank]) for rank in book.wants)
        assert not self._all_coming(active), "all have announced a step, and it does not go"
        if not book.flights and (pairs or any(book.offers.values())):
            assert self.slow, "an exchange could go, and does not"
            assert self.machine.deadline() is not None, "nobody is told when an exchange goes"
        going = [inside for inside in book.inside.values() if inside.keys() >= active]
        assert not active or not going, "all are in an average that does not go"

    def check_end(self, drained: Drained[Any]) -> None:
        book = self.book
        assert not any(book.offers.values()), "an offer stayed behind"
        assert drained.rounds == book.exchanges
        left = {rank for inside in book.inside.values() for rank in inside}
        assert not left - book.gone, "an average of a rank that is done has not started"
        assert book.announced | {drained.last} | book.gone >= set(self.numbers)
        book.bases = {rank: counts[0] for rank, counts in book.told.items()}
        book.wants, book.inside, book.average, book.flights = [], {}, 0, set()
        book.coming, book.early = {}, {}
        book.announced = set()

    # -- time -------------------------------------------------------------------------------------------------

    def ages(self) -> bool:
        machine: Any = self.machine
        news = not machine._flights and machine._free_since > -1.0
        return news or any(at > -1.0 for at in self._since())

    def _since(self) -> list[float]:
        machine: Any = self.machine
        queued = [at for queue in machine._queues._queues.values() for at in queue.values()]
        return [*queued, *machine._requests.waiting.values()]

    def age(self) -> None:
        machine: Any = self.machine
        queues, requests = machine._queues, machine._requests
        queues._queues = {rank: _all_older(queue) for rank, queue in queues._queues.items()}
        for group in queues._groups:
            group.since = _older(group.since)
        requests.waiting = _all_older(requests.waiting)
        machine._free_since = _older(machine._free_since)
        machine._wake_at = None if machine._wake_at is None else machine._wake_at - 1.0
        machine._flights = dict.fromkeys(machine._flights, 0.0)


def _older(time: float) -> float:
    return max(time - 1.0, -1.0)


def _all_older(times: dict[int, float]) -> dict[int, float]:
    return {which: _older(at) for which, at in times.items()}
