"""State machine of partial allreduce: events and ``now`` in, commands out. No clock, no I/O.

The laws it keeps:

1. *One order.* When round t - 1 of a bucket has started, round t may; each starts once, and is commanded to every rank.
2. *Staleness.* When t - position(r) <= max_staleness for every active rank r, round t may start. A rank's position is
   the number of steps whose gradient it has handed over (pace "steps"), or the version it computes at (pace "rounds").
   A gradient computed at version v is handed over as step s <= v + 1 and carried by the first round started after that,
   so its staleness (round - 1 - v) keeps the bound.
   Where ranks step host by host, all of a host's gradients of a step count as handed over when the last one is, and go
   in one round. When that is too late for the step's own round, its ranks are told with which version the step ends, so
   that they begin the next with equal weights.
3. *Quorum.* When ``decide`` says so of the ranks (or hosts) that have arrived, round t starts: at once if all have, or
   when its ``grace`` is over.
4. *Hyperparameters belong to the round.* When the rank whose arrival started its last bucket is in ``step()``,
   they are that rank's, else those of the first rank that is. Whoever waits for a round is in ``step()``, so nobody
   waits for them.
5. *Nothing is left.* When all ranks have finished a drain, one last round carries all pending gradients, with the
   hyperparameters of the round before, or those that the first rank registered with; then all are told. After a cut, in
   which no rank asked for a drain, gradients stay pending.
6. *Illegal moves change nothing.* They raise ProtocolError.
7. *Whoever delays a round is named*, also after its start: when a round is in flight for long, a roll is called, and a
   rank whose engine does not answer has not submitted it.

States: opening (until every rank has registered and all match) -> running <-> drained (all have finished: counters are
re-based to the rounds started and all ranks are active again); rejected, if the ranks do not match.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from hvd_async.algorithms.eager.auto_quorum import AutoQuorum
from hvd_async.algorithms.eager.grace import Grace
from hvd_async.algorithms.eager.hosts import Gathering, Hosts
from hvd_async.algorithms.eager.messages import (
    EagerConfig,
    EndStep,
    GradientReady,
    ReportReceived,
    RoundsReceived,
    RoundTrigger,
    SetHyperparameters,
    StartRound,
    StepEntered,
    VersionTaken,
)
from hvd_async.algorithms.eager.quorum import check_quorum, decide
from hvd_async.algorithms.eager.round_state import Bucket, InStep, Round
from hvd_async.errors import ProtocolError
from hvd_async.runtime.messages import Command, Hyper, OptimizerEvent
from hvd_async.runtime.state_machine import StateMachine


class EagerStateMachine(StateMachine[EagerConfig]):
    """Rounds of one optimizer."""

    def __init__(self, optimizer: int, ranks: Sequence[int]) -> None:
        super().__init__(optimizer, ranks)
        self._auto: AutoQuorum | None = None
        self._hosts, self._grace = Hosts(ranks, 1), Grace(0.0)
        self._late: set[int] = set()
        """Hosts some bucket of whose step was gathered after its round had fired."""
        self._buckets: list[Bucket] = []
        self._in_step: dict[int, InStep] = {}
        """In the order in which they were heard."""
        self._told: dict[int, Hyper] = {}
        """Each rank's hyperparameters, as it told them last."""
        self._rounds: dict[int, Round] = {}
        self._last_hyper: Hyper = []
        self._calls = 0
        """Rolls that were called."""
        self._handed_over = dict.fromkeys(ranks, 0)
        """Gradients of the first bucket that each rank has handed over, or brought along."""

    def tick(self, now: float) -> list[Command]:
        """Start rounds that only waited for their grace to end."""
        return self._advance(None, now)

    def deadline(self) -> float | None:
        """Return the earliest end of a grace."""
        return min((b.wake_at for b in self._buckets if b.wake_at is not None), default=None)

    def handed_over(self) -> list[int]:
        return list(self._handed_over.values())

    def roll_call(self, fired_before: float) -> list[Command]:
        """Ask who is there, if a round that fired so early has not come back to any rank, as far as is known."""
        late = [b for b in self._buckets if b.landed < b.fired and b.fired_at <= fired_before]
        if not late:
            return []
        self._calls += 1
        for bucket in late:
            bucket.called = bucket.called or self._calls
        return [ReportReceived(self._optimizer, self._calls)]

    def take_notice(self) -> str | None:
        """Return a notice that another quorum was chosen, and why."""
        return None if self._auto is None else self._auto.take_notice()

    def _blocked_on(self) -> tuple[str, frozenset[int]] | None:
        for bucket in self._buckets:
            if bucket.waiting:
                round_ = bucket.fired + 1
                late = {r for r in self._active() if bucket.position[r] < round_}
                blocking = self._too_late(bucket, round_) or late
                return f"round {round_}", bucket.gathering.missing(blocking, self._hosts, self._active())
        for gathering in (bucket.gathering for bucket in self._buckets):
            if gathering.held:
                return "the step of a host", gathering.missing(gathering.held, self._hosts, self._active())
        for bucket in self._buckets:
            if bucket.called and bucket.landed < bucket.fired:
                silent = frozenset(self.ranks) - bucket.answered
                if silent:
                    return f"round {bucket.fired}, which has begun,", silent
                return f"round {bucket.fired}, which all have begun and Horovod has not ended,", frozenset(self.ranks)
        return None

    def _on_all_registered(self, config: Any) -> EagerConfig:
        assert isinstance(config, EagerConfig)
        self._hosts = Hosts(self.ranks, config.local_size)
        hosts = len(self._hosts.first)
        # a rank outside of a process set is alone, with the quorum of the others
        check_quorum(config.quorum, max(hosts, config.quorum) if isinstance(config.quorum, int) else hosts)
        self._told = {rank: opened.hyper for rank, opened in self._opened.items()}
        self._handed_over = {rank: self._opened[rank].loaded for rank in self.ranks}
        self._last_hyper = self._told[self.ranks[0]]
        self._grace = Grace(config.grace)
        if config.quorum == "auto":
            self._auto = AutoQuorum(self._hosts.first, config.max_staleness, config.pace)
        self._buckets = [
            Bucket(dict.fromkeys(self.ranks, 0), Gathering(dict.fromkeys(self._hosts.first, 0)))
            for _ in range(config.buckets)
        ]
        for bucket in self._buckets:
            bucket.loaded = any(opened.loaded for opened in self._opened.values())
        return config

    def _on_event(self, rank: int, event: OptimizerEvent, now: float) -> list[Command]:
        match event:
            case StepEntered():
                return self._stepped(rank, event, now)
            case GradientReady():
                return self._arrived(rank, event, now)
            case VersionTaken():
                return self._took(rank, event, now)
            case RoundsReceived():
                return self._present(rank, event)
            case _:
                raise ProtocolError(f"rank {rank} sent {type(event).__name__} of a partial allreduce")

    # -- steps ------------------------------------------------------------------------------------------------

    def _stepped(self, rank: int, event: StepEntered, now: float) -> list[Command]:
        self._running(rank, event)
        if rank in self._in_step and event.step <= self._in_step[rank].step:
            raise ProtocolError(f"rank {rank} reported step {event.step} after step {self._in_step[rank].step}")
        if event.hyper is not None:
            self._told[rank] = event.hyper
        hyper = self._told[rank]
        self._in_step.pop(rank, None)
        self._in_step[rank] = InStep(event.step, hyper, now)
        round_ = self._rounds.get(event.step)
        if round_ is None or round_.hyper is not None or not self._all_fired(event.step):
            return []
        self._settle(event.step, hyper)
        return [SetHyperparameters(self._optimizer, event.step, hyper)]

    def _arrived(self, rank: int, event: GradientReady, now: float) -> list[Command]:
        self._running(rank, event)
        if not 0 <= event.bucket < len(self._buckets):
            raise ProtocolError(f"rank {rank} named bucket {event.bucket} of {len(self._buckets)}")
        bucket, host = self._buckets[event.bucket], self._hosts.of[rank]
        held = bucket.gathering.held
        if event.step != bucket.position[rank] + 1 or event.step > bucket.fired + 1 or rank in held:
            raise ProtocolError(
                f"rank {rank} handed over step {event.step} of bucket {event.bucket} after step "
                f"{held.get(rank, bucket.position[rank])}, with {bucket.fired} rounds fired"
            )
        if held and any(held.get(other, event.step) != event.step for other in self._hosts.ranks(host)):
            raise ProtocolError(f"rank {rank} handed over step {event.step}, and other ranks of its host another")
        for each in self._buckets:
            if event.landed > each.fired:
                raise ProtocolError(f"rank {rank} has seen round {event.landed}, which it cannot have")
        held[rank] = event.step
        bucket.loaded = True
        self._handed_over[rank] += event.bucket == 0 and not event.empty
        for each in self._buckets:  # a rank in its next step has seen the round of the one before
            each.landed = max(each.landed, event.step - 1, event.landed)
        return [*self._gather(host, bucket, now), *self._advance(rank, now, event.bucket)]

    def _gather(self, host: int, bucket: Bucket, now: float) -> list[Command]:
        """Let a host's gradients of a bucket arrive if none is missing; with the last bucket its step is whole."""
        steps = bucket.gathering.gather(host, self._hosts.ranks(host), self._done)
        active = [rank for rank in steps if rank not in self._done]
        for rank in active:
            bucket.position[rank] = step = steps[rank]
            if step == bucket.fired + 1:
                bucket.waiting[rank] = now
            elif self._hosts.size > 1:
                self._late.add(host)
        if active and bucket is self._buckets[0]:
            self._grace.arrived(steps[active[0]], now)
        if not active or (self._auto is None and host not in self._late):
            return []  # (nobody asks for more)
        if len({each.gathering.whole[host] for each in self._buckets}) > 1:
            return []
        step = steps[active[0]]
        if self._auto is not None:
            self._auto.arrived(host, now, late=self._all_fired(step))
        if host not in self._late:
            return []
        self._late.remove(host)
        version = max(step, min(each.landed for each in self._buckets))
        return [EndStep(self._optimizer, self._hosts.first.index(host), bucket.gathering.whole[host], version)]

    def _took(self, rank: int, event: VersionTaken, now: float) -> list[Command]:
        config = self._running(rank, event)
        if config.pace != "rounds":
            raise ProtocolError(f"rank {rank} sent VersionTaken in pace {config.pace!r}")
        if any(not b.position[rank] <= event.version <= b.fired or rank in b.gathering.held for b in self._buckets):
            raise ProtocolError(f"rank {rank} took version {event.version}, which it cannot have")
        for bucket in self._buckets:
            bucket.position[rank] = event.version
        return self._advance(rank, now)

    def _present(self, rank: int, event: RoundsReceived) -> list[Command]:
        if len(event.landed) != len(self._buckets):
            raise ProtocolError(f"rank {rank} has {len(event.landed)} buckets of {len(self._buckets)}")
        if any(landed > bucket.fired for bucket, landed in zip(self._buckets, event.landed, strict=True)):
            raise ProtocolError(f"rank {rank} has seen rounds {event.landed}, which it cannot have")
        for bucket, landed in zip(self._buckets, event.landed, strict=True):
            if 0 < bucket.called <= event.call:
                bucket.answered.add(rank)
            bucket.landed = max(bucket.landed, landed)
        return []

    def _check_finished(self, rank: int) -> None:
        if any(rank in bucket.waiting for bucket in self._buckets):
            raise ProtocolError(f"rank {rank} is done although it waits for a round")

    def _on_event_of_absent(self, rank: int, event: OptimizerEvent, now: float) -> list[Command]:
        """Handle an event of a rank whose optimizer is deleted: its engine still reports what it has received."""
        return self._present(rank, event) if isinstance(event, RoundsReceived) else []

    def _forget(self, rank: int) -> None:
        for bucket in self._buckets:  # its gradients stay pending there, and go with a later round
            bucket.waiting.pop(rank, None)

    def _on_rank_finished(self, rank: int, now: float) -> list[Command]:
        gathered = [self._gather(self._hosts.of[rank], bucket, now) for bucket in self._buckets]
        return [*itertools.chain(*gathered), *self._advance(rank, now)]

    # -- firing -----------------------------------------------------------------------------------------------

    def _all_fired(self, round_: int) -> bool:
        return all(bucket.fired >= round_ for bucket in self._buckets)

    def _too_late(self, bucket: Bucket, round_: int) -> set[int]:
        """Return the computing ranks whose next gradient would break the staleness bound if ``round_`` fired now."""
        assert self._config is not None
        return {r for r in self._active() if round_ - bucket.position[r] > self._config.max_staleness}

    def _round(self, number: int) -> Round:
        if number not in self._rounds:
            assert self._config is not None
            active = set(self._hosts.among(self._active()))
            quorum, why = (self._config.quorum, "") if self._auto is None else self._auto.choose(number, active)
            self._rounds[number] = Round(quorum, why)
        return self._rounds[number]

    def _advance(self, by: int | None, now: float, only: int | None = None) -> list[Command]:
        """Fire every bucket's next round if it may. (Firing one round never makes the one after it ready.)

        Args:
            only: look at this bucket alone.
            by: the rank whose event it was; None if only time has passed.
        """
        if self._config is None or self._refused:
            return []
        commands: list[Command] = []
        active, whose = set(self._hosts.among(self._active())), "the host of " if self._hosts.size > 1 else ""
        for index in range(len(self._buckets)) if only is None else [only]:
            bucket = self._buckets[index]
            bucket.wake_at = None
            if not bucket.waiting:
                bucket.quorum_at = None
                continue
            number, config = bucket.fired + 1, self._config
            round_ = self._round(number)
            arrived = self._hosts.among(bucket.waiting)
            decision = decide(round_.quorum, number, arrived, active, self._hosts.first, config.seed, round_.why, whose)
            if not decision.fire:
                bucket.quorum_at = None
                continue
            if bucket.quorum_at is None:
                bucket.quorum_at = now
                if not index:
                    self._grace.quorum_reached(number, len(arrived), now)
            until = bucket.quorum_at + self._grace.seconds(len(arrived))
            if now < until and len(arrived) < len(active):
                bucket.wake_at = until
                continue
            if self._too_late(bucket, number):
                continue
            assert decision.initiator is not None
            last = next(reversed(bucket.waiting)) if by is None else by
            commands.append(self._fire(index, decision.initiator, decision.reason, last, now))
        return commands

    def _fire(self, index: int, initiator: int, reason: str, by: int, now: float) -> StartRound:
        """Fire a bucket's next round; its last bucket settles the hyperparameters if a rank is in that step: one of the
        host that this rank is the first of, if it can be."""
        bucket = self._buckets[index]
        arrivals, bucket.waiting = bucket.waiting, {}
        bucket.fired += 1
        bucket.quorum_at = None
        bucket.loaded = bool(bucket.gathering.held)
        bucket.fired_at, bucket.called = now, 0
        bucket.answered.clear()
        number, held = bucket.fired, 0.0
        if not index:
            self._grace.fired(number, now)
        round_ = self._round(number)
        if self._all_fired(number):
            held = sum(now - rank.at for rank in self._in_step.values() if rank.step == number)
            leads = [self._in_step[rank] for rank in self._hosts.ranks(initiator) if rank in self._in_step]
            lead = next((rank for rank in [*leads, *self._in_step.values()] if rank.step == number), None)
            if lead is not None and round_.hyper is None:
                self._settle(number, lead.hyper)
            if self._auto is not None:
                self._auto.fired(now)
        first = min(arrivals.values(), default=now)
        firing = RoundTrigger(reason, by, len(arrivals), first, now, held)
        whole = list(bucket.gathering.whole.values()) if self._hosts.size > 1 else []
        return StartRound(self._optimizer, index, number, round_.hyper, firing, whole)

    def _settle(self, number: int, hyper: Hyper) -> None:
        self._rounds[number].hyper = self._last_hyper = hyper
        for old in [n for n, round_ in self._rounds.items() if n < number and round_.hyper is not None]:
            del self._rounds[old]

    def _on_all_finished(self, rank: int, now: float) -> tuple[list[Command], int]:
        """Reduce all pending gradients in a last round, with the last hyperparameters."""
        for host in self._hosts.first:
            for bucket in self._buckets:
                self._gather(host, bucket, now)
        extra = self._flush and any(bucket.loaded for bucket in self._buckets)
        last = max(bucket.fired for bucket in self._buckets) + extra
        commands: list[Command] = []
        for index, bucket in enumerate(self._buckets):
            while bucket.fired < last:
                round_ = self._round(bucket.fired + 1)
                round_.hyper = self._last_hyper if round_.hyper is None else round_.hyper
                host = self._hosts.of[rank]
                commands.append(self._fire(index, host, "drain: all ranks are done", rank, now))
        for number, round_ in sorted(self._rounds.items()):
            if round_.hyper is None and number <= last:  # no rank has come to step() since its first bucket went
                commands.append(SetHyperparameters(self._optimizer, number, self._last_hyper))
        for bucket in self._buckets:
            bucket.position = dict.fromkeys(self.ranks, last)
            bucket.gathering.begin_anew()
        self._late.clear()
        self._in_step.clear()
        self._rounds.clear()
        self._grace.interrupted()
        if self._auto is not None:
            self._auto.interrupted()
        return commands, last
