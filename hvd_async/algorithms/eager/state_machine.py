"""State machine of partial allreduce: events and ``now`` in, commands out. No clock, no I/O.

The laws it keeps:

1. *One order.* When round t - 1 of a bucket has started, round t may; each starts once, and is commanded to every rank.
2. *Staleness.* When t - position(r) <= max_staleness for every active rank r, round t may start. A rank's position is
   the number of steps whose gradient it has handed over (pace "steps"), or the version it computes at (pace "rounds").
   A gradient of version v is handed over as step s <= v + 1, and carried by the first round started after that: its
   staleness (round - 1 - v) keeps the bound.
   Where ranks step host by host, all of a host's gradients of a step count as handed over when the last one is, and go
   in one round. When that is too late for the step's own round, its ranks are told with which version the step ends, so
   that they begin the next with equal weights.
3. *Quorum.* When ``RoundQuorum`` says so of the ranks (or hosts) that have arrived, round t starts: at once if all
   have, or when its ``grace`` is over.
4. *Hyperparameters belong to the round.* When the rank whose arrival started its last bucket is in ``step()``,
   they are that rank's, else those of the first rank that is. Whoever waits for a round is in ``step()``, so nobody
   waits for them.
5. *Nothing is left.* When all ranks have finished a drain, one last round carries all pending gradients, with the
   hyperparameters of the round before, or those that the first rank registered with; then all are told. After a cut, in
   which no rank asked for a drain, gradients stay pending.
6. *Illegal moves change nothing.* They raise ProtocolError.
7. *Whoever delays a round is named*, also after its start: when a round is in flight for long, a roll is called, and a
   rank whose engine does not answer has not submitted it.
8. *An event costs the same with more ranks.* What takes time in proportion to them is done once a round or an end.

States: opening (until every rank has registered and all match) -> running <-> drained (all have finished: counters are
re-based to the rounds started and all ranks are active again); rejected, if the ranks do not match.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hvd_async.algorithms.eager.arrivals import check_arrival
from hvd_async.algorithms.eager.auto_quorum import AutoQuorum
from hvd_async.algorithms.eager.grace import Grace
from hvd_async.algorithms.eager.hosts import Gathering, Hosts
from hvd_async.algorithms.eager.messages import (
    EagerConfig,
    EndStep,
    ExplainRound,
    GradientReady,
    ReportReceived,
    RoundsReceived,
    RoundTrigger,
    StepEntered,
    VersionTaken,
)
from hvd_async.algorithms.eager.quorum import RoundQuorum, check_quorum
from hvd_async.algorithms.eager.received_rounds import ReceivedRounds
from hvd_async.algorithms.eager.round_commands import RoundCommands, Started
from hvd_async.algorithms.eager.round_state import Bucket, Positions, Round, Steppers, is_last
from hvd_async.errors import ProtocolError
from hvd_async.runtime.messages import Command, Hyper, OptimizerEvent
from hvd_async.runtime.state_machine import StateMachine


class EagerStateMachine(StateMachine[EagerConfig]):
    """Rounds of one optimizer."""

    def __init__(self, optimizer: int, ranks: Sequence[int]) -> None:
        super().__init__(optimizer, ranks)
        self._auto: AutoQuorum | None = None
        self._hosts, self._grace, self._by_hosts = Hosts(ranks, 1), Grace(0.0), False
        """Whether ranks step host by host."""
        self._late: set[int] = set()
        """Hosts some bucket of whose step was gathered after its round had fired."""
        self._gathering = Gathering(self._hosts, 0)
        self._positions = Positions((), 0, ())
        self._buckets: list[Bucket] = []
        self._fired = 0
        """Rounds that all buckets have fired."""
        self._received = ReceivedRounds()
        self._wakes: dict[int, float] = {}
        """By bucket, when a grace ends that is all that holds its round back."""
        self._steppers = Steppers()
        self._told: dict[int, Hyper] = {}
        """Each rank's hyperparameters, as it told them last."""
        self._rounds: dict[int, Round] = {}
        self._last_hyper: Hyper = []
        self._commands = RoundCommands(optimizer)
        self._timelines: list[int] = []
        """Ranks that record a timeline."""
        self._handed_over = dict.fromkeys(ranks, 0)
        """Gradients of the first bucket that each rank has handed over, or brought along."""

    def tick(self, now: float) -> list[Command]:
        """Start rounds that only waited for their grace to end."""
        return self._advance(None, now)

    def deadline(self) -> float | None:
        """Return the earliest end of a grace."""
        return min(self._wakes.values()) if self._wakes else None

    def recipients(self, command: Command) -> Sequence[int]:
        if isinstance(command, ExplainRound):
            return self._timelines
        if isinstance(command, EndStep):
            return self._hosts.ranks(self._hosts.first[command.host])
        return super().recipients(command)

    def handed_over(self) -> list[int]:
        return list(self._handed_over.values())

    def roll_call(self, fired_before: float) -> list[Command]:
        """Ask who is there, if a round that fired so early has not come back to any rank, as far as is known."""
        call = self._received.call(self._buckets, fired_before)
        return [] if call is None else [ReportReceived(self._optimizer, call)]

    def take_notice(self) -> str | None:
        """Return a notice that another quorum was chosen, and why."""
        return None if self._auto is None else self._auto.take_notice()

    def _blocked_on(self) -> tuple[str, frozenset[int]] | None:
        config, active = self._config, self._active()
        assert config is not None
        for index, bucket in enumerate(self._buckets):
            if bucket.waiting:
                round_ = bucket.fired + 1
                blocking = self._behind(index, round_ - config.max_staleness) or self._behind(index, round_)
                return f"round {round_}", self._gathering.missing(blocking, self._hosts, active, index)
        for index in range(len(self._buckets)):
            if self._gathering.holds(index):
                held = [rank for rank, bits in self._gathering.held.items() if bits >> index & 1]
                return "the step of a host", self._gathering.missing(held, self._hosts, active, index)
        return self._received.blocked_on(self._buckets, self.ranks)

    def _behind(self, index: int, position: int) -> set[int]:
        """Return the ranks that are not done and have not come to this position in a bucket."""
        return {rank for rank in self._active() if self._positions.at(rank, index) < position}

    def _on_all_registered(self, config: Any) -> EagerConfig:
        assert isinstance(config, EagerConfig)
        self._hosts = Hosts(self.ranks, config.local_size, self._done)
        self._by_hosts = config.local_size > 1
        hosts = len(self._hosts.first)
        # a rank outside of a process set is alone, with the quorum of the others
        check_quorum(config.quorum, max(hosts, config.quorum) if isinstance(config.quorum, int) else hosts)
        self._told = {rank: opened.hyper for rank, opened in self._opened.items()}
        self._timelines = [rank for rank in self.ranks if self._opened[rank].timeline]
        self._handed_over = {rank: self._opened[rank].loaded for rank in self.ranks}
        self._last_hyper = self._told[self.ranks[0]]
        self._grace = Grace(config.grace)
        if config.quorum == "auto":
            self._auto = AutoQuorum(self._hosts.first, config.max_staleness, config.pace)
        self._gathering = Gathering(self._hosts, config.buckets if self._by_hosts else 0)
        self._positions = Positions(self.ranks, config.buckets, self._done)
        loaded = any(self._handed_over.values())
        self._buckets = [Bucket(loaded=loaded) for _ in range(config.buckets)]
        return config

    def _on_event(self, rank: int, event: OptimizerEvent, now: float) -> list[Command]:
        match event:
            case StepEntered() if not event.buckets:
                return self._stepped(rank, event, now)
            case StepEntered():
                arrived = self._check_arrived(rank, event)  # (before anything has changed)
                return self._stepped(rank, event, now) + self._arrived(rank, event, arrived, now)
            case GradientReady():
                return self._arrived(rank, event, self._check_arrived(rank, event), now)
            case VersionTaken():
                return self._took(rank, event, now)
            case RoundsReceived():
                self._received.report(rank, event, self._buckets)
                return []
            case _:
                raise ProtocolError(f"rank {rank} sent {type(event).__name__} of a partial allreduce")

    # -- steps ------------------------------------------------------------------------------------------------

    def _stepped(self, rank: int, event: StepEntered, now: float) -> list[Command]:
        self._running(rank, event)
        last = self._steppers.last(rank)
        if last is not None and event.step <= last:
            raise ProtocolError(f"rank {rank} reported step {event.step} after step {last}")
        if event.hyper is not None:
            self._told[rank] = event.hyper
        self._steppers.enter(rank, event.step, now, self._fired)
        round_, hyper = self._rounds.get(event.step), self._told[rank]
        if round_ is None or round_.hyper is not None or self._fired < event.step:
            return []
        self._settle(event.step, hyper)
        return [self._commands.hyper(event.step, hyper)]

    def _check_arrived(self, rank: int, event: GradientReady | StepEntered) -> int:
        """Return the buckets of a rank's step that have arrived, as bits; changes nothing."""
        self._running(rank, event)
        gathering, positions = self._gathering, self._positions
        return check_arrival(rank, self._hosts.of[rank], event, self._fired, self._buckets, positions, gathering)

    def _arrived(self, rank: int, event: GradientReady | StepEntered, bits: int, now: float) -> list[Command]:
        step, indices, all_buckets, host = event.step, event.buckets, self._buckets, self._hosts.of[rank]
        if 0 in indices and 0 not in event.empty:
            self._handed_over[rank] += 1
        # a rank in its next step has seen the round of the one before
        self._received.note(max(step - 1, event.landed))
        for index in indices:
            all_buckets[index].loaded = True
        if not self._by_hosts:
            self._come(rank, (rank,), step, indices, bits, now)
            commands: list[Command] = []
        else:
            commands = self._gather(host, self._gathering.hold(rank, host, step, indices, bits), now)
        due = [index for index in indices if len(all_buckets[index].waiting) >= all_buckets[index].least]
        return commands + self._advance(rank, now, due) if due else commands

    def _gather(self, host: int, indices: Sequence[int], now: float) -> list[Command]:
        """Let a host's gradients of buckets arrive of which none is missing; with the last bucket its step is whole."""
        if not indices:
            return []
        ranks, step = self._hosts.ranks(host), self._gathering.step(host)
        assert step is not None
        active = [rank for rank in ranks if rank in self._computing]
        self._gathering.let_go(host, ranks, active, indices)
        bits = sum(1 << index for index in indices)
        if not active or not self._come(host, active, step, indices, bits, now) or host not in self._late:
            return []
        self._late.remove(host)
        version = max(step, min(self._received.of(each) for each in self._buckets))
        whole = self._gathering.whole[indices[0]][host]
        return [EndStep(self._optimizer, self._hosts.number[host], whole, version)]

    def _come(self, host: int, ranks: Sequence[int], step: int, indices: Sequence[int], bits: int, now: float) -> bool:
        """Gradients of a host's ranks that are not done arrive; return whether its step is whole."""
        whole = self._positions.step(ranks, step, indices, bits)
        for index in indices:
            bucket = self._buckets[index]
            if step == bucket.fired + 1:
                bucket.waiting[host] = now
                bucket.arrived += len(ranks)
            elif self._by_hosts:
                self._late.add(host)
            if not index:
                self._grace.arrived(step, now)
        if whole and self._auto is not None:
            self._auto.arrived(host, now, late=self._fired >= step)
        return whole

    def _took(self, rank: int, event: VersionTaken, now: float) -> list[Command]:
        config = self._running(rank, event)
        if config.pace != "rounds":
            raise ProtocolError(f"rank {rank} sent VersionTaken in pace {config.pace!r}")
        position = self._positions.of[rank]
        ahead = rank in self._positions.ahead or rank in self._gathering.held
        if ahead or not position <= event.version <= self._fired:
            raise ProtocolError(f"rank {rank} took version {event.version}, which it cannot have")
        self._positions.move(rank, event.version)
        return self._advance(rank, now)

    def _check_finished(self, rank: int) -> None:
        if self._waits_in(rank):
            raise ProtocolError(f"rank {rank} is done although it waits for a round")

    def _waits_in(self, rank: int) -> list[Bucket]:
        """Return the buckets for whose next round a rank waits that is not done."""
        at = self._positions.at
        return [bucket for index, bucket in enumerate(self._buckets) if at(rank, index) > bucket.fired]

    def _on_event_of_absent(self, rank: int, event: OptimizerEvent, now: float) -> list[Command]:
        """Handle an event of a rank whose optimizer is deleted: its engine still reports what it has received."""
        return self._on_event(rank, event, now) if isinstance(event, RoundsReceived) else []

    def _forget(self, rank: int) -> None:
        if rank in self._computing and self._buckets:
            host = self._hosts.of[rank]
            for bucket in self._waits_in(rank):  # its gradients stay pending there, and go with a later round
                bucket.arrived -= 1
                if self._hosts.active[host] == 1:  # (where one of a host's ranks waits, all do)
                    del bucket.waiting[host]

    def _on_rank_finished(self, rank: int, now: float) -> list[Command]:
        if not self._buckets:
            return []
        host = self._hosts.of[rank]
        self._hosts.finish(rank)
        self._positions.leave(rank)
        ready = self._gathering.finish(rank, host, self._hosts.ranks(host)) if self._by_hosts else ()
        return [*self._gather(host, ready, now), *self._advance(rank, now)]

    # -- firing -----------------------------------------------------------------------------------------------

    def _round(self, number: int) -> Round:
        round_ = self._rounds.get(number)
        if round_ is None:
            config, hosts = self._config, self._hosts
            assert config is not None
            quorum, why = (config.quorum, "") if self._auto is None else self._auto.choose(number, hosts.active)
            whose = "the host of " if self._by_hosts else ""
            round_ = self._rounds[number] = Round(RoundQuorum(quorum, number, hosts.first, config.seed, why, whose))
        return round_

    def _advance(self, by: int | None, now: float, only: Iterable[int] | None = None) -> list[Command]:
        """Fire every bucket's next round if it may. (Firing one round never makes the one after it ready.)

        Args:
            only: look at these buckets alone.
            by: the rank whose event it was; None if only time has passed.
        """
        if self._config is None or self._refused:
            return []
        active, started, commands = self._hosts.active, list[Started](), list[Command]()
        for index in range(len(self._buckets)) if only is None else only:
            bucket = self._buckets[index]
            if self._wakes:
                self._wakes.pop(index, None)
            arrived, number = bucket.waiting, bucket.fired + 1
            quorum = self._round(number).quorum if arrived else None
            initiator = None if quorum is None else quorum.initiator(arrived, active)
            if quorum is None or initiator is None:
                bucket.quorum_at = None
                bucket.least = 1 if quorum is None else quorum.least(len(active))
                continue
            if bucket.quorum_at is None:
                bucket.quorum_at = now
                if not index:
                    self._grace.quorum_reached(number, len(arrived), now)
            until = bucket.quorum_at + self._grace.seconds(len(arrived))
            if now < until and len(arrived) < len(active):
                self._wakes[index] = until
                continue
            if number - self._positions.lowest_in(index) > self._config.max_staleness:
                continue
            if by is None:  # the last that has come
                ranks = self._hosts.ranks(next(reversed(arrived)))
                last = [r for r in ranks if r in self._computing and self._positions.at(r, index) == number][-1]
            else:
                last = by
            if self._timelines:
                commands.append(self._explain(index, quorum.reason(arrived, active), last, now))
            started.append(self._fire(index, initiator, last, now))
        return [*commands, *self._commands.starts(started)] if started else []

    def _explain(self, index: int, reason: str, by: int, now: float) -> ExplainRound:
        bucket = self._buckets[index]
        number, first = bucket.fired + 1, min(bucket.waiting.values(), default=now)
        held = self._steppers.waited(number, now) if is_last(self._buckets, index) else 0.0
        trigger = RoundTrigger(reason, by, bucket.arrived, first, now, held)
        return ExplainRound(self._optimizer, index, number, trigger)

    def _fire(self, index: int, initiator: int, by: int, now: float) -> Started:
        """Fire a bucket's next round; its last bucket settles the hyperparameters if a rank is in that step: one of the
        host that this rank is the first of, if it can be."""
        bucket, last = self._buckets[index], is_last(self._buckets, index)
        arrived = bucket.arrived
        bucket.waiting, bucket.arrived, bucket.least = {}, 0, 1
        bucket.fired += 1
        bucket.quorum_at = None
        bucket.loaded = self._by_hosts and self._gathering.holds(index)
        bucket.fired_at, bucket.called = now, 0
        bucket.answered.clear()
        number, held = bucket.fired, 0.0
        if not index:
            self._grace.fired(number, now)
        round_ = self._round(number)
        if last:
            self._fired = number
            held = self._steppers.waited(number, now)
            lead = self._steppers.lead(number, self._hosts.ranks(initiator))
            self._steppers.forget(number)
            if lead is not None and round_.hyper is None:
                self._settle(number, self._told[lead])
            if self._auto is not None:
                self._auto.fired(now)
        hyper, whole = round_.hyper if last else None, self._gathering.host_steps(index) if self._by_hosts else None
        return Started(index, number, by, arrived, held, hyper, whole)

    def _settle(self, number: int, hyper: Hyper) -> None:
        self._rounds[number].hyper = self._last_hyper = hyper
        for old in [n for n, round_ in self._rounds.items() if n < number and round_.hyper is not None]:
            del self._rounds[old]

    def _on_all_finished(self, rank: int, now: float) -> tuple[list[Command], int]:
        """Reduce all pending gradients in a last round, with the last hyperparameters."""
        self._gathering.let_all_go(self._hosts)
        extra = self._flush and any(bucket.loaded for bucket in self._buckets)
        last = max(bucket.fired for bucket in self._buckets) + extra
        commands, started = list[Command](), list[Started]()
        for index, bucket in enumerate(self._buckets):
            while bucket.fired < last:
                round_ = self._round(bucket.fired + 1)
                round_.hyper = self._last_hyper if round_.hyper is None else round_.hyper
                if self._timelines:
                    commands.append(self._explain(index, "drain: all ranks are done", rank, now))
                started.append(self._fire(index, self._hosts.of[rank], rank, now))
        commands += self._commands.starts(sorted(started, key=lambda one: one.round))
        for number, round_ in sorted(self._rounds.items()):
            if round_.hyper is None and number <= last:  # no rank has come to step() since its first bucket went
                commands.append(self._commands.hyper(number, self._last_hyper))
        self._hosts.begin_anew()
        self._positions.begin_anew(self.ranks, last)
        self._gathering.begin_anew(self._hosts)
        self._late.clear()
        self._steppers.clear()
        self._rounds.clear()
        self._grace.interrupted()
        if self._auto is not None:
            self._auto.interrupted()
        return commands, last
