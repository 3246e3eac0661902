"""Partial allreduce for ``explore``: model ranks that hand gradients over, submit rounds and apply them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hvd_async.algorithms.eager.config import (
    EagerConfig,
    EndStep,
    GradientReady,
    SetHyperparameters,
    StartRound,
    StepEntered,
    VersionTaken,
)
from hvd_async.algorithms.eager.quorum import initiator, needed
from hvd_async.runtime.machine import StateMachine
from hvd_async.runtime.protocol import Command, Drained, OptimizerEvent
from tests.unit.explore_world import Book, Program, Rank, World


@dataclass
class EagerRank(Rank):
    """A model rank.

    Attributes:
        pending: of each bucket, the versions that gradients were computed at which no round has carried.
        released: of each bucket, gradients since the last end that may go, as its host's others are there.
        whole: of rounds that have not landed, the steps of its host that were whole when they started.
        host_steps, ends_at: steps of its host that were whole as far as it knows, and the version the last one ends at.
        settled_at: steps at the last end.
        submitted: the last round of each bucket that its engine has submitted.
        knows: rounds whose hyperparameters have come and that have not landed.
        ready: rounds that have landed.
    """

    pending: list[list[int]] = field(default_factory=list)
    submitted: list[int] = field(default_factory=list)
    knows: set[int] = field(default_factory=set)
    released: list[int] = field(default_factory=list)
    whole: dict[int, int] = field(default_factory=dict)
    host_steps: int = 0
    ends_at: int = 0
    settled_at: int = 0
    ready: int = 0
    version: int = 0
    steps: int = 0
    base: int = 0


@dataclass
class EagerBook(Book):
    """Rounds that have gone, by bucket, where ranks are in each, and who has hyperparameters."""

    fired: list[int] = field(default_factory=list)
    handed: list[dict[int, int]] = field(default_factory=list)
    """Gradients of each rank since the last end."""
    step: list[dict[int, int]] = field(default_factory=list)
    """The step of each rank's last gradient, or the version it has taken since."""
    before: list[dict[int, int]] = field(default_factory=list)
    """``step`` before that."""
    ended: dict[tuple[int, int], int] = field(default_factory=dict)
    """(Host, step since the last end) -> the version with which it ended on a rank."""
    settled_rounds: set[int] = field(default_factory=set)
    """Those whose hyperparameters were told."""
    hyper: Any = None
    """The hyperparameters that were told last; at first, those that the first rank registered with."""
    sent: Any = None
    """Those that ranks were sent last."""
    entered: dict[int, int] = field(default_factory=dict)
    """The step that each rank has said last that it is in."""


class EagerWorld(World):
    """Every rank's even steps hand gradients over before ``step()``, bucket by bucket, as overlap with backward does;
    others all at once in it."""

    rank_type, book_type = EagerRank, EagerBook
    config: EagerConfig

    def __init__(
        self, machine: type[StateMachine[Any]], config: EagerConfig, programs: Sequence[Program], opening: bool = False
    ) -> None:
        super().__init__(machine, config, programs, opening)
        self.timed = bool(config.grace)  # type: ignore[misc]

    def begin(self) -> None:
        buckets = self.config.buckets
        for rank in self.ranks:
            rank.pending = [[] for _ in range(buckets)]
            rank.submitted = [0] * buckets
            rank.released = [0] * buckets
        self.book.fired = [0] * buckets
        self.book.hyper = self.first_hyper(self.numbers[0])
        for name in ("handed", "step", "before"):
            setattr(self.book, name, [dict.fromkeys(self.numbers, 0) for _ in range(buckets)])

    @property
    def by_hosts(self) -> bool:
        return self.config.local_size > 1

    def host(self, rank: int) -> int:
        """The first rank of its host."""
        return rank - rank % self.config.local_size

    def first_hyper(self, rank: int) -> list[dict[str, Any]]:
        return self._hyper(rank, 0)

    def _hyper(self, rank: int, step: int) -> list[dict[str, Any]]:
        return [{"lr": 100 * rank + step}]

    # -- training threads: phase 0 before a step; 1 to buckets: a bucket is handed over; then in step(), and waiting -

    def can_step(self, rank: EagerRank) -> bool:
        if rank.phase <= self.config.buckets:
            return True
        if self.by_hosts and (rank.host_steps < rank.steps - rank.settled_at or rank.ready < rank.ends_at):
            return False
        return rank.ready >= rank.steps + rank.base

    def step(self, rank: EagerRank) -> None:
        buckets = self.config.buckets
        overlaps = (rank.place + rank.at) % 2 == 0
        if rank.phase == 0:
            rank.steps += 1
            if overlaps:
                rank.phase = 1
                return self._hand_over(rank, [0])
            rank.phase = buckets
            self._enter(rank)
            return self._hand_over(rank, list(range(buckets)))
        if rank.phase < buckets:
            rank.phase += 1
            return self._hand_over(rank, [rank.phase - 1])
        if rank.phase == buckets:
            if overlaps:
                self._enter(rank)
            rank.phase += 1
            return None
        rank.version = rank.ready
        if self.by_hosts:
            rank.version = rank.ends_at
            step = self.host(rank.number), rank.steps - rank.settled_at
            assert self.book.ended.setdefault(step, rank.version) == rank.version, "a host's ranks go on apart"
        if self.config.pace == "rounds":
            rank.base = rank.version - rank.steps
            rank.outbox.append(VersionTaken(0, rank.version))
        rank.at, rank.phase = rank.at + 1, 0
        return None

    def _enter(self, rank: EagerRank) -> None:
        number = rank.steps + rank.base
        rank.outbox.append(StepEntered(0, number, self._hyper(rank.number, number)))

    def _hand_over(self, rank: EagerRank, buckets: list[int]) -> None:
        for bucket in buckets:
            rank.pending[bucket].append(rank.version)
            rank.produced[bucket] += 1
        rank.outbox.append(GradientReady(0, buckets, rank.steps + rank.base, rank.ready if self.by_hosts else 0))

    def has_all(self, rank: EagerRank) -> bool:
        assert rank.drained is not None
        return rank.ready >= rank.drained.rounds

    def after_end(self, rank: EagerRank) -> None:
        assert rank.drained is not None
        rank.version = rank.drained.rounds  # (rounds of those that are out already are for the next step)
        rank.base = rank.drained.rounds - rank.steps
        rank.settled_at = rank.steps

    # -- engines ----------------------------------------------------------------------------------------------

    def on_command(self, rank: EagerRank, command: Any) -> None:
        match command:
            case ("round", buckets, number, knows, whole):
                for bucket in buckets:
                    self._submit(rank, bucket, number, whole)
                if knows:
                    rank.knows.add(number)
            case EndStep(_, host, steps, version):
                if host == rank.place // self.config.local_size:
                    self._end_step(rank, steps, version)
            case SetHyperparameters(_, number, _):
                assert number not in rank.knows
                rank.knows.add(number)
            case _:
                if isinstance(command, Drained) and command.flushed:
                    assert not any(rank.pending), "a gradient stayed behind"
                if isinstance(command, Drained):
                    rank.released, rank.host_steps, rank.ends_at = [0] * self.config.buckets, 0, command.rounds
                    rank.whole = dict.fromkeys(rank.whole, 0)
                super().on_command(rank, command)

    def _submit(self, rank: EagerRank, bucket: int, number: int, whole: tuple[int, ...]) -> None:
        assert number == rank.submitted[bucket] + 1, "rounds out of order"
        rank.submitted[bucket] = number
        going = len(rank.pending[bucket])
        if self.by_hosts:
            may = whole[rank.place // self.config.local_size]
            rank.whole[number] = min(may, rank.whole.get(number, may))
            going = min(going, may - rank.released[bucket])
            rank.released[bucket] += going
        for version in rank.pending[bucket][:going]:
            stale = number - 1 - version
            assert 0 <= stale <= self.config.max_staleness, f"{stale} rounds stale in round {number}"
        del rank.pending[bucket][:going]

    def landing(self, rank: EagerRank) -> list[int]:
        number = rank.ready + 1
        whole = number in rank.knows and all(number <= least for each in self.ranks for least in each.submitted)
        return [number] if whole else []

    def land(self, rank: EagerRank, what: int) -> None:
        rank.knows.discard(what)
        rank.ready = what
        self._end_step(rank, rank.whole.pop(what, 0), what)

    def _end_step(self, rank: EagerRank, steps: int, version: int) -> None:
        if steps > rank.host_steps:
            rank.host_steps, rank.ends_at = steps, version

    def obeys_surely(self, rank: EagerRank) -> bool:
        """The thread is over, or in an end, or waits for a round that cannot land before this rank has obeyed more."""
        if self.in_end(rank) or not rank.agreed or self.token(rank) == "sum":
            return self.token(rank) != "sum" or (rank.phase == 1 and rank.combined < rank.calls)
        if self.by_hosts:
            return False  # (it may be all that the thread waits for)
        number = rank.steps + rank.base
        waits = self.token(rank) == "step" and rank.phase > self.config.buckets
        there = (number in rank.knows or rank.ready >= number) and min(rank.submitted) >= number
        return waits and not there

    def lands_surely(self, rank: EagerRank) -> bool:
        """The thread is over, in an end, or waits for this round; rounds beyond it would be taken with it, or not."""
        if self.in_end(rank) or not rank.agreed:
            return True
        if self.by_hosts:
            return False
        return self.token(rank) == "step" and rank.phase > self.config.buckets and rank.ready < rank.steps + rank.base

    def goes_on_surely(self, rank: EagerRank) -> bool:
        if self.token(rank) == "step" and rank.phase == self.config.buckets:
            return True  # (it only says that it is in step())
        return super().goes_on_surely(rank)

    # -- laws -------------------------------------------------------------------------------------------------

    def slim(self, command: Command) -> Any:
        match command:
            case StartRound(_, buckets, number):
                return ("round", tuple(buckets), number, command.settled, self._of_hosts(command))
        return command

    def hear(self, rank: EagerRank, event: OptimizerEvent) -> None:
        book = self.book
        match event:
            case GradientReady(_, buckets, step, _) | StepEntered(_, step, _, buckets):
                if isinstance(event, StepEntered):
                    book.entered[rank.number] = step
                for bucket in buckets:
                    book.handed[bucket][rank.number] += 1
                    book.before[bucket][rank.number] = book.step[bucket][rank.number]
                    book.step[bucket][rank.number] = step
            case VersionTaken(_, version):
                for step in book.step:
                    step[rank.number] = version

    def whole(self, bucket: int, host: int) -> int:
        """Gradients since the last end that no rank of a host lacks that is not done; all, if all are."""
        handed = {rank: self.book.handed[bucket][rank] for rank in range(host, host + self.config.local_size)}
        return min(
            (count for rank, count in handed.items() if rank not in self.book.done), default=max(handed.values())
        )

    def position(self, bucket: int, rank: int) -> int:
        """The step whose gradient may go, or the version taken since."""
        book = self.book
        if book.handed[bucket][rank] > self.whole(bucket, self.host(rank)):
            return book.before[bucket][rank]
        return book.step[bucket][rank]

    def arrived(self, bucket: int, active: set[int]) -> set[int]:
        """The hosts that wait for the next round."""
        number = self.book.fired[bucket] + 1
        return {self.host(rank) for rank in active if self.position(bucket, rank) == number}

    def check(self, command: Command, ending: bool) -> None:
        match command:
            case StartRound(_, buckets, number):
                hosts = self.numbers[:: self.config.local_size] if self.by_hosts else ()
                for bucket in buckets:
                    own = tuple(self.whole(bucket, host) for host in hosts)
                    assert self._of_hosts(command) == own, "a host's gradients go apart"
                    self._check_round(bucket, number, ending)
                if command.settled:
                    self._check_hyper(number, self._sent(command.hyper), ending)
            case SetHyperparameters(_, number, hyper):
                assert number not in self.book.settled_rounds, "hyperparameters of a round that has them"
                self._check_hyper(number, self._sent(hyper), ending)
            case EndStep(_, host, steps, _):
                first = self.numbers[:: self.config.local_size][host]
                assert all(self.whole(bucket, first) == steps for bucket in range(self.config.buckets))
            case _:
                raise AssertionError(f"{command} of a partial allreduce")

    def _of_hosts(self, start: StartRound) -> tuple[int, ...]:
        """``StartRound.whole``, host by host."""
        hosts = range(len(self.numbers) // self.config.local_size if self.by_hosts else 0)
        return tuple(start.whole.of(host) for host in hosts) if start.whole is not None else ()

    def _sent(self, hyper: Any) -> Any:
        """What ranks take hyperparameters for: None stands for those that they were sent last."""
        book = self.book
        assert hyper is None or hyper != book.sent, "hyperparameters are sent again"
        book.sent = book.sent if hyper is None else hyper
        assert book.sent is not None, "no hyperparameters were sent before"
        return book.sent

    def _check_round(self, bucket: int, number: int, ending: bool) -> None:
        book = self.book
        assert number == book.fired[bucket] + 1, f"round {number} of bucket {bucket} after {book.fired[bucket]}"
        active = set(self.numbers) - book.done.keys()
        arrived = self.arrived(bucket, active)
        book.fired[bucket] = number
        if ending:
            assert not active
            return
        for rank in active:
            assert number - self.position(bucket, rank) <= self.config.max_staleness
        assert self._met(number, arrived, active), f"round {number} with {arrived} of {active}"

    def _met(self, number: int, arrived: set[int], ranks: set[int]) -> bool:
        """Whether these hosts make the quorum of a round, of those of these ranks."""
        quorum, active = self.config.quorum, {self.host(rank) for rank in ranks}
        hosts = self.numbers[:: self.config.local_size]
        if quorum == "majority":
            return initiator(number, self.config.seed, active, hosts) in arrived
        if quorum == "solo":
            return bool(arrived)
        want = len(active) if isinstance(quorum, str) else min(needed(quorum, len(hosts)), len(active))
        return len(arrived) >= want > 0

    def check_due(self, event: OptimizerEvent) -> None:
        book = self.book
        active = set(self.numbers) - book.done.keys()
        for bucket, fired in enumerate(book.fired):
            number, arrived = fired + 1, self.arrived(bucket, active)
            fits = all(number - self.position(bucket, rank) <= self.config.max_staleness for rank in active)
            if not arrived or not fits or not self._met(number, arrived, active):
                continue
            assert self.config.grace, f"round {number} could go, and does not"
            assert len(arrived) < len({self.host(rank) for rank in active}), (
                f"round {number} could go before its grace ends, and does not"
            )
            assert self.machine.deadline() is not None, "nobody is told when a grace ends"

    def _check_hyper(self, number: int, hyper: Any, ending: bool) -> None:
        """One set a round: of a rank that is in that step; at an end, where nobody is, those of the round before."""
        book = self.book
        if ending:
            assert hyper == book.hyper, "a last round with new hyperparameters"
            book.settled_rounds.add(number)
            return
        assert min(book.fired) >= number, "hyperparameters of a round whose last bucket has not gone"
        assert number not in book.settled_rounds, "hyperparameters of a round that has them"
        book.settled_rounds.add(number)
        book.hyper = hyper
        in_it = [rank for rank, step in book.entered.items() if step == number]
        assert hyper in [self._hyper(rank, number) for rank in in_it], "of a rank that is not in this step"

    def check_end(self, drained: Drained[Any]) -> None:
        book = self.book
        assert set(book.fired) == {drained.rounds}
        assert book.settled_rounds == set(range(1, drained.rounds + 1)), "a round never got its hyperparameters"
        book.entered = {}
        book.ended = {}
        for step in book.step:
            step.update(dict.fromkeys(self.numbers, drained.rounds))
        for handed in book.handed:
            handed.update(dict.fromkeys(self.numbers, 0))

    # -- time -------------------------------------------------------------------------------------------------

    def age(self) -> None:
        machine: Any = self.machine
        for bucket in machine._buckets:
            bucket.waiting = {host: _older(at) for host, at in bucket.waiting.items()}
            bucket.quorum_at = None if bucket.quorum_at is None else _older(bucket.quorum_at)
            bucket.fired_at = _older(bucket.fired_at)
        machine._wakes = {bucket: at - 1.0 for bucket, at in machine._wakes.items()}
        for since in machine._steppers._by_step.values():
            since.update({rank: _older(at) for rank, at in since.items()})


def _older(time: float) -> float:
    return max(time - 1.0, -1.0)
