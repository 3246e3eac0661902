"""A simulated job: ranks' training threads and their engines around the wire and the coordinator. Pure.

All ranks get a command at one time, when the last of them has it, since a collective starts with the last rank that
submits it; so what engines do for a command is done once for all.
"""

from __future__ import annotations

import abc
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvd_async.runtime.messages import Command, Config, Drained, Finished, Hyper, OptimizerEvent, Registered
from hvd_async.runtime.state_machine import StateMachine
from hvd_async.simulation.clock import Clock
from hvd_async.simulation.coordinator import Coordinator
from hvd_async.simulation.outcome import Outcome, Setup
from hvd_async.simulation.wire import Wire

Wait = float | Callable[[], bool]
"""What a training thread does next: compute for so many seconds, or wait until something is so."""
HYPER: Hyper = [{"lr": 0.1}]


@dataclass(eq=False, slots=True)
class Rank:
    """A simulated rank; a family's has more.

    Attributes:
        index: its number.
        steps: that it has taken.
        waited: seconds, in all.
        until: what its training thread waits for; None if it computes, or has ended.
        since: when that began.
        thread: computes and waits.
    """

    index: int
    steps: int = 0
    waited: float = 0.0
    until: Callable[[], bool] | None = None
    since: float = 0.0
    thread: Iterator[Wait] = field(default_factory=lambda: iter(()))


class Job(abc.ABC):
    """A job of one algorithm with a state machine.

    Args:
        arm: its name.
        setup: what is simulated.
        machine: the coordinator's.
        config: what all ranks register with.
        ranks: the simulated ones.
        own_pace: whether each rank takes as many steps as it can.
    """

    def __init__(
        self,
        arm: str,
        setup: Setup,
        machine: StateMachine[Any],
        config: Config,
        ranks: Sequence[Rank],
        own_pace: bool = False,
    ) -> None:
        self.arm, self.setup, self.ranks, self.machine = arm, setup, ranks, machine
        self.clock = Clock()
        self.wire = Wire(self.clock, setup.network, setup.ranks)
        self.coordinator = Coordinator(machine, self.clock, setup.network, self._deliver)
        self.staleness: Counter[int] = Counter()
        self.sent = 0.0
        """Bytes that a rank has sent, mean over the ranks."""
        self.drained: Drained[Any] | None = None
        self._own_pace = own_pace
        self._waiting: dict[int, Rank] = {}
        self._at_barrier: Counter[int] = Counter()
        self._total = self._ended = 0
        self._begun = 0.0
        self._stopped: float | None = None
        self._waited = 0.0
        for rank in ranks:
            self.coordinator.register(rank.index, Registered(0, config, ["w"], [1], hyper=HYPER))

    # -- the whole ----------------------------------------------------------------------------------------------

    def run(self, until: float = math.inf) -> Outcome | None:
        """Run the job to its end and return its figures; None if it has not ended by the time ``until``.

        Raises:
            RuntimeError: nobody can go on.
        """
        if not self.clock.actions:
            for rank in self.ranks:
                rank.thread = self._train(rank)
                self.clock.at(0.0, self._resume, rank)
            if self._own_pace and self.setup.window is not None:
                self.clock.at(self.setup.window, self._stop)
        if self.clock.run(self._over, until):
            return self._outcome()
        if until == math.inf:
            stuck = [rank.index for rank in self.ranks if rank.until is not None]
            raise RuntimeError(f"ranks {stuck[:9]} wait for {self.machine.blocked_on()}: nobody can go on")
        return None

    def _over(self) -> bool:
        return self._ended == len(self.ranks) if self.setup.drains else self._stopped is not None

    def _outcome(self) -> Outcome:
        assert self._stopped is not None
        seconds, steps = self._stopped - self._begun, self._total - self.setup.untimed * len(self.ranks)
        count, produced, applied = max(1, self._total), *self._conserved()
        return Outcome(
            arm=self.arm,
            ranks=len(self.ranks),
            steps=steps,
            seconds=seconds,
            steps_per_s=steps / len(self.ranks) / seconds if seconds else math.inf,
            staleness=self.staleness,
            wait_s=self._waited / count,
            sent_bytes=self.sent * len(self.ranks) / count,
            collectives=self.wire.count,
            contributors=self._contributors(),
            produced=produced,
            applied=applied,
            coordinator_s=self.coordinator.cpu,
            drain_s=self.clock.now - self._stopped,
            actions=self.clock.actions,
        )

    def _contributors(self) -> float | None:
        return None

    @abc.abstractmethod
    def _conserved(self) -> tuple[int, int]:
        """Return what was produced, and what was applied."""

    # -- training threads ---------------------------------------------------------------------------------------

    def _train(self, rank: Rank) -> Iterator[Wait]:
        while not self._has_finished(rank):
            if self.setup.barrier:
                step = rank.steps
                self._at_barrier[step] += 1
                if self._at_barrier[step] == len(self.ranks):
                    self._wake()
                yield lambda step=step: self._at_barrier[step] == len(self.ranks)  # type: ignore[misc]
                rank.waited = 0.0
            yield from self._step(rank)
            self._end_step(rank)
        if self.setup.drains:
            self.send(rank, Finished(0, self._counts(rank), flush=True))
            yield lambda: self.drained is not None and self._has_all(self.drained)
        self._ended += 1

    @abc.abstractmethod
    def _step(self, rank: Any) -> Iterator[Wait]:
        """Take one step: compute, send, wait."""

    def _counts(self, rank: Rank) -> list[int]:
        """Return ``Finished.produced``."""
        return [rank.steps]

    @abc.abstractmethod
    def _has_all(self, drained: Drained[Any]) -> bool:
        """Whether all that was commanded before the end has completed."""

    def _has_finished(self, rank: Rank) -> bool:
        return self._stopped is not None if self._own_pace else rank.steps >= self.setup.steps

    def _end_step(self, rank: Rank) -> None:
        rank.steps += 1
        waited, rank.waited = rank.waited, 0.0
        if self._stopped is not None:
            return  # of a rank at its own pace, after the window
        self._total += 1
        self._waited += waited
        if self._total == self.setup.untimed * len(self.ranks):
            self._begun = self.clock.now
        if self._total == self.setup.times.size and not (self._own_pace and self.setup.window is not None):
            self._stop()

    def _stop(self) -> None:
        self._stopped = self.clock.now

    def seconds_of(self, rank: Rank) -> float:
        """Return how long a rank computes in its next step."""
        return float(self.setup.times[rank.steps % self.setup.steps, rank.index])

    def _resume(self, rank: Rank) -> None:
        """Let a training thread go on until it computes, waits or ends."""
        if rank.until is not None:
            rank.waited += self.clock.now - rank.since
            rank.until = None
        for wait in rank.thread:
            if isinstance(wait, float):
                self.clock.after(wait, self._resume, rank)
                return
            if not wait():
                rank.until, rank.since = wait, self.clock.now
                self._waiting[rank.index] = rank
                return

    def _wake(self) -> None:
        """Let those go on whose waiting is over: something has come to the ranks."""
        for rank in [rank for rank in self._waiting.values() if rank.until is not None and rank.until()]:
            del self._waiting[rank.index]
            self.clock.after(0.0, self._resume, rank)

    # -- engines ------------------------------------------------------------------------------------------------

    def send(self, rank: Rank, *events: OptimizerEvent) -> None:
        """Send events of a rank to the coordinator, in one message."""
        self.clock.after(self.setup.network.to_coordinator(), self.coordinator.receive, rank.index, events)

    def _deliver(self, command: Command) -> None:
        """All ranks have a command."""
        if isinstance(command, Drained):
            self.drained = command
        else:
            self._on_command(command)
        self._wake()

    @abc.abstractmethod
    def _on_command(self, command: Command) -> None:
        """Do what a command of the family's own says, on all ranks."""
