"""The coordinator's state machine for one optimizer: events and ``now`` in, commands out. No clock, no I/O.

The laws it keeps:

1. *One order.* Round t of a bucket fires once, after round t - 1 of it, and is commanded to every rank.
2. *Staleness.* Round t fires only if t - steps(r) <= max_staleness for every rank r that is not done, steps(r) being
   the steps whose gradient rank r has handed over. A gradient computed at version v is handed over as step
   s <= v + 1 and carried by the first round fired after that, so its staleness (round - 1 - v) keeps the bound.
3. *Quorum.* Round t fires when ``activation.decide`` says so, plus ``grace`` seconds unless all are in by then.
4. *Nothing is left.* When all ranks are done, what may be pending goes out in one last round, then all are told.
5. *Illegal moves change nothing.* They raise ProtocolError.

States: opening (until every rank has opened and all agree) -> running <-> drained (all done: counters are re-based to
the rounds fired and all ranks count as computing again) ; refused, if the ranks do not agree.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hvd_async import activation
from hvd_async.errors import ProtocolError, ranks_text
from hvd_async.events import (
    Agreed,
    Arrived,
    Command,
    Done,
    Drained,
    EagerConfig,
    Go,
    Hyper,
    Opened,
    Refused,
    Settle,
    Stepped,
)

STATE = "optimizer state: "
"""What names of the optimizer's own state begin with, in ``Opened``; all others are parameters."""
EagerEvent = Opened | Stepped | Arrived | Done


@dataclass
class _Bucket:
    """Where one bucket stands: rounds fired, steps handed over by each rank, who is in for the next round."""

    steps: list[int]
    fired: int = 0
    waiting: list[int] = field(default_factory=list)
    """Ranks that have arrived for round fired + 1, in order of arrival."""
    quorum_at: float | None = None
    """When the next round's quorum came together (grace counts from there)."""
    wake_at: float | None = None
    """When its grace ends, while it is all that holds the round back."""
    loaded: bool = False
    """Whether a gradient was handed over since the last round took what was pending."""


@dataclass
class _Lead:
    """Who leads a round, and its hyperparameters once known: they belong to the round, not to a bucket."""

    initiator: int
    hyper: Hyper | None


class Rounds:
    """Partial allreduce of one optimizer, as the coordinator sees it.

    Args:
        optimizer: the number all its messages carry.
        size: number of ranks.
    """

    def __init__(self, optimizer: int, size: int) -> None:
        self._optimizer, self._size = optimizer, size
        self._opened: dict[int, Opened] = {}
        self._config: EagerConfig | None = None
        self._buckets: list[_Bucket] = []
        self._refused = False
        self._done: set[int] = set()
        self._produced = [0] * size
        self._hypers: dict[int, tuple[int, Hyper]] = {}
        self._leads: dict[int, _Lead] = {}
        self._last_hyper: Hyper = []

    # -- what the coordinator calls ---------------------------------------------------------------------------

    def handle(self, rank: int, event: EagerEvent, now: float) -> list[Command]:
        """Take in one event of ``rank`` at time ``now`` (s, any origin).

        Returns:
            Commands, each for every rank, in the order in which they must be sent.

        Raises:
            ProtocolError: the event is not allowed now; nothing has changed.
        """
        if isinstance(event, Opened):
            return self._open(rank, event)
        if rank not in self._opened:
            raise ProtocolError(f"rank {rank} sent {type(event).__name__} before it opened optimizer {self._optimizer}")
        if self._refused:
            return []
        if isinstance(event, Stepped):
            return self._stepped(rank, event)
        if isinstance(event, Arrived):
            return self._arrived(rank, event, now)
        return self._finish(rank, event, now)

    def tick(self, now: float) -> list[Command]:
        """Fire what only waited for its grace to run out."""
        return self._advance(now)

    def deadline(self) -> float | None:
        """When ``tick`` should be called next: the earliest end of a grace, None if there is none."""
        return min((b.wake_at for b in self._buckets if b.wake_at is not None), default=None)

    def waiting_for(self) -> tuple[str, frozenset[int]] | None:
        """What ranks are waiting for, and the ranks it takes; None if nobody waits."""
        everyone = frozenset(range(self._size))
        if self._refused or not self._opened:
            return None
        if self._config is None:
            return "the first step or drain", everyone - frozenset(self._opened)
        for bucket in self._buckets:
            if bucket.waiting:
                round_ = bucket.fired + 1
                late = {r for r in self._active() if bucket.steps[r] < round_}
                blocking = self._too_late(bucket, round_) or late
                return f"round {round_}", frozenset(blocking)
        if self._done:
            return "drain", everyone - self._done
        return None

    # -- opening ----------------------------------------------------------------------------------------------

    def _open(self, rank: int, event: Opened) -> list[Command]:
        if rank in self._opened:
            raise ProtocolError(f"rank {rank} opened optimizer {self._optimizer} twice")
        self._opened[rank] = event
        if len(self._opened) < self._size:
            return []
        problem = disagreement(self._opened)
        if problem is not None:
            self._refused = True
            return [Refused(self._optimizer, problem)]
        self._config = self._opened[rank].config
        self._buckets = [_Bucket([0] * self._size) for _ in range(self._config.buckets)]
        finished = self._drain(rank) if len(self._done) == self._size else []
        return [Agreed(self._optimizer), *finished]

    # -- steps ------------------------------------------------------------------------------------------------

    def _running(self, rank: int, event: EagerEvent) -> EagerConfig:
        if self._config is None:
            raise ProtocolError(f"rank {rank} sent {type(event).__name__} before all ranks had opened")
        if rank in self._done:
            raise ProtocolError(f"rank {rank} sent {type(event).__name__} although it is done")
        return self._config

    def _stepped(self, rank: int, event: Stepped) -> list[Command]:
        self._running(rank, event)
        if rank in self._hypers and event.step <= self._hypers[rank][0]:
            raise ProtocolError(f"rank {rank} reported step {event.step} after step {self._hypers[rank][0]}")
        self._hypers[rank] = (event.step, event.hyper)
        lead = self._leads.get(event.step)
        if lead is None or lead.initiator != rank or lead.hyper is not None:
            return []
        self._lead(event.step, rank)
        return [Settle(self._optimizer, event.step, event.hyper)]

    def _arrived(self, rank: int, event: Arrived, now: float) -> list[Command]:
        self._running(rank, event)
        if not 0 <= event.bucket < len(self._buckets):
            raise ProtocolError(f"rank {rank} named bucket {event.bucket} of {len(self._buckets)}")
        bucket = self._buckets[event.bucket]
        if event.step != bucket.steps[rank] + 1 or event.step > bucket.fired + 1:
            raise ProtocolError(
                f"rank {rank} handed over step {event.step} of bucket {event.bucket} after step "
                f"{bucket.steps[rank]}, with {bucket.fired} rounds fired"
            )
        bucket.steps[rank] = event.step
        bucket.loaded = True
        if event.step == bucket.fired + 1:
            bucket.waiting.append(rank)
        return self._advance(now)

    def _finish(self, rank: int, event: Done, now: float) -> list[Command]:
        if rank in self._done:
            raise ProtocolError(f"rank {rank} sent Done although it is done")
        if any(rank in bucket.waiting for bucket in self._buckets):
            raise ProtocolError(f"rank {rank} is done although it waits for a round")
        if event.produced < self._produced[rank]:
            raise ProtocolError(f"rank {rank} has produced {event.produced}, earlier {self._produced[rank]} gradients")
        self._done.add(rank)
        self._produced[rank] = event.produced
        if len(self._done) < self._size or self._config is None:
            return self._advance(now)
        return self._drain(rank)

    # -- firing -----------------------------------------------------------------------------------------------

    def _active(self) -> set[int]:
        return set(range(self._size)) - self._done

    def _too_late(self, bucket: _Bucket, round_: int) -> set[int]:
        """The computing ranks whose next gradient would break the staleness bound if ``round_`` fired now."""
        assert self._config is not None
        return {r for r in self._active() if round_ - bucket.steps[r] > self._config.max_staleness}

    def _advance(self, now: float) -> list[Command]:
        """Fire every bucket's next round if it may. (Firing one round never makes the one after it ready.)"""
        if self._config is None or self._refused:
            return []
        commands: list[Command] = []
        active = self._active()
        for index, bucket in enumerate(self._buckets):
            round_ = bucket.fired + 1
            config = self._config
            decision = activation.decide(config.quorum, round_, bucket.waiting, active, self._size, config.seed)
            bucket.wake_at = None
            if not decision.fire:
                bucket.quorum_at = None
                continue
            if bucket.quorum_at is None:
                bucket.quorum_at = now
            if now < bucket.quorum_at + config.grace and len(bucket.waiting) < len(active):
                bucket.wake_at = bucket.quorum_at + config.grace
                continue
            if self._too_late(bucket, round_):
                continue
            assert decision.initiator is not None
            commands.append(self._fire(index, decision.initiator, decision.reason))
        return commands

    def _fire(self, index: int, initiator: int, reason: str) -> Go:
        bucket = self._buckets[index]
        bucket.fired += 1
        bucket.waiting = []
        bucket.quorum_at = None
        bucket.loaded = False
        hyper = self._lead(bucket.fired, initiator).hyper
        settled = min(b.fired for b in self._buckets)
        for old in [r for r, lead in self._leads.items() if r < settled and lead.hyper is not None]:
            del self._leads[old]
        return Go(self._optimizer, index, bucket.fired, hyper, reason)

    def _lead(self, round_: int, initiator: int) -> _Lead:
        """The round's lead: drawn by its first bucket; its hyperparameters are those of that rank's same step."""
        lead = self._leads.setdefault(round_, _Lead(initiator, None))
        step, hyper = self._hypers.get(lead.initiator, (0, []))
        if lead.hyper is None and step == round_:
            lead.hyper = hyper
            self._last_hyper = hyper
        return lead

    def _drain(self, rank: int) -> list[Command]:
        """All are done: carry what is pending in a last round, with the last hyperparameters, and start afresh."""
        last = max(bucket.fired for bucket in self._buckets) + any(bucket.loaded for bucket in self._buckets)
        commands: list[Command] = []
        for index, bucket in enumerate(self._buckets):
            while bucket.fired < last:
                lead = self._leads.setdefault(bucket.fired + 1, _Lead(0, None))
                lead.hyper = self._last_hyper if lead.hyper is None else lead.hyper
                commands.append(self._fire(index, 0, "drain: all ranks are done"))
        for bucket in self._buckets:
            bucket.steps = [last] * self._size
        self._done.clear()
        self._hypers.clear()
        commands.append(Drained(self._optimizer, last, sum(self._produced), rank))
        return commands


def disagreement(opened: dict[int, Opened]) -> str | None:
    """How the ranks' optimizers differ, and what mends it; None if they agree."""
    first = opened[0]
    for rank in sorted(opened):
        other = opened[rank]
        if other.config != first.config:
            return (
                f"the ranks wrapped their optimizers differently: rank 0 has {first.config}, rank {rank} has "
                f"{other.config}. Pass the same arguments on every rank."
            )
        if other.names != first.names:
            return (
                f"the ranks train different parameters: rank 0 has {len(first.names)}, rank {rank} has "
                f"{len(other.names)}, or they have other names or shapes. Build the same model on every rank, and "
                f"let every rank's optimizers take their first step in the same order."
            )
    differing = [rank for rank in sorted(opened) if opened[rank].checksums != first.checksums]
    if not differing:
        return None
    other = opened[differing[0]]
    name = next(n for n, a, b in zip(first.names, first.checksums, other.checksums, strict=True) if a != b)
    if name.startswith(STATE):
        return (
            f"the optimizer's state differs before the first step: {ranks_text(differing)} from rank 0, first in "
            f"{name!r}. Call hvd.broadcast_optimizer_state(optimizer, root_rank=0) in torch, or use the Keras "
            f"BroadcastGlobalVariablesCallback(0), before training; and load checkpoints on every rank or on rank 0 "
            f"alone before that call."
        )
    return (
        f"the weights differ before the first step: {ranks_text(differing)} from rank 0, first in {name!r}. Call "
        f"hvd.broadcast_parameters(model.state_dict(), root_rank=0) in torch, hvd.broadcast_variables(model.variables, "
        f"root_rank=0) or the Keras BroadcastGlobalVariablesCallback(0) in TensorFlow, before training."
    )
