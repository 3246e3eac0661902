"""State machine of partial allreduce: events and ``now`` in, commands out. No clock, no I/O.

Its laws:

1. *One order.* Round t of a bucket starts after round t - 1; each starts once, and is commanded to every rank.
2. *Staleness.* Round t starts only if t - position(r) <= max_staleness for every active rank r. A rank's position is
   the number of steps whose gradient it has handed over (pace "steps"), or the version it computes at (pace "rounds").
   A gradient of version v is handed over as step s <= v + 1, and carried by the first round started after that: its
   staleness (round - 1 - v) is within the bound.
   If ranks step host by host, all of a host's gradients of a step count as handed over when the last one is, and go
   into one round. If that is too late for the step's own round, its ranks are sent the version at which the step ends,
   so that they begin the next step with equal weights.
3. *Quorum.* Round t starts when ``RoundQuorum`` accepts the ranks (or hosts) that have arrived: at once if all have,
   else after its ``grace``.
4. *Hyperparameters belong to the round.* They are those of the rank whose arrival started its last bucket if that rank
   is in ``step()``, else those of the first rank in ``step()``. Any rank that waits for a round is in ``step()``, so no
   rank waits for hyperparameters.
5. *Nothing is left.* When all ranks have finished, in a drain one last round carries all pending gradients, with the
   hyperparameters of the round before, or else of the first rank's registration; then all ranks are notified. In a
   cut, for which no rank requested a drain, gradients stay pending.
6. *Illegal moves change nothing.* They raise ProtocolError.
7. *Stragglers are named*, also after the start of a round: if a round is in flight for long, the coordinator calls the
   roll, and a rank whose engine does not answer has not submitted the round.
8. *The cost of an event does not grow with the number of ranks.* Work that does is done once per round, drain or cut.

In this file: ``Hosts`` and ``Gathering`` (ranks that step together), ``Positions``, ``Bucket``, ``Round`` and
``Steppers`` (progress), then ``EagerStateMachine``. Law 3 is in ``quorum``.

States: opening (until every rank has registered and all match) -> running <-> drained (all have finished: counters are
re-based to the started rounds, and all ranks are active again); rejected, if the ranks do not match.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hvd_async.algorithms.eager.config import (
    EagerConfig,
    EndStep,
    ExplainRound,
    GradientReady,
    HostSteps,
    ReportReceived,
    RoundsReceived,
    RoundTrigger,
    SetHyperparameters,
    StartRound,
    StepEntered,
    VersionTaken,
)
from hvd_async.algorithms.eager.quorum import AutoQuorum, Grace, RoundQuorum, check_quorum
from hvd_async.algorithms.option import check_hosts
from hvd_async.errors import ProtocolError
from hvd_async.runtime.machine import StateMachine
from hvd_async.runtime.protocol import Command, Hyper, OptimizerEvent

# -- hosts whose ranks take each step together -------------------------------------------------------------------------
# A gradient of such a rank counts as arrived when all ranks of its host have handed theirs over.


@dataclass
class Hosts:
    """Groups of ranks that step together: the ranks of a host, or single ranks. The first rank identifies a host.

    Attributes:
        first: the hosts, in order.
        ranks: the ranks of each host.
        of: the host of each rank.
        number: the number of each host, from 0.
        size: ranks per host.
        active: number of unfinished ranks per host, for hosts that have any.
    """

    first: tuple[int, ...]
    ranks: dict[int, tuple[int, ...]]
    of: dict[int, int]
    number: dict[int, int]
    size: int
    active: dict[int, int]

    def __init__(self, ranks: Sequence[int], size: int, done: Collection[int] = ()) -> None:
        """Divide ranks, which are numbered host by host, into hosts of ``size`` ranks; those ``done`` have finished.

        Raises:
            ValueError: ``size`` does not divide their number.
        """
        check_hosts(len(ranks), size)
        self.size = size
        self.ranks = {ranks[start]: tuple(ranks[start : start + size]) for start in range(0, len(ranks), size)}
        self.first = tuple(self.ranks)
        self.of = {rank: first for first, own in self.ranks.items() for rank in own}
        self.number = {host: number for number, host in enumerate(self.first)}
        self.reset()
        for rank in done:
            self.finish(rank)

    def among(self, ranks: Collection[int]) -> list[int]:
        """Return the hosts of these ranks, in the order of the ranks."""
        return list(ranks) if self.size == 1 else list(dict.fromkeys(self.of[rank] for rank in ranks))

    def finish(self, rank: int) -> None:
        """Record that a rank has finished."""
        host = self.of[rank]
        self.active[host] -= 1
        if not self.active[host]:
            del self.active[host]

    def reset(self) -> None:
        """Record that no rank has finished."""
        self.active = dict.fromkeys(self.first, self.size)


class Gathering:
    """Gradients that wait for those of the other ranks of their host.

    Attributes:
        whole: by bucket and host, the number of gradients that all its ranks have handed over since the last drain or
            cut.
        held: for ranks that have handed over one gradient more, its buckets as bits.
        steps: by host, the step that its ranks in ``held`` are in.
    """

    __slots__ = ("_buckets", "_lacking", "held", "steps", "whole")

    def __init__(self, hosts: Hosts, buckets: int) -> None:
        self._buckets = buckets
        self.reset(hosts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Gathering) and all(getattr(self, one) == getattr(other, one) for one in self.__slots__)

    __hash__ = None  # type: ignore[assignment]

    def reset(self, hosts: Hosts) -> None:
        """Count from 0, with no gradient held: at the start, and when all ranks have finished."""
        self.whole = [dict.fromkeys(hosts.first, 0) for _ in range(self._buckets)]
        self.held: dict[int, int] = {}
        self.steps: dict[int, int] = {}
        self._lacking = {host: [hosts.active.get(host, 0)] * self._buckets for host in hosts.first}
        """By host and bucket, the number of unfinished ranks that have not handed over that gradient."""

    def holds(self, bucket: int) -> bool:
        """Return whether a gradient of a bucket waits."""
        return any(bits >> bucket & 1 for bits in self.held.values())

    def hold(self, rank: int, host: int, step: int, buckets: Sequence[int], bits: int) -> list[int]:
        """Hold the buckets of a step that a rank hands over; return the buckets that all ranks of its host have handed
        over."""
        self.held[rank] = self.held.get(rank, 0) | bits
        self.steps[host] = step
        lacking = self._lacking[host]
        for bucket in buckets:
            lacking[bucket] -= 1
        return [bucket for bucket in buckets if not lacking[bucket]]

    def finish(self, rank: int, host: int, ranks: Sequence[int]) -> list[int]:
        """Stop waiting for a rank that has finished; return the held buckets in which its host is now complete."""
        lacking, bits, held = self._lacking[host], self.held.get(rank, 0), 0
        for each in ranks:
            held |= self.held.get(each, 0)
        for bucket in range(self._buckets):
            lacking[bucket] -= not bits >> bucket & 1
        return [bucket for bucket in range(self._buckets) if held >> bucket & 1 and not lacking[bucket]]

    def release(self, host: int, ranks: Sequence[int], active: Sequence[int], buckets: Sequence[int]) -> None:
        """Release a host's gradients of these buckets; ``active`` are its unfinished ranks."""
        bits = sum(1 << bucket for bucket in buckets)
        for rank in ranks:
            left = self.held.pop(rank, 0) & ~bits
            if left:
                self.held[rank] = left
        for bucket in buckets:
            self._lacking[host][bucket] += len(active)
            self.whole[bucket][host] += 1
        if not any(rank in self.held for rank in ranks):
            del self.steps[host]

    def release_all(self, hosts: Hosts) -> None:
        """Release all gradients: all ranks have finished."""
        for host in list(self.steps):
            bits = 0
            for rank in hosts.ranks[host]:
                bits |= self.held.get(rank, 0)
            self.release(host, hosts.ranks[host], (), [bucket for bucket in range(self._buckets) if bits >> bucket & 1])

    def missing(self, late: Collection[int], hosts: Hosts, active: Collection[int], bucket: int) -> frozenset[int]:
        """Return the ``late`` ranks, with each rank that waits in a bucket for ranks of its host replaced by these."""
        held = {rank for rank, bits in self.held.items() if bits >> bucket & 1}
        waited_for = hosts.among([rank for rank in late if rank in held])
        others = {rank for host in waited_for for rank in hosts.ranks[host] if rank in active}
        return frozenset({*late, *others} - held)

    def host_steps(self, bucket: int) -> HostSteps:
        """Return ``whole`` of a bucket in the form that is sent to ranks."""
        counts = self.whole[bucket].values()
        (most, _), *_ = Counter(counts).most_common(1)
        return HostSteps(most, {number: count for number, count in enumerate(counts) if count != most})


# -- progress of ranks, buckets and rounds -----------------------------------------------------------------------------


class Positions:
    """Progress of each rank in each bucket, with the minimum over active ranks in constant time.

    All buckets of a step arrive before the next step, so a rank has a single position, except in buckets of its next
    step that have already arrived. Ranks are counted by position.

    Args:
        ranks: all ranks, at position 0.
        buckets: number of buckets.
        done: ranks that have finished.

    Attributes:
        of: position of each rank in all its buckets; it never decreases.
        ahead: for ranks with some buckets of their next step, these buckets as bits.
        lowest: lowest position of an active rank, if there is one.
    """

    __slots__ = ("_ahead_at", "_all", "_counts", "ahead", "lowest", "of")

    def __init__(self, ranks: Sequence[int], buckets: int, done: Collection[int]) -> None:
        self._all = (1 << buckets) - 1
        self.reset(ranks, 0)
        for rank in done:
            self.leave(rank)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Positions) and all(getattr(self, one) == getattr(other, one) for one in self.__slots__)

    __hash__ = None  # type: ignore[assignment]

    def reset(self, ranks: Sequence[int], at: int) -> None:
        """Set all ranks active, at one position."""
        self.of = dict.fromkeys(ranks, at)
        self.ahead: dict[int, int] = {}
        self.lowest = at
        self._counts = [len(self.of)]
        """``_counts[i]``: number of active ranks at position ``lowest + i``."""
        self._ahead_at: dict[tuple[int, int], int] = {}
        """By position and bucket, the number of active ranks at that position that are ahead in that bucket."""

    def at(self, rank: int, bucket: int) -> int:
        """Return the position of a rank in a bucket."""
        return self.of[rank] + (self.ahead.get(rank, 0) >> bucket & 1)

    def lowest_in(self, bucket: int) -> int:
        """Return the lowest position of an active rank in a bucket."""
        return self.lowest + (self._ahead_at.get((self.lowest, bucket), 0) == self._counts[0])

    def step(self, ranks: Sequence[int], to: int, buckets: Sequence[int], bits: int) -> bool:
        """Move active ranks of equal position to the next position in some buckets; return whether that is in all."""
        if bits != self._all and not self._gain(ranks, to - 1, buckets, bits):
            return False
        of, counts, place, count = self.of, self._counts, to - self.lowest, len(ranks)
        for rank in ranks:
            of[rank] = to
        if place == len(counts):
            counts.append(count)
        else:
            counts[place] += count
        counts[place - 1] -= count
        if not counts[0]:
            self._rise()
        return True

    def _gain(self, ranks: Sequence[int], at: int, buckets: Sequence[int], bits: int) -> bool:
        """Put ranks ahead in some buckets; return whether they are now ahead in all, and so have to move."""
        ahead_at = self._ahead_at
        for bucket in buckets:
            ahead_at[at, bucket] = ahead_at.get((at, bucket), 0) + len(ranks)
        for rank in ranks:
            self.ahead[rank] = self.ahead.get(rank, 0) | bits
        if self.ahead[ranks[0]] != self._all:
            return False
        for rank in ranks:
            self._fall_in(rank)
        return True

    def _fall_in(self, rank: int) -> None:
        """Stop counting a rank as ahead."""
        bits, at = self.ahead.pop(rank, 0), self.of[rank]
        for bucket in range(bits.bit_length()):
            if bits >> bucket & 1:
                self._ahead_at[at, bucket] -= 1
                if not self._ahead_at[at, bucket]:
                    del self._ahead_at[at, bucket]

    def move(self, rank: int, to: int) -> None:
        """Move an active rank that is ahead in no bucket to a position, possibly its present one."""
        self._counts += [0] * (to - self.lowest + 1 - len(self._counts))
        self._counts[to - self.lowest] += 1
        self.leave(rank)
        self.of[rank] = to

    def leave(self, rank: int) -> None:
        """Stop counting a rank: it has finished."""
        self._fall_in(rank)
        self._counts[self.of[rank] - self.lowest] -= 1
        if not self._counts[0]:
            self._rise()

    def _rise(self) -> None:
        empty, last = 0, len(self._counts) - 1
        while empty < last and not self._counts[empty]:
            empty += 1
        del self._counts[:empty]
        self.lowest += empty


@dataclass(slots=True)
class Bucket:
    """State of one bucket: its started rounds, and the ranks that have arrived for the next one."""

    fired: int = 0
    waiting: dict[int, float] = field(default_factory=dict)
    """Hosts (ranks, if each steps separately) that have arrived for round fired + 1, in order, with the time."""
    arrived: int = 0
    """Number of ranks that have arrived for that round."""
    least: int = 1
    """Smallest length of ``waiting`` with which the round may start; below it no check is needed."""
    quorum_at: float | None = None
    """Time when the quorum of the next round was reached; the grace starts there."""
    loaded: bool = False
    """Whether a gradient, or an empty one, was handed over since the last round took the pending ones."""
    empty: bool = True
    """Whether all gradients that were handed over since then were empty."""
    landed: int = 0
    """Number of rounds known to have completed on a rank; they complete on all ranks at about the same time."""
    fired_at: float = 0.0
    """Time when the last round started."""
    called: int = 0
    """Number of the first roll call since that start; 0 if there was none."""
    answered: set[int] = field(default_factory=set)
    """Ranks whose engines have submitted that round, by their answers to the roll call."""


@dataclass(slots=True)
class Round:
    """State of a round, over all its buckets, from its first arrival until its hyperparameters are set."""

    quorum: RoundQuorum
    hyper: Hyper | None = None


@dataclass(slots=True)
class Steppers:
    """Ranks in ``step()``, with the time at which they entered it, by the number of a step whose round has not
    started.

    Attributes:
        step_of: step that each rank is in; ranks that have been in none since the last drain or cut are missing.
    """

    step_of: dict[int, int] = field(default_factory=dict)
    _by_step: dict[int, dict[int, float]] = field(default_factory=dict)
    """Ranks in order of arrival; some may be in a later step by now."""

    def enter(self, rank: int, step: int, now: float, fired: int) -> None:
        """Record that a rank has entered a step, and so left the previous one; ``fired`` rounds have started."""
        self.step_of[rank] = step
        if step > fired:
            self._by_step.setdefault(step, {})[rank] = now

    def start(self, step: int, now: float, first: Sequence[int]) -> tuple[int | None, float]:
        """Forget the ranks in steps up to this one, whose round starts.

        Args:
            step: number of the step.
            now: time (s).
            first: ranks to prefer.

        Returns:
            One of the preferred ranks that is in the step, else the first other rank in it (None if no rank is), and
            the seconds that the ranks in it have been in it, summed over ranks.
        """
        there = {rank: at for rank, at in self._by_step.get(step, {}).items() if self.step_of[rank] == step}
        for old in [number for number in self._by_step if number <= step]:
            del self._by_step[old]
        lead = next((rank for rank in itertools.chain(first, there) if rank in there), None)
        return lead, sum(now - since for since in there.values())

    def clear(self) -> None:
        """Forget all ranks, which have finished."""
        self.step_of.clear()
        self._by_step.clear()


class Started(NamedTuple):
    """Round of a bucket that has started, with fields as in ``StartRound``. ``first``: time of its first arrival."""

    bucket: int
    round: int
    by: int
    arrived: int
    held: float
    hyper: Hyper | None
    """Hyperparameters of the round, with its last bucket; None if they are not known."""
    whole: HostSteps | None
    confirm: bool
    first: float
    reason: str


# -- the state machine -------------------------------------------------------------------------------------------------


class EagerStateMachine(StateMachine[EagerConfig]):
    """State machine for the rounds of an optimizer."""

    def __init__(self, optimizer: int, ranks: Sequence[int]) -> None:
        super().__init__(optimizer, ranks)
        self._auto: AutoQuorum | None = None
        self._hosts, self._grace, self._by_hosts = Hosts(ranks, 1), Grace(0.0), False
        """Whether ranks step host by host."""
        self._late: set[int] = set()
        """Hosts with a bucket that became complete only after its round had started."""
        self._gathering = Gathering(self._hosts, 0)
        self._positions = Positions((), 0, ())
        self._buckets: list[Bucket] = []
        self._fired = 0
        """Number of rounds that all buckets have started."""
        self._landed = 0
        """Number of rounds known to have completed in all buckets; ``Bucket.landed`` may be larger. (Rounds complete on
        all ranks at about the same time, so one rank's report is enough.)"""
        self._roll_calls = 0
        self._wakes: dict[int, float] = {}
        """By bucket, the end of the grace period that alone delays its round."""
        self._steppers = Steppers()
        self._hyper_of: dict[int, Hyper] = {}
        """The hyperparameters that each rank sent last."""
        self._rounds: dict[int, Round] = {}
        self._last_hyper: Hyper = []
        self._sent_hyper: Hyper | None = None
        """The hyperparameters that ranks were sent last; equal ones are not sent again."""
        self._timelines: list[int] = []
        """Ranks that record a timeline."""
        self._handed_over = dict.fromkeys(ranks, 0)
        """By rank, the number of gradients of the first bucket that it has handed over, or had before it registered."""

    def tick(self, now: float) -> list[Command]:
        """Start rounds whose grace has ended."""
        return self._advance(None, now)

    def deadline(self) -> float | None:
        """Return the earliest end of a grace."""
        return min(self._wakes.values()) if self._wakes else None

    def recipients(self, command: Command) -> Sequence[int]:
        if isinstance(command, ExplainRound):
            return self._timelines
        if isinstance(command, EndStep):
            return self._hosts.ranks[self._hosts.first[command.host]]
        return super().recipients(command)

    def handed_over(self) -> list[int]:
        return list(self._handed_over.values())

    def roll_call(self, fired_before: float) -> list[Command]:
        """Return a roll call if a round that started by ``fired_before`` is not known to have completed on any rank."""
        late = [one for one in self._buckets if self._landed_in(one) < one.fired and one.fired_at <= fired_before]
        if not late:
            return []
        self._roll_calls += 1
        for bucket in late:
            bucket.called = bucket.called or self._roll_calls
        return [ReportReceived(self._optimizer, self._roll_calls)]

    def _landed_in(self, bucket: Bucket) -> int:
        """Return how many rounds of a bucket are known to have completed."""
        return max(bucket.landed, self._landed)

    def take_notice(self) -> str | None:
        """Return a notice as the base does, or that another quorum was chosen, and why; None if there is none."""
        if self._notice is not None:
            return super().take_notice()
        return None if self._auto is None else self._auto.take_notice()

    def _blocked_on(self) -> tuple[str, frozenset[int]] | None:
        config, active = self._config, self.computing
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
        for bucket in self._buckets:  # a round that does not complete, and a roll call that has found the ranks
            if bucket.called and self._landed_in(bucket) < bucket.fired:
                if silent := frozenset(self.ranks) - bucket.answered:
                    return f"round {bucket.fired}, which has begun,", silent
                everyone = frozenset(self.ranks)
                return f"round {bucket.fired}, which all have begun and whose collective has not ended,", everyone
        return None

    def _behind(self, index: int, position: int) -> set[int]:
        """Return the active ranks that have not reached this position in a bucket."""
        return {rank for rank in self.computing if self._positions.at(rank, index) < position}

    def _on_all_registered(self, config: Any) -> EagerConfig:
        assert isinstance(config, EagerConfig)
        self._hosts = Hosts(self.ranks, config.local_size, self._done)
        self._by_hosts = config.local_size > 1
        hosts = len(self._hosts.first)
        # a rank outside of a process set is alone, but has the quorum of the ranks inside
        check_quorum(config.quorum, max(hosts, config.quorum) if isinstance(config.quorum, int) else hosts)
        self._hyper_of = {rank: opened.hyper for rank, opened in self._opened.items()}
        self._timelines = [rank for rank in self.ranks if self._opened[rank].timeline]
        self._handed_over = {rank: self._opened[rank].loaded for rank in self.ranks}
        self._last_hyper = self._hyper_of[self.ranks[0]]
        self._grace = Grace(config.grace)
        if config.quorum == "auto":
            self._auto = AutoQuorum(self._hosts.first, config.max_staleness, config.pace)
        self._gathering = Gathering(self._hosts, config.buckets if self._by_hosts else 0)
        self._positions = Positions(self.ranks, config.buckets, self._done)
        loaded = any(self._handed_over.values())
        self._buckets = [Bucket(loaded=loaded, empty=not loaded) for _ in range(config.buckets)]
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
                return self._on_received(rank, event)
            case _:
                raise ProtocolError(f"rank {rank} sent {type(event).__name__}, which is no event of partial allreduce")

    def _on_received(self, rank: int, event: RoundsReceived) -> list[Command]:
        """Handle a rank's answer to a roll call."""
        if len(event.landed) != len(self._buckets):
            raise ProtocolError(f"rank {rank} reported {len(event.landed)} buckets instead of {len(self._buckets)}")
        if any(landed > bucket.fired for bucket, landed in zip(self._buckets, event.landed, strict=True)):
            raise ProtocolError(f"rank {rank} reported completed rounds {event.landed}, some of which have not started")
        for bucket, landed in zip(self._buckets, event.landed, strict=True):
            if 0 < bucket.called <= event.call:
                bucket.answered.add(rank)
            bucket.landed = max(bucket.landed, landed)
        return []

    # -- steps ------------------------------------------------------------------------------------------------

    def _stepped(self, rank: int, event: StepEntered, now: float) -> list[Command]:
        self._running(rank, event)
        last = self._steppers.step_of.get(rank)
        if last is not None and event.step <= last:
            raise ProtocolError(f"rank {rank} reported step {event.step} after step {last}")
        if event.hyper is not None:
            self._hyper_of[rank] = event.hyper
        self._steppers.enter(rank, event.step, now, self._fired)
        round_, hyper = self._rounds.get(event.step), self._hyper_of[rank]
        if round_ is None or round_.hyper is not None or self._fired < event.step:
            return []
        self._settle(event.step, hyper)
        return [SetHyperparameters(self._optimizer, event.step, self._unsent(hyper))]

    def _check_arrived(self, rank: int, event: GradientReady | StepEntered) -> int:
        """Return, as bits, the buckets of a rank's step that arrive with an event. This changes nothing.

        Raises:
            ProtocolError: a bucket has already arrived, or that of the previous step has not, or the round of the
                previous step has not started.
        """
        self._running(rank, event)
        ahead, held = self._positions.ahead.get(rank, 0), self._gathering.held.get(rank, 0)
        came, position = ahead | held, self._positions.of[rank]
        buckets, step = self._buckets, event.step
        for index in event.buckets:
            if not 0 <= index < len(buckets):
                raise ProtocolError(f"rank {rank} named bucket {index} of {len(buckets)}")
            if step != position + 1 or came >> index & 1 or step > buckets[index].fired + 1:
                raise ProtocolError(
                    f"rank {rank} handed over step {step} of bucket {index} after step "
                    f"{position + (came >> index & 1)}, with {buckets[index].fired} rounds started"
                )
            came |= 1 << index
        if self._gathering.steps.get(self._hosts.of[rank]) not in (None, step):
            raise ProtocolError(f"rank {rank} handed over step {step}, while other ranks of its host are in another")
        if event.landed > self._fired:
            raise ProtocolError(f"rank {rank} reported round {event.landed} as completed, of {self._fired} started")
        return came & ~ahead & ~held

    def _arrived(self, rank: int, event: GradientReady | StepEntered, bits: int, now: float) -> list[Command]:
        step, indices, all_buckets, host = event.step, event.buckets, self._buckets, self._hosts.of[rank]
        if 0 in indices and 0 not in event.empty:
            self._handed_over[rank] += 1
        self._landed = max(self._landed, event.landed)
        for index in indices:
            bucket = all_buckets[index]
            bucket.loaded, bucket.empty = True, bucket.empty and index in event.empty
        if not self._by_hosts:
            self._come(rank, (rank,), step, indices, bits, now)
            commands: list[Command] = []
        else:
            commands = self._gather(host, self._gathering.hold(rank, host, step, indices, bits), now)
        due = [index for index in indices if len(all_buckets[index].waiting) >= all_buckets[index].least]
        return commands + self._advance(rank, now, due) if due else commands

    def _gather(self, host: int, indices: Sequence[int], now: float) -> list[Command]:
        """Count a host as arrived in buckets that are complete on all its ranks; with the last bucket its step is
        complete."""
        if not indices:
            return []
        ranks, step = self._hosts.ranks[host], self._gathering.steps[host]
        active = [rank for rank in ranks if rank in self.computing]
        self._gathering.release(host, ranks, active, indices)
        bits = sum(1 << index for index in indices)
        if not active or not self._come(host, active, step, indices, bits, now) or host not in self._late:
            return []
        self._late.remove(host)
        version = max(step, min(self._landed_in(each) for each in self._buckets))
        whole = self._gathering.whole[indices[0]][host]
        return [EndStep(self._optimizer, self._hosts.number[host], whole, version)]

    def _come(self, host: int, ranks: Sequence[int], step: int, indices: Sequence[int], bits: int, now: float) -> bool:
        """Count the unfinished ranks of a host as arrived in some buckets; return whether its step is complete."""
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
            raise ProtocolError(f"rank {rank} took version {event.version}, which is impossible at position {position}")
        self._positions.move(rank, event.version)
        return self._advance(rank, now)

    def _check_finished(self, rank: int) -> None:
        if self._waits_in(rank):
            raise ProtocolError(f"rank {rank} has finished although it waits for a round")

    def _waits_in(self, rank: int) -> list[Bucket]:
        """Return the buckets in which an unfinished rank waits for the next round."""
        at = self._positions.at
        return [bucket for index, bucket in enumerate(self._buckets) if at(rank, index) > bucket.fired]

    def _on_event_of_absent(self, rank: int, event: OptimizerEvent, now: float) -> list[Command]:
        """Handle an event of a rank whose optimizer is deleted: its engine still reports received rounds."""
        return self._on_event(rank, event, now) if isinstance(event, RoundsReceived) else []

    def _forget(self, rank: int) -> None:
        if rank in self.computing and self._buckets:
            host = self._hosts.of[rank]
            for bucket in self._waits_in(rank):  # its gradients stay pending there, and go into a later round
                bucket.arrived -= 1
                if self._hosts.active[host] == 1:  # (if one rank of a host waits, all do)
                    del bucket.waiting[host]

    def _on_rank_finished(self, rank: int, now: float) -> list[Command]:
        if not self._buckets:
            return []
        host = self._hosts.of[rank]
        self._hosts.finish(rank)
        self._positions.leave(rank)
        ready = self._gathering.finish(rank, host, self._hosts.ranks[host]) if self._by_hosts else ()
        return [*self._gather(host, ready, now), *self._advance(rank, now)]

    # -- starting rounds --------------------------------------------------------------------------------------

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
        """Start the next round of each bucket that may start it. (This never makes the round after it ready.)

        Args:
            by: the rank whose event was handled; None if only time has passed.
            only: buckets to consider; None: all.
        """
        if self._config is None or self._refused:
            return []
        active, started = self._hosts.active, list[Started]()
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
            if by is None:  # the last rank that has arrived
                ranks = self._hosts.ranks[next(reversed(arrived))]
                last = [r for r in ranks if r in self.computing and self._positions.at(r, index) == number][-1]
            else:
                last = by
            reason = quorum.reason(arrived, active) if self._timelines else ""
            started.append(self._fire(index, initiator, last, now, reason))
        return self._starts(started, now) if started else []

    def _fire(self, index: int, initiator: int, by: int, now: float, reason: str) -> Started:
        """Start the next round of a bucket. The last bucket of a round determines its hyperparameters if a rank is in
        that step: if possible, a rank of the host whose first rank is ``initiator``."""
        bucket = self._buckets[index]
        arrived, first = bucket.arrived, next(iter(bucket.waiting.values()), now)
        confirm = bucket.empty or not self.computing  # (at an end a gradient may have joined an earlier round)
        bucket.waiting, bucket.arrived, bucket.least = {}, 0, 1
        bucket.fired += 1
        bucket.quorum_at = None
        bucket.loaded, bucket.empty = self._by_hosts and self._gathering.holds(index), True
        bucket.fired_at, bucket.called = now, 0
        bucket.answered.clear()
        number, held, hyper = bucket.fired, 0.0, None
        if not index:
            self._grace.fired(number, now)
        round_ = self._round(number)
        if all(other.fired >= number for other in self._buckets):
            self._fired = number
            lead, held = self._steppers.start(number, now, self._hosts.ranks[initiator])
            if lead is not None and round_.hyper is None:
                self._settle(number, self._hyper_of[lead])
            if self._auto is not None:
                self._auto.fired(now)
            hyper = round_.hyper
        whole = self._gathering.host_steps(index) if self._by_hosts else None
        return Started(index, number, by, arrived, held, hyper, whole, confirm, first, reason)

    def _starts(self, started: Sequence[Started], now: float) -> list[Command]:
        """Return the commands for rounds that an event has started: one command for all buckets with equal content,
        after the reasons for ranks that record a timeline."""
        commands: list[Command] = []
        for one in started if self._timelines else ():
            trigger = RoundTrigger(one.reason, one.by, one.arrived, one.first, now, one.held)
            commands.append(ExplainRound(self._optimizer, one.bucket, one.round, trigger))
        same_command = operator.attrgetter("round", "by", "whole", "confirm")
        for (number, by, whole, confirm), alike in itertools.groupby(started, same_command):
            same = list(alike)
            buckets, arrived = [one.bucket for one in same], [one.arrived for one in same]
            hyper = next((one.hyper for one in same if one.hyper is not None), None)
            settled, held = hyper is not None, sum(one.held for one in same)
            sent = None if hyper is None else self._unsent(hyper)
            commands.append(
                StartRound(self._optimizer, buckets, number, by, arrived, held, settled, sent, whole, confirm)
            )
        return commands

    def _unsent(self, hyper: Hyper) -> Hyper | None:
        """Return the hyperparameters to send: None if they equal the ones sent last."""
        if hyper == self._sent_hyper:
            return None
        self._sent_hyper = hyper
        return hyper

    def _settle(self, number: int, hyper: Hyper) -> None:
        self._rounds[number].hyper = self._last_hyper = hyper
        for old in [n for n, round_ in self._rounds.items() if n < number and round_.hyper is not None]:
            del self._rounds[old]

    def _on_all_finished(self, rank: int, now: float) -> tuple[list[Command], int]:
        """Reduce all pending gradients in a last round, with the last hyperparameters."""
        self._gathering.release_all(self._hosts)
        extra = self._flush and any(bucket.loaded for bucket in self._buckets)
        last = max(bucket.fired for bucket in self._buckets) + extra
        started: list[Started] = []
        for index, bucket in enumerate(self._buckets):
            while bucket.fired < last:
                round_ = self._round(bucket.fired + 1)
                round_.hyper = self._last_hyper if round_.hyper is None else round_.hyper
                started.append(self._fire(index, self._hosts.of[rank], rank, now, "drain: all ranks have finished"))
        commands = self._starts(sorted(started, key=lambda one: one.round), now)
        for number, round_ in sorted(self._rounds.items()):
            if round_.hyper is None and number <= last:  # no rank has entered step() since its first bucket started
                commands.append(SetHyperparameters(self._optimizer, number, self._unsent(self._last_hyper)))
        self._hosts.reset()
        self._positions.reset(self.ranks, last)
        self._gathering.reset(self._hosts)
        self._late.clear()
        self._steppers.clear()
        self._rounds.clear()
        self._grace.interrupted()
        if self._auto is not None:
            self._auto.interrupted()
        return commands, last
