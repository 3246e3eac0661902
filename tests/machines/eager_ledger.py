"""Ledger of the events and commands of partial allreduce's coordinator, independent of it, checked against the laws."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hvd_async.algorithms.eager.config import (
    EagerConfig,
    ExplainRound,
    GradientReady,
    RoundTrigger,
    SetHyperparameters,
    StartRound,
    StepEntered,
    VersionTaken,
)
from hvd_async.algorithms.eager.quorum import Quorum, initiator
from hvd_async.runtime.protocol import Command, Drained, Finished, Hyper, OptimizerEvent, Registered

CHOSEN = re.compile(r"quorum: \d+ of \d+ are in, (\d+) needed \(auto: .+\)")


@dataclass(frozen=True)
class Moment:
    """Who had arrived for a bucket's next round at some time, and who was not done."""

    now: float
    arrived: tuple[int, ...]
    active: frozenset[int]


class Ledger:
    """Checks every command as it comes.

    Attributes:
        fired: rounds of each bucket.
        position: bucket -> rank -> the step that its last gradient was, or the version it has taken since.
        arrivals: (bucket, round) -> the ranks that came in time for it, in order, and when.
        steppers: round -> the ranks that have reported being in that step, in order.
        hypers: round -> what it is applied with.
        drain_rounds: those fired because all were done.
        opened: what the first of the ranks would apply a round with when it opened.
        last_quorum: the number of ranks that "auto" asked for last.
    """

    def __init__(self, config: EagerConfig, ranks: Sequence[int]) -> None:
        self.config, self.ranks = config, tuple(ranks)
        self.fired = [0] * config.buckets
        self.position = [dict.fromkeys(ranks, 0) for _ in range(config.buckets)]
        self.arrivals: dict[tuple[int, int], dict[int, float]] = {}
        self.done: set[int] = set()
        self.flush = False
        self.steppers: dict[int, list[int]] = {}
        self.hypers: dict[int, Hyper] = {}
        self.drain_rounds: set[int] = set()
        self.last_quorum = len(ranks)
        self.opened: Hyper | None = None
        self._reported: dict[tuple[int, int], Hyper] = {}
        self._hyper: dict[int, Hyper] = {}
        self._in_step: dict[int, tuple[int, float]] = {}
        self._moments: list[list[Moment]] = [[] for _ in range(config.buckets)]
        self._unsettled: set[int] = set()
        self._triggers: dict[tuple[int, int], RoundTrigger] = {}
        self._sent: Hyper | None = None

    def hear(self, rank: int, event: OptimizerEvent, now: float) -> None:
        """An event that is about to reach the state machine."""
        match event:
            case Registered():
                self.opened = event.hyper if rank == self.ranks[0] else self.opened
                self._hyper[rank] = event.hyper
            case GradientReady(_, buckets, step):
                self._arrive(rank, buckets, step, now)
            case VersionTaken(_, version):
                assert self.config.pace == "rounds"
                for position in self.position:
                    position[rank] = version
            case StepEntered(_, step, hyper, buckets):
                self._arrive(rank, buckets, step, now)
                self._hyper[rank] = self._hyper[rank] if hyper is None else hyper
                self._reported[rank, step] = self._hyper[rank]
                self._in_step[rank] = (step, now)
                self.steppers.setdefault(step, []).append(rank)
            case Finished(_, _, flush):
                self.done.add(rank)
                self.flush = self.flush or flush
        self._note(now)

    def _arrive(self, rank: int, buckets: list[int], step: int, now: float) -> None:
        for bucket in buckets:
            assert step == self.position[bucket][rank] + 1
            self.position[bucket][rank] = step
            if step == self.fired[bucket] + 1:
                self.arrivals.setdefault((bucket, step), {})[rank] = now

    def check(self, commands: list[Command], rank: int | None, now: float) -> None:
        """The commands that came of it.

        Args:
            rank: whose event it was; None if it was only time.

        Raises:
            AssertionError: one breaks a promise.
        """
        ending = any(isinstance(c, Drained) for c in commands)
        for command in commands:
            if isinstance(command, ExplainRound):
                assert (command.bucket, command.round) not in self._triggers
                self._triggers[command.bucket, command.round] = command.trigger
            elif isinstance(command, StartRound):
                self._check_start(command, ending, rank, now)
            elif isinstance(command, SetHyperparameters):
                self._check_settle(command)
            elif isinstance(command, Drained):
                self._check_all_done(command, rank)
        self._note(now)
        for each, (step, _) in self._in_step.items():
            assert step > min(self.fired) or step in self.hypers, f"rank {each} waits for hyperparameters of {step}"

    def active(self) -> frozenset[int]:
        """Ranks that are not done."""
        return frozenset(self.ranks) - self.done

    def _note(self, now: float) -> None:
        for bucket, moments in enumerate(self._moments):
            arrived = self.arrivals.get((bucket, self.fired[bucket] + 1), {})
            moments.append(Moment(now, tuple(arrived), self.active()))

    def met(self, round_: int, quorum: Quorum, arrived: Collection[int], active: frozenset[int]) -> bool:
        """By the quorum's definition, not by ``decide``."""
        if not arrived or quorum == "solo":
            return bool(arrived)
        if quorum == "majority":
            return self._drawn(round_, active) in arrived
        size = len(self.ranks)
        want = size if quorum == "all" else quorum if isinstance(quorum, int) else quorum * size
        assert not isinstance(want, str)
        return len(arrived) >= min(want, len(active))

    def _drawn(self, round_: int, active: frozenset[int]) -> int:
        return initiator(round_, self.config.seed, active, self.ranks)

    def _quorum(self, trigger: RoundTrigger) -> Quorum:
        """The configuration's, or what "auto" said it chose, the same for every bucket of a round."""
        if self.config.quorum != "auto":
            return self.config.quorum
        match = CHOSEN.fullmatch(trigger.reason)
        assert match, trigger.reason
        self.last_quorum = int(match[1])
        assert 1 <= self.last_quorum <= len(self.active())
        return self.last_quorum

    def _check_start(self, start: StartRound, ending: bool, rank: int | None, now: float) -> None:
        """Each of its buckets; the last of all that fires the round tells its hyperparameters, if they are known."""
        held = 0.0
        for bucket, arrived in zip(start.buckets, start.arrived, strict=True):
            trigger = self._triggers.pop((bucket, start.round))
            assert (trigger.by, trigger.arrived) == (start.by, arrived)
            held += trigger.held
            leader = self._check_go(bucket, start.round, trigger, ending, rank, now)
        assert start.held == held
        whole = min(self.fired) >= start.round
        hyper = self._reported_hyper(start.hyper) if start.settled else None
        assert start.settled or start.hyper is None
        self._check_hyper(start.round, hyper, whole, leader)

    def _reported_hyper(self, hyper: Hyper | None) -> Hyper:
        """What ranks take them for: None means the last ones they received."""
        assert hyper is None or hyper != self._sent, "reported again"
        self._sent = self._sent if hyper is None else hyper
        assert self._sent is not None
        return self._sent

    def _check_go(
        self, bucket: int, round_: int, trigger: RoundTrigger, ending: bool, rank: int | None, now: float
    ) -> int | None:
        """Return who leads it; None at an end."""
        assert round_ == self.fired[bucket] + 1, f"bucket {bucket}: round {round_} after {self.fired[bucket]}"
        arrived = self.arrivals.get((bucket, round_), {})
        leader = None
        if ending:
            assert self.done == set(self.ranks)
            assert self.flush, "a last round although no rank asked for one"
            assert trigger.reason == "drain: all ranks have finished"
            self.drain_rounds.add(round_)
        else:
            quorum, active = self._quorum(trigger), self.active()
            assert self.met(round_, quorum, arrived, active), f"round {round_} fired with {arrived} of {active}"
            since = now
            for moment in reversed(self._moments[bucket]):
                if not self.met(round_, quorum, moment.arrived, moment.active):
                    break
                since = moment.now
            assert now >= since + self.config.grace or set(arrived) == active, "fired within its grace"
            for each in active:
                assert round_ - self.position[bucket][each] <= self.config.max_staleness
            leader = self._drawn(round_, active) if quorum == "majority" else next(iter(arrived))
        self.fired[bucket] = round_
        self._moments[bucket].clear()
        assert trigger.by == (list(arrived)[-1] if rank is None else rank)
        assert trigger.arrived == len(arrived)
        assert trigger.first == min(arrived.values(), default=now)
        assert trigger.fired == now
        held = [now - since for step, since in self._in_step.values() if step == round_]
        assert abs(trigger.held - (sum(held) if min(self.fired) >= round_ else 0.0)) < 1e-9
        return leader

    def _check_hyper(self, round_: int, hyper: Hyper | None, whole: bool, leader: int | None) -> None:
        """Those of the last bucket's initiator if it is in the step, else of the first rank that is."""
        assert round_ not in self.hypers, "the hyperparameters were known already"
        if leader is None and not whole:
            assert hyper is None, "hyperparameters of a round that is not settled"
        elif leader is None:
            assert hyper == (self.hypers[max(self.hypers)] if self.hypers else self.opened)
        elif not whole or not self.steppers.get(round_):
            assert hyper is None, "hyperparameters of a round that is not settled"
            if whole:
                self._unsettled.add(round_)
            return
        else:
            lead = leader if leader in self.steppers[round_] else self.steppers[round_][0]
            assert hyper == self._reported[lead, round_], f"round {round_} is led by rank {lead}"
        if whole:
            assert hyper is not None
            self.hypers[round_] = hyper

    def _check_settle(self, settle: SetHyperparameters) -> None:
        assert settle.round in self._unsettled, "SetHyperparameters that no rank waits for"
        self._unsettled.discard(settle.round)
        (first,) = self.steppers[settle.round]
        hyper = self._reported_hyper(settle.hyper)
        assert hyper == self._reported[first, settle.round]
        self.hypers[settle.round] = hyper

    def _check_all_done(self, drained: Drained, rank: int | None) -> None:
        assert self.done == set(self.ranks)
        assert drained.last == rank
        assert drained.flushed == self.flush
        assert set(self.fired) == {drained.rounds}
        assert not self._unsettled, f"rounds {self._unsettled} never got hyperparameters"
        self.done.clear()
        self.flush = False
        self._in_step.clear()
        self.position = [dict.fromkeys(self.ranks, drained.rounds) for _ in range(self.config.buckets)]
