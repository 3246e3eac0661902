"""A simulated job: ranks' training threads and their engines around the wire and the coordinator. Pure.

All ranks get a command at one time, when the last of them has it, since a collective starts with the last rank that
submits it; so what engines do for a command is done once for all.
"""

from __future__ import annotations

import abc
import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from hvd_async.runtime.machine import StateMachine
from hvd_async.runtime.protocol import Command, Config, Drained, Finished, Hyper, OptimizerEvent, Registered
from hvd_async.simulation.network import Network
from hvd_async.simulation.schedule import Schedule

# -- what to simulate, and the outcome ---------------------------------------------------------------------------------


class Setup(NamedTuple):
    """Job to simulate, whatever its algorithm.

    Attributes:
        times: seconds of computation, [steps, ranks]; a rank that takes more steps begins again with its first.
        network: between the ranks.
        megabytes: of weights, and of gradients, in float32.
        buckets: parts in which gradients travel.
        overlap: whether they do while the backward pass goes on; else when it has ended.
        local_size: ranks of a host, which is a group under a leader.
        barrier: whether all ranks begin every step together.
        window: seconds in which ranks that step at their own pace take as many steps as they can; None: until all
            together have taken those of ``times``.
        drains: whether the job drains at its end.
        untimed: steps of each rank at the start that do not count, in which ranks come to their rhythm.
        seed: of what is drawn: majority's initiators, losses.
    """

    times: Schedule
    network: Network = Network()
    megabytes: float = 0.0
    buckets: int = 1
    overlap: bool = False
    local_size: int = 1
    barrier: bool = False
    window: float | None = None
    drains: bool = True
    untimed: int = 0
    seed: int = 0

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return int(self.times.shape[1])

    @property
    def steps(self) -> int:
        """Steps of each rank."""
        return int(self.times.shape[0])


class Outcome(NamedTuple):
    """Figures of a simulated job.

    Attributes:
        arm: its algorithm.
        ranks: how many.
        steps: of all ranks together that count.
        seconds: from the first that counts until the last rank has taken its steps; the window, where ranks step at
            their own pace.
        steps_per_s: steps of a rank a second, the mean over the ranks.
        staleness: rounds (gossip: steps, averagings; leaders: steps) between computing and applying, of all steps, and
            how often each.
        wait_s: seconds that a rank waits in a step, mean over ranks and steps.
        sent_bytes: that a rank sends in a step, mean.
        collectives: rounds, exchanges, averages and pulls.
        contributors: ranks that had arrived when a round started, mean; None where there are no rounds.
        produced, applied: gradients handed over and applied (partial allreduce), messages sent and received (gossip),
            until the end of the drain; equal where nothing is lost.
        coordinator_s: the coordinator's simulated CPU time.
        drain_s: from the last step to the end of the drain.
        actions: of the simulation: what it had to do.
    """

    arm: str
    ranks: int
    steps: int
    seconds: float
    steps_per_s: float
    staleness: Mapping[int, int] = MappingProxyType({})
    wait_s: float = 0.0
    sent_bytes: float = 0.0
    collectives: int = 0
    contributors: float | None = None
    produced: int = 0
    applied: int = 0
    coordinator_s: float = 0.0
    drain_s: float = 0.0
    actions: int = 0

    @property
    def mean_staleness(self) -> float:
        """The mean; 0 of nothing."""
        count = sum(self.staleness.values())
        return sum(late * times for late, times in self.staleness.items()) / count if count else 0.0

    @property
    def max_staleness(self) -> int:
        """The longest; 0 of nothing."""
        return max(self.staleness, default=0)


# -- the clock ---------------------------------------------------------------------------------------------------------


class Clock:
    """Simulated time in seconds, from 0.

    Attributes:
        now: the time of the action that runs, or ran last.
        actions: how many have run.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.actions = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._asked = 0

    def at(self, when: float, action: Callable[..., None], *arguments: Any) -> None:
        """Have an action run at a time, which must not be over."""
        if when < self.now:
            raise ValueError(f"at {self.now} s something is to happen at {when} s")
        self._asked += 1
        heapq.heappush(self._heap, (when, self._asked, action, arguments))

    def after(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        """Have an action run so many seconds from now."""
        self.at(self.now + seconds, action, *arguments)

    def run(self, over: Callable[[], bool], until: float = math.inf) -> bool:
        """Run actions until ``over`` or the time ``until``; return whether it is over, False if nothing is left."""
        while not over():
            if not self._heap or self._heap[0][0] > until:
                return False
            self.now, _, action, arguments = heapq.heappop(self._heap)
            self.actions += 1
            action(*arguments)
        return True


# -- the wire ----------------------------------------------------------------------------------------------------------
# Horovod's collectives in a simulated job: one at a time over the whole job, in the order of the commands. Pure.


class Wire:
    """Collectives of all ranks, or of a group, one at a time on each rank."""

    def __init__(self, clock: Clock, network: Network, ranks: int) -> None:
        self._clock, self._network, self._ranks = clock, network, ranks
        self._free = 0.0
        """When the last collective of all ranks ends."""
        self._groups: dict[int, float] = {}
        """When the last of a group does that has begun after it."""
        self.count = 0

    def submit(self, seconds: float, done: Callable[..., None], *arguments: Any) -> None:
        """Run a collective that every rank has submitted: it takes ``seconds`` on the wire, then ``done`` is called."""
        self._free = self._run(max([self._free, *self._groups.values()]), self._ranks, seconds, done, *arguments)
        self._groups.clear()

    def submit_in_group(
        self, group: int, ranks: int, seconds: float, done: Callable[..., None], *arguments: Any
    ) -> None:
        """Run a collective that so many ranks, all of a group that shares none with others, have submitted."""
        free = self._groups.get(group, self._free)
        self._groups[group] = self._run(free, ranks, seconds, done, *arguments)

    def _run(self, free: float, ranks: int, seconds: float, done: Callable[..., None], *arguments: Any) -> float:
        """Run a collective when its ranks are free; return when it ends."""
        network, start = self._network, max(self._clock.now, free)
        if network.cycle:
            start = math.ceil(start / network.cycle - 1e-9) * network.cycle
            start = max(start, self._clock.now)
        ends = start + network.agreement(ranks) + network.operation + seconds
        self.count += 1
        self._clock.at(ends, done, *arguments)
        return ends


class Delayed:
    """Collectives in the order of the commands, some of which wait until ranks have what they carry."""

    def __init__(self) -> None:
        self._held: deque[tuple[set[Any], Callable[[], None]]] = deque()

    def add(self, lacking: set[Any], submit: Callable[[], None]) -> None:
        """Submit as soon as nothing is lacking, and those before are submitted."""
        self._held.append((lacking, submit))
        self.advance()

    def advance(self) -> None:
        """Submit what can be."""
        while self._held and not self._held[0][0]:
            self._held.popleft()[1]()


# -- the coordinator's thread ------------------------------------------------------------------------------------------


def recipients(machine: StateMachine[Any], command: Command) -> Sequence[int]:
    """Return the ranks that a command is sent to."""
    return machine.recipients(command)


class Coordinator:
    """The coordinator of one optimizer, which handles one event after the other.

    Attributes:
        cpu: seconds that its thread has worked.
    """

    def __init__(
        self, machine: StateMachine[Any], clock: Clock, network: Network, deliver: Callable[[Command], None]
    ) -> None:
        self._machine, self._clock, self._network, self._deliver = machine, clock, network, deliver
        self._queue: deque[tuple[int, Sequence[OptimizerEvent]]] = deque()
        """Messages of ranks that are not handled yet, the one at work first."""
        self._free = 0.0
        """When the thread has sent what it has to send."""
        self._wakes_at: float | None = None
        self.cpu = 0.0

    def register(self, rank: int, event: OptimizerEvent) -> None:
        """Take in the registration of a rank, before the clock starts."""
        self._machine.handle(rank, event, 0.0)

    def receive(self, rank: int, events: Sequence[OptimizerEvent]) -> None:
        """Take in one message of a rank, with these events, as soon as those before it are handled."""
        self._queue.append((rank, events))
        if len(self._queue) == 1:
            self._begin()

    def _begin(self) -> None:
        """Work on the first message of the queue."""
        seconds = len(self._queue[0][1]) * self._network.event
        self.cpu += seconds
        at = max(self._clock.now, self._free) + seconds
        if at > self._clock.now:
            self._clock.at(at, self._handle)
        else:
            self._handle()

    def _handle(self) -> None:
        rank, events = self._queue[0]
        for event in events:
            self._send(self._machine.handle(rank, event, self._clock.now))
        self._set_alarm()
        self._queue.popleft()
        if self._queue:
            self._begin()

    def _tick(self) -> None:
        self._wakes_at = None
        deadline = self._machine.deadline()
        if deadline is not None and deadline <= self._clock.now:
            self._send(self._machine.tick(self._clock.now))
        self._set_alarm()

    def _set_alarm(self) -> None:
        deadline = self._machine.deadline()
        if deadline is not None and deadline != self._wakes_at:
            self._wakes_at = deadline
            self._clock.at(max(deadline, self._clock.now), self._tick)

    def _send(self, commands: Sequence[Command]) -> None:
        """Send commands of one event: together, so that a rank gets one message with all of them."""
        if not commands:
            return
        ranks = max((recipients(self._machine, command) for command in commands), key=len)
        seconds = self._network.command_cpu(len(ranks))
        self._free = max(self._clock.now, self._free) + seconds
        self.cpu += seconds
        for command in commands:
            self._clock.at(self._free + self._network.to_coordinator(), self._deliver, command)


# -- the job -----------------------------------------------------------------------------------------------------------


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
