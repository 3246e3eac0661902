"""Base of the coordinator's state machines: registration, ends, and collectives at ends.

A machine takes events and the time ``now``, and returns commands; no clock, no I/O. Its subclasses add what happens
between registration and an end: rounds of partial allreduce (eager), exchanges of messages (gossip), pulls (leader).

The laws of ends, whatever the algorithm:

1. *One end for all.* When every rank has finished, one command notifies all of them, and specifies a drain (some rank
   called ``drain``) or a cut (all called ``cut``); every rank obeys the command.
2. *Departure is final.* A rank whose optimizer was deleted or discarded, or whose process is leaving, counts as
   finished in this end and in all later ones: no rank waits for it, and its engine serves. If it still had pending
   gradients, the next end is a drain.
3. *Collectives at ends*, and the ones that users call between them, run when all ranks that still have the optimizer
   wait in them, and over these ranks (``CollectiveQueue``).
4. *Unregistered by all at once.* When no rank has the optimizer any longer, one command makes all ranks forget it.

The cost of an event does not depend on the number of ranks: sets of ranks are updated, not rebuilt. Only what happens
once for all ranks (all have registered, have finished, or wait in a collective) takes time in proportion to them.
"""

from __future__ import annotations

import abc
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Generic, NamedTuple, TypeVar

from hvd_async.errors import ProtocolError, ranks_text
from hvd_async.runtime.protocol import (
    Accepted,
    CollectiveReady,
    Command,
    Drained,
    Finished,
    Hyper,
    NoSuchOptimizer,
    OptimizerDeleted,
    OptimizerEvent,
    Registered,
    RegisterOptimizer,
    Rejected,
    Resumed,
    RunCollective,
    Unregister,
)

C = TypeVar("C")


class Waiting(NamedTuple):
    """A wait for ranks.

    Attributes:
        what: what they have to do.
        missing: these ranks.
        callers: the ranks that wait, in a call that every rank must make: a drain, a cut or a collective. Empty for any
            other wait.
    """

    what: str
    missing: frozenset[int]
    callers: frozenset[int]


class StateMachine(abc.ABC, Generic[C]):
    """State machine of the coordinator for one optimizer.

    Args:
        optimizer: the number that all its messages carry.
        ranks: the ranks that share it.

    Attributes:
        ranks: the ranks that share it.
        present: the ranks that still have it.
        opening: the ranks that have registered, have not finished, and wait for others to register.
        computing: the ranks for which a drain or a cut waits.
        draining: the ranks that wait in a drain or a cut.
    """

    def __init__(self, optimizer: int, ranks: Sequence[int]) -> None:
        self._optimizer, self.ranks = optimizer, tuple(ranks)
        self._opened: dict[int, Registered[Any]] = {}
        self._lowest: int | None = None
        """The lowest rank that has registered."""
        self._config: C | None = None
        self._refused = False
        self._done: dict[int, None] = {}
        """Ranks that have finished, in order; departed ones stay."""
        self._absent: set[int] = set()
        self.present, self.computing = set(self.ranks), set(self.ranks)
        self.opening, self.draining = set[int](), set[int]()
        self._flush = False
        self._whole = True
        self._produced: dict[int, list[int]] = {}
        self._drained: dict[int, list[int]] = {}
        """``_produced`` at the last drain."""
        self._resumes = False
        """Whether ranks report when they have completed an end."""
        self._resuming: set[int] = set()
        """Ranks that have not completed the last end yet, where collectives start in order: an exchange or pull that a
        rank had to hold until then would hold up what the end itself needs."""
        self._shown: dict[int, int] = {}
        """Rounds that the user code of each rank has seen before they were applied, since the last end."""
        self._collectives = CollectiveQueue(optimizer)
        self._asked: set[int] = set()
        """Ranks that were asked to register it."""
        self._hypers: dict[int, Hyper] = {}
        """Hyperparameters that each rank has had at its last registration, drain or cut."""
        self._start_of: dict[int, int] = {}
        """``Finished.start`` of each rank that has one, at its last drain or cut."""
        self._notice: str | None = None
        self._has_compared = False
        """Whether a difference between them was found, which is reported once."""

    # -- what the coordinator calls ---------------------------------------------------------------------------

    def handed_over(self) -> list[int]:
        """Return the number of gradients that each rank has handed over, in order; empty if none are averaged."""
        return []

    def handle(self, rank: int, event: OptimizerEvent, now: float) -> list[Command]:
        """Handle an event of ``rank`` at time ``now`` (s, any origin).

        Returns:
            Commands, each for its ``recipients``, in the order in which they must be sent.

        Raises:
            ProtocolError: the event is not allowed now; nothing has changed.
        """
        if rank not in self.present and rank not in self._absent:
            raise ProtocolError(f"rank {rank} does not share optimizer {self._optimizer} of {self.ranks}")
        if isinstance(event, Registered):
            return self._on_registered(rank, event, now)
        if isinstance(event, NoSuchOptimizer):
            return self._on_no_such_optimizer(rank)
        if rank not in self._opened:
            sent = type(event).__name__
            raise ProtocolError(f"rank {rank} sent {sent} before it registered optimizer {self._optimizer}")
        if rank in self._absent:  # its engine still reports earlier collectives
            return [] if self._refused else self._on_event_of_absent(rank, event, now)
        if isinstance(event, OptimizerDeleted):
            return self._on_deleted(rank, event, now)
        if self._refused:
            return []
        if isinstance(event, CollectiveReady):
            self._collectives.add(rank, event)
            return self._due_collectives()
        if isinstance(event, Finished):
            return self._on_finished(rank, event, now)
        if isinstance(event, Resumed):
            return self._on_resumed(rank, now)
        return self._on_event(rank, event, now)

    def recipients(self, command: Command) -> Sequence[int]:
        """Return the ranks that receive a command: all that share the optimizer, unless it concerns only some."""
        return (command.rank,) if isinstance(command, RegisterOptimizer) else self.ranks

    def shares(self, rank: int) -> bool:
        """Whether ``rank`` shares the optimizer."""
        return rank in self.present or rank in self._absent

    def only_drains(self) -> bool:
        """Return whether all ranks that have registered have finished, and wait for others to register."""
        return self._config is None and not self._refused and bool(self._opened) and not self.opening

    def unasked(self, ranks: AbstractSet[int]) -> AbstractSet[int]:
        """Return the subset of ``ranks`` that have not registered the optimizer, and were not asked to."""
        return ranks - self._asked - self._opened.keys()

    def ask_to_register(self, rank: int) -> list[Command]:
        """Return the command to ``rank``, which waits in a drain, to register the optimizer; none if already sent."""
        if rank in self._asked or not self.awaits_registration_of(rank) or self._refused:
            return []
        self._asked.add(rank)
        assert self._lowest is not None
        opened = self._opened[self._lowest]
        return [RegisterOptimizer(self._optimizer, rank, opened.names, opened.members)]

    @abc.abstractmethod
    def tick(self, now: float) -> list[Command]:
        """Return the commands that are due at time ``now``."""

    @abc.abstractmethod
    def deadline(self) -> float | None:
        """Return the time at which ``tick`` should be called next; None if no command is scheduled."""

    def take_notice(self) -> str | None:
        """Return a notice for the user that was not returned before; None if there is none."""
        notice, self._notice = self._notice, None
        return notice

    def roll_call(self, fired_before: float) -> list[Command]:
        """Return the commands that find the rank that delays a collective commanded before that time."""
        return []

    def awaits_registration_of(self, rank: int) -> bool:
        """Whether ranks wait for ``rank`` to register."""
        if self._refused or len(self._opened) == len(self._absent):  # (departed ranks had registered)
            return False
        return rank not in self._opened and self.shares(rank)

    def blocked_on(self) -> tuple[str, frozenset[int]] | None:
        """Return what ranks wait for, and which ranks are missing; None if no rank waits."""
        everyone = frozenset(self.ranks)
        if self._refused or not self._opened:
            return None
        if self._config is None:
            return "the first step or drain", everyone - frozenset(self._opened)
        call = self.call_in_progress()
        inside = None if self._collectives.ready else self._blocked_on()
        return inside or (None if call is None else (call.what, call.missing))

    def call_in_progress(self) -> Waiting | None:
        """Return the call that some ranks have made and others have not; None if no rank waits in one."""
        if self._refused or self._config is None:
            return None
        if (collective := self._collectives.waiting(self.present)) is not None:
            return Waiting(*collective, frozenset(self._collectives.ready))
        missing = frozenset(self.ranks) - self._done.keys()
        return Waiting("drain", missing, frozenset(self.draining)) if self.draining else None

    # -- what a subclass supplies -----------------------------------------------------------------------------

    @abc.abstractmethod
    def _on_all_registered(self, config: Any) -> C:
        """Start, as all ranks have registered and match; return the configuration with the family's type."""

    @abc.abstractmethod
    def _on_event(self, rank: int, event: OptimizerEvent, now: float) -> list[Command]:
        """Handle an event of the family."""

    @abc.abstractmethod
    def _blocked_on(self) -> tuple[str, frozenset[int]] | None:
        """Return ``blocked_on`` for the time between registration and an end."""

    def _check_finished(self, rank: int) -> None:
        """Raise ProtocolError if ``rank`` cannot finish now."""

    def _forget(self, rank: int) -> None:
        """Forget a rank that has departed: it no longer waits for anything."""

    def _on_event_of_absent(self, rank: int, event: OptimizerEvent, now: float) -> list[Command]:
        """Handle an event of a departed rank, whose engine may still report collectives."""
        return []

    @abc.abstractmethod
    def _on_rank_finished(self, rank: int, now: float) -> list[Command]:
        """Handle that ``rank`` has finished and others have not; also called before all have registered."""

    @abc.abstractmethod
    def _on_all_finished(self, rank: int, now: float) -> tuple[list[Command], int]:
        """Reset, as all have finished, ``rank`` last; return the commands left to send, and the last round's number."""

    def _start_due(self, now: float) -> list[Command]:
        """Return what may start, as all ranks have completed an end."""
        return []

    def _details(self) -> Any:
        """Return the family's ``Drained.details``; None if it has none."""
        return None

    # -- registration and ends --------------------------------------------------------------------------------

    def _on_registered(self, rank: int, event: Registered[Any], now: float) -> list[Command]:
        if rank in self._opened:
            raise ProtocolError(f"rank {rank} registered optimizer {self._optimizer} twice")
        self._opened[rank] = event
        self.opening.add(rank)
        self._lowest = rank if self._lowest is None else min(self._lowest, rank)
        if len(self._opened) < len(self.ranks):
            return []
        problem = mismatch(self._opened)
        if problem is not None:
            self._refused = True
            return [Rejected(self._optimizer, problem)]
        self.opening.clear()
        self._hypers |= {one: opened.hyper for one, opened in self._opened.items() if one not in self._hypers}
        self._compare_settings()
        self._config = self._on_all_registered(event.config)
        finished = self._drain(rank, now) if len(self._done) == len(self.ranks) else []
        return [Accepted(self._optimizer), *finished]

    def _compare_settings(self) -> None:
        """Note the first difference between the present ranks' hyperparameters, once."""
        if not self._has_compared:
            self._notice = unlike_settings({rank: self._hypers.get(rank, []) for rank in self.present})
            self._has_compared = self._notice is not None

    def _running(self, rank: int, event: OptimizerEvent) -> C:
        if self._config is None:
            raise ProtocolError(f"rank {rank} sent {type(event).__name__} before all ranks had registered")
        if rank in self._done:
            raise ProtocolError(f"rank {rank} sent {type(event).__name__} although it is done")
        return self._config

    def _note_done(self, rank: int) -> None:
        self._done[rank] = None
        self.computing.discard(rank)
        self.opening.discard(rank)

    def _on_finished(self, rank: int, event: Finished, now: float) -> list[Command]:
        if rank in self._done:
            raise ProtocolError(f"rank {rank} sent Finished although it is done")
        self._check_finished(rank)
        self._check_produced(rank, event.produced)
        self._note_done(rank)
        self.draining.add(rank)
        self._flush = self._flush or event.flush
        self._resumes = self._resumes or event.resumes
        self._produced[rank] = event.produced
        self._shown[rank] = event.shown
        self._hypers[rank] = event.hyper
        if event.start is not None:
            self._start_of[rank] = event.start
        if len(self._done) < len(self.ranks) or self._config is None:
            return [*self._on_rank_finished(rank, now), *self._due_collectives()]
        return self._drain(rank, now)

    def _check_produced(self, rank: int, produced: list[int]) -> None:
        counts = self._opened[rank].config.counts
        before = self._produced.get(rank, [0] * counts)
        if len(produced) != counts or any(a < b for a, b in zip(produced, before, strict=True)):
            raise ProtocolError(f"rank {rank} has produced {produced} gradients per bucket, earlier {before}")

    def _on_deleted(self, rank: int, event: OptimizerDeleted, now: float) -> list[Command]:
        """Handle a departure (law 2)."""
        self._check_produced(rank, event.produced)
        if event.produced != self._drained.get(rank, [0] * len(event.produced)):
            self._flush = True
        self._whole = False
        self._produced[rank] = event.produced
        self._absent.add(rank)
        self.present.discard(rank)
        self.draining.discard(rank)
        self._forget(rank)
        self._collectives.remove(rank)
        was_done = rank in self._done
        self._note_done(rank)
        if not self.present:
            return [Unregister(self._optimizer)]
        commands = self._due_collectives()
        if self._config is None or self._refused:
            return commands
        commands += self._on_resumed(rank, now)
        if len(self._done) == len(self.ranks):
            return commands if was_done else [*commands, *self._drain(rank, now)]
        return [*commands, *([] if was_done else self._on_rank_finished(rank, now))]

    def _on_resumed(self, rank: int, now: float) -> list[Command]:
        if rank not in self._resuming:
            return []
        self._resuming.discard(rank)
        return [] if self._resuming else self._start_due(now)

    def _due_collectives(self) -> list[Command]:
        return [*self._collectives.due(self.present, self.draining)]

    def _on_no_such_optimizer(self, rank: int) -> list[Command]:
        if rank not in self._asked:
            raise ProtocolError(f"rank {rank} reported without a request that it has no optimizer {self._optimizer}")
        if not self.awaits_registration_of(rank):  # (the ranks that waited for it have departed meanwhile)
            return []
        self._refused = True
        others = ranks_text(self._opened)
        problem = (
            f"{others} registered an optimizer while rank {rank} waits in drain(), hvd.join() or at its end, and rank "
            f"{rank} has wrapped none like it: wrap the same optimizers on every rank, keep them until all have "
            f"drained, and call drain() equally often on every rank"
        )
        return [Rejected(self._optimizer, problem)]

    def _drain(self, rank: int, now: float) -> list[Command]:
        """End, as all ranks have finished, ``rank`` last. Departed ranks then count as finished in advance."""
        commands, rounds = self._on_all_finished(rank, now)
        last = next((r for r in reversed(self._done) if r not in self._absent), rank)
        produced = [sum(counts) for counts in zip(*self._produced.values(), strict=True)]
        gone = sorted(self._absent)
        shown = {r: self._shown.get(r, 0) for r in self.ranks if r not in self._absent}
        most = max(shown, key=shown.__getitem__)
        newest = most if min(shown.values()) < shown[most] else None
        commands.append(
            Drained(self._optimizer, rounds, produced, last, self._flush, self._details(), self._whole, newest, gone)
        )
        if len({tuple(self._produced[one]) for one in self.present}) == 1:  # (else schedules by step may differ)
            self._compare_settings()
        if self._flush:
            self._notice = (
                _replaced({one: self._start_of[one] for one in shown if one in self._start_of}) or self._notice
            )
            self._start_of.clear()
            self._drained, self._whole = dict(self._produced), not gone
        self._shown.clear()
        self._resuming = set(self.present) if self._resumes else set()
        self._flush = False
        self._done = dict.fromkeys(gone)
        self.computing = set(self.present)
        self.draining.clear()
        for rank in gone:
            commands += self._on_rank_finished(rank, now)
        return commands


def _replaced(starts: dict[int, int]) -> str | None:
    """Return a notice that ranks have continued after a drain with different weights; None if they have not."""
    lowest = min(starts, default=0)
    others = [rank for rank in sorted(starts) if starts[rank] != starts[lowest]]
    return (
        f"{ranks_text(others)} continued after the last drain() with other weights than rank {lowest}, and ranks have "
        f"mixed them since: load a state or set weights on every rank alike"
        if others
        else None
    )


# -- collectives at ends --------------------------------------------------------------------------------------

KINDS = ("sum", "broadcast", "compare")
"""``compare``: no tensor travels; the coordinator compares names and checksums."""
SAME = (
    "every rank that still has the optimizer calls its collectives (drain, cut, consensus, consensus_distance, switch) "
    "in the same order"
)


@dataclass
class CollectiveQueue:
    """Collectives in which the ranks of one optimizer wait. Each runs when every rank that still has it waits there.

    No rank waits for a departed rank, whose optimizer was deleted or discarded, or whose process is leaving. Its engine
    takes part with zeros, since Horovod needs every member. A rank waits in one collective at a time, and numbers its
    collectives from 1.

    Attributes:
        optimizer: the number that all its messages carry.
        ready: the collective in which each waiting rank waits.
        last: the number of each rank's last collective.
    """

    optimizer: int
    ready: dict[int, CollectiveReady] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)

    def add(self, rank: int, event: CollectiveReady) -> None:
        """Record that ``rank`` waits in a collective.

        Raises:
            ProtocolError: it already waits in one, or this is not its next one.
        """
        if event.kind not in KINDS or event.length < 0:
            raise ProtocolError(f"rank {rank} requested a collective {event.kind!r} of {event.length} elements")
        last = self.last.get(rank, 0)
        if rank in self.ready or event.index != last + 1:
            raise ProtocolError(f"rank {rank} is in collective {event.index} after {last}")
        self.last[rank] = event.index
        self.ready[rank] = event

    def remove(self, rank: int) -> None:
        """Forget ``rank``, which no longer has the optimizer."""
        self.ready.pop(rank, None)

    def due(self, present: AbstractSet[int], draining: AbstractSet[int] = frozenset()) -> list[RunCollective]:
        """Return the collective that can run now, if there is one; with a reason if it can never run.

        Args:
            present: the ranks that still have the optimizer.
            draining: the ranks that wait in a drain or a cut.
        """
        if not self.ready or len(self.ready) + len(draining) < len(present):  # (called for each event: no loop)
            return []
        if not present <= self.ready.keys() | draining:
            return []
        ready, self.ready = dict(sorted(self.ready.items())), {}
        first = next(iter(ready.values()))
        root = first.root if first.root in ready else next(iter(ready))
        problem, ranks = _problem(ready, draining - ready.keys()), list(ready)
        return [RunCollective(self.optimizer, first.kind, first.what, first.length, first.dtype, root, ranks, problem)]

    def waiting(self, present: AbstractSet[int]) -> tuple[str, frozenset[int]] | None:
        """Return the collective in which ranks wait, and the ranks that are missing; None if no rank waits."""
        if not self.ready:
            return None
        return next(iter(self.ready.values())).what, frozenset(present - self.ready.keys())


def _problem(ready: dict[int, CollectiveReady], elsewhere: AbstractSet[int]) -> str | None:
    """Return why the ranks' calls are not the same collective, or which replicas differ; None if neither holds."""
    lowest, first = next(iter(ready.items()))
    if elsewhere:
        return f"rank {lowest} is in {first.what} while {ranks_text(elsewhere)} wait(s) in drain() or cut(): {SAME}"
    for rank, event in ready.items():
        own, other = ((one.kind, one.what, one.length, one.dtype, one.root) for one in (first, event))
        if own != other:
            return (
                f"rank {lowest} is in {first.what} ({first.length} x {first.dtype or 'checksums'}) while rank {rank} "
                f"is in {event.what} ({event.length} x {event.dtype or 'checksums'}): {SAME}"
            )
    if first.kind != "compare":
        return None
    difference = differing_replicas({rank: (event.names, event.checksums) for rank, event in ready.items()})
    if difference is None:
        return None
    ranks, name = difference
    return (
        f"replicas differ after {first.what}: {ranks_text(ranks)} from rank {lowest}, first in {name!r}. Weights or "
        f"optimizer state were changed on some ranks alone: call load_state_dict() and the like on every rank, or on "
        f"rank 0 before hvd.broadcast_parameters() and hvd.broadcast_optimizer_state() (torch), or "
        f"hvd.broadcast_variables() (TensorFlow); call these now to make replicas equal. Another cause is a "
        f"round_transform= whose sums depend on the number of threads: set the same number on all ranks"
    )


# -- do the ranks' optimizers match? --------------------------------------------------------------------------

STATE = "optimizer state: "
"""Prefix of the names of the optimizer's own state in ``Registered``; all other names are parameters."""
SEND_STATE = (
    "Load the checkpoint on every rank, or on rank 0 alone and then call hvd.broadcast_optimizer_state(optimizer, "
    "root_rank=0) in torch, before training; in Keras use the BroadcastGlobalVariablesCallback(0) of "
    "hvd_async.tensorflow.keras."
)
"""Advice for optimizers that start with different states."""
MOST_BUCKETS = 1 << 16


def fault_of(rank: int, opened: Registered[Any], size: int) -> str | None:
    """Return why ``opened`` is invalid, regardless of the other ranks; None if it is valid.

    Args:
        rank: the rank that has sent it.
        opened: the event.
        size: the number of ranks in the job.
    """
    members = opened.members  # (empty for all ranks, so that its cost does not depend on their number)
    if members and not (
        rank in members and len(set(members)) == len(members) and 0 <= min(members) <= max(members) < size
    ):
        return f"it shares an optimizer with the ranks {members} of a job of {size}"
    if len(opened.names) != len(opened.checksums):
        return f"it named {len(opened.names)} parameters, with {len(opened.checksums)} checksums"
    if not 0 < opened.config.counts <= MOST_BUCKETS:
        return f"it has {opened.config.counts} buckets of gradients, at most {MOST_BUCKETS} are allowed"
    return None


def mismatch(opened: dict[int, Registered[Any]]) -> str | None:
    """Return how the ranks' optimizers differ and how to fix it; None if they agree.

    Args:
        opened: the registration of each rank.
    """
    lowest = min(opened)
    first = opened[lowest]
    for rank in sorted(opened):
        other = opened[rank]
        if other.members != first.members:
            return (
                f"the ranks share this optimizer with different ranks: rank {lowest} with {first.members}, rank {rank} "
                f"with {other.members}. Pass the same process_set on every rank of it."
            )
        if other.config != first.config:
            return (
                f"the ranks wrapped their optimizers differently: rank {lowest} has {first.config}, rank {rank} "
                f"has {other.config}. Pass the same arguments on every rank."
            )
        if other.names != first.names:
            pairs = zip_longest(first.names, other.names, fillvalue="nothing")
            own, others = next(pair for pair in pairs if pair[0] != pair[1])
            if all(name == "nothing" or name.startswith(STATE) for name in (own, others)):
                return (
                    f"the optimizer's state differs before the first step: rank {lowest} has {own!r} where rank {rank} "
                    f"has {others!r}. {SEND_STATE}"
                )
            return (
                f"the ranks train different parameters, or with other settings: rank {lowest} has {own!r} where rank "
                f"{rank} has {others!r} (of {len(first.names)} and {len(other.names)} entries). Build the same model "
                f"on every rank, with the same optimizer, and let every rank's optimizers take their first step in "
                f"the same order."
            )
    difference = differing_replicas({rank: (one.names, one.checksums) for rank, one in opened.items()})
    if difference is None:
        return None
    differing, name = difference
    if name.startswith(STATE):
        return (
            f"the optimizer's state differs before the first step: {ranks_text(differing)} from rank {lowest}, first "
            f"in {name!r}. {SEND_STATE}"
        )
    return (
        f"the weights differ before the first step: {ranks_text(differing)} from rank {lowest}, first in {name!r}. "
        f"Call hvd.broadcast_parameters(model.state_dict(), root_rank=0) in torch, "
        f"hvd.broadcast_variables(model.variables, root_rank=0) or the Keras BroadcastGlobalVariablesCallback(0) of "
        f"hvd_async.tensorflow.keras in TensorFlow, before training. (Horovod's own does not work on Keras 3.) If it "
        f"was called, something has changed weights on each rank since then, such as an optimizer that is not wrapped "
        f"or the first half of SAM."
    )


def unlike_settings(hypers: Mapping[int, Hyper]) -> str | None:
    """Return a notice about the first hyperparameter that differs between ranks; None if there is none.

    Args:
        hypers: of each rank; empty if it does not know them yet.
    """
    known = {rank: hyper for rank, hyper in sorted(hypers.items()) if hyper}
    lowest = min(known, default=0)
    for rank, hyper in known.items():
        for number, (own, other) in enumerate(zip(known[lowest], hyper, strict=False)):
            for name in sorted(own.keys() | other.keys()):
                if own.get(name) != other.get(name):
                    return (
                        f"ranks have different settings: {name} of parameter group {number} is {own.get(name)} "
                        f"on rank {lowest} and {other.get(name)} on rank {rank}. Set the same on every rank, or load "
                        f"the checkpoint on every rank, unless each is to have its own"
                    )
    return None


def differing_replicas(replicas: dict[int, tuple[list[str], list[int]]]) -> tuple[list[int], str] | None:
    """Return the ranks whose names and checksums differ from those of the lowest rank, and the first name that differs.

    Args:
        replicas: (names, checksums) of each rank.

    Returns:
        None if all agree.
    """
    names, checksums = replicas[min(replicas)]
    differing = [rank for rank in sorted(replicas) if replicas[rank] != (names, checksums)]
    if not differing:
        return None
    pairs = zip_longest(zip(names, checksums, strict=True), zip(*replicas[differing[0]], strict=True))
    name = next(str((own or other)[0]) for own, other in pairs if own != other)
    return differing, name


# -- optimizers that the same ranks share ---------------------------------------------------------------------

Machine = StateMachine[Any]


def to_register_before(rank: int, finished: Machine, machines: Collection[Machine]) -> list[tuple[Machine, int]]:
    """Return the optimizers that ranks must register before ``rank`` finishes with ``finished``, each with such a rank.

    Finishing may end the drain of ``finished``. The ranks in it could then no longer be asked to register an optimizer
    that others only wait to drain, or that only ranks in that drain wait to step.

    Args:
        rank: the rank that is about to finish.
        finished: that optimizer.
        machines: all optimizers of the ranks that share it.
    """
    found = [one for one in machines if one.only_drains() or (one.opening and one.opening <= finished.draining)]
    return [(one, other) for one in found for other in sorted(one.unasked(finished.draining | {rank}))]


def registrations_due(changed: Machine, machines: Collection[Machine]) -> list[tuple[Machine, int]]:
    """Return the optimizers to be registered now, each with a rank in a drain that must register it; once per rank.

    A rank in a drain may not have registered an optimizer in which others wait. If its drain waits only for these
    ranks, all of them are deadlocked. (Sets of ranks are compared only while some ranks register one optimizer and
    others drain another.)

    Args:
        changed: the optimizer that has handled an event; any new deadlock involves it.
        machines: all optimizers of the ranks that share it.
    """
    pairs = [*((changed, other) for other in machines), *((one, changed) for one in machines)]
    return [
        (one, rank)
        for one, other in pairs
        if one.opening and other.draining and other.computing and other.computing <= one.opening
        for rank in sorted(one.unasked(other.draining))
    ]
