"""A simulated job: the production ranks and coordinator, in simulated time on one thread.

The protocol itself is not modelled. Each rank runs its worker's programs and reacts to commands. Computation, the
network, Horovod's cycle and the coordinator's CPU take time. A command reaches all ranks at the time at which the last
of them receives it, since a collective starts with the last rank that submits it.
"""

from __future__ import annotations

import abc
import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from hvd_async.runtime.in_memory import Combine, InMemoryCollectives, Sent
from hvd_async.runtime.interfaces import Vector, Wait
from hvd_async.runtime.machine import StateMachine
from hvd_async.runtime.protocol import Command, Hyper, OptimizerEvent
from hvd_async.runtime.worker import Worker
from hvd_async.simulation.network import Network, ring_bytes
from hvd_async.simulation.schedule import Schedule

# -- what to simulate, and the outcome ---------------------------------------------------------------------------------


class Setup(NamedTuple):
    """Job to simulate, independent of its algorithm.

    Attributes:
        times: seconds of computation, [steps, ranks]; a rank that takes more steps repeats them from the first.
        network: between the ranks.
        megabytes: of weights, and of gradients, in float32.
        buckets: number of parts in which gradients are sent, after the backward pass.
        local_size: ranks per host, which is a group under a leader.
        barrier: whether all ranks begin every step together.
        window: seconds in which ranks that step at their own pace take as many steps as they can; None: until they
            have taken as many steps as ``times`` has, in total.
        drains: whether the job drains at its end.
        untimed: first steps of each rank that do not count, until the ranks reach a steady state.
        seed: of the random draws: majority's initiators, losses.
    """

    times: Schedule
    network: Network = Network()
    megabytes: float = 0.0
    buckets: int = 1
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
        ranks: number of ranks.
        steps: steps that count, of all ranks together.
        seconds: from the first step that counts until the last rank has taken its steps; the window where ranks step
            at their own pace.
        steps_per_s: steps per second of a rank, the mean over the ranks.
        staleness: histogram of the rounds (gossip: steps, averagings; leaders: steps) between computing and applying.
        wait_s: seconds that a rank waits per step, mean over ranks and steps.
        sent_bytes: bytes that a rank sends per step, mean.
        collectives: rounds, exchanges, averages and pulls.
        contributors: mean number of ranks that had arrived when a round started; None without rounds.
        produced, applied: gradients handed over and applied (partial allreduce), messages sent and received (gossip),
            until the end of the drain; equal if nothing is lost.
        coordinator_s: the coordinator's simulated CPU time.
        drain_s: from the last step to the end of the drain.
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

    @property
    def mean_staleness(self) -> float:
        """The mean; 0 if there was none."""
        count = sum(self.staleness.values())
        return sum(late * times for late, times in self.staleness.items()) / count if count else 0.0

    @property
    def max_staleness(self) -> int:
        """The maximum; 0 if there was none."""
        return max(self.staleness, default=0)


# -- the clock ---------------------------------------------------------------------------------------------------------


class Clock:
    """Simulated time in seconds, from 0.

    Attributes:
        now: time of the current or the last action.
        actions: number of actions that have run.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.actions = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._asked = 0

    def at(self, when: float, action: Callable[..., None], *arguments: Any) -> None:
        """Schedule an action at a time that has not passed."""
        if when < self.now:
            raise ValueError(f"at {self.now} s an action is to happen at {when} s, in the past")
        self._asked += 1
        heapq.heappush(self._heap, (when, self._asked, action, arguments))

    def after(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        """Schedule an action ``seconds`` from now."""
        self.at(self.now + seconds, action, *arguments)

    def run(self, over: Callable[[], bool], until: float = math.inf) -> bool:
        """Run actions until ``over()`` or the time ``until``; return whether it is over, False if no action is left."""
        while not over():
            if not self._heap or self._heap[0][0] > until:
                return False
            self.now, _, action, arguments = heapq.heappop(self._heap)
            self.actions += 1
            action(*arguments)
        return True


# -- the data plane ----------------------------------------------------------------------------------------------------
# Collectives are matched by name, as in Horovod: one starts when the last of its ranks has submitted it, and occupies
# the wire for the time that the model of the network gives. Simulated vectors are tiny; sizes in bytes are the job's.


class Sizes(NamedTuple):
    """Bytes that ranks exchange, independent of the size of the simulated vectors.

    Attributes:
        reduced: of a vector that is summed outside of drains, or broadcast.
        message: of a message of an exchange.
        weights: of a vector of weights in a drain.
    """

    reduced: float
    message: float = 0.0
    weights: float = 0.0


class Part:
    """Handle of one rank's part in a collective.

    Attributes:
        rank: the rank that has submitted it.
        sent: what the rank has submitted.
        then: callback that receives the result.
    """

    in_stages = False
    take = None

    def __init__(self, rank: int, sent: Sent) -> None:
        self.rank, self.sent = rank, sent
        self.then: Callable[[Vector], None] = lambda result: None

    def done(self) -> bool:
        """Return False: a simulated collective calls ``then`` when it completes."""
        return False

    def result(self) -> Vector:
        """Raise: a simulated collective calls ``then`` when it completes."""
        raise RuntimeError("a simulated collective calls its function when it is complete")

    def seconds_to_poll(self) -> None:
        """Return None: completion calls ``then``."""


class DataPlane:
    """Collectives of a simulated job.

    Args:
        clock: of the job.
        network: model of the network.
        ranks: number of ranks in the job.
        sizes: bytes that they exchange.
        settle: called after each completed collective with its name and its ranks.

    Attributes:
        count: number of collectives that have started.
        sent: bytes that a rank has sent outside of drains, mean over the ranks.
    """

    def __init__(
        self,
        clock: Clock,
        network: Network,
        ranks: int,
        sizes: Sizes,
        settle: Callable[[str, Sequence[int]], None],
    ) -> None:
        self._clock, self._network, self._ranks, self._sizes, self._settle = clock, network, ranks, sizes, settle
        self._free = 0.0
        """End of the last collective of all ranks, s."""
        self._groups: dict[Sequence[int], float] = {}
        """End of the last later collective of a group, s."""
        self._open: dict[tuple[str, Sequence[int]], dict[int, Part]] = {}
        self.count = 0
        self.sent = 0.0

    def join(self, name: str, members: Sequence[int], part: Part, kind: str, combine: Combine) -> Part:
        """Submit a rank's part of a collective of these ranks; the last part starts it."""
        parts = self._open.setdefault((name, members), {})
        if part.rank in parts:
            raise RuntimeError(f"simulated rank {part.rank} has submitted {name} twice: a bug in its algorithm")
        parts[part.rank] = part
        if len(parts) == len(members):
            del self._open[name, members]
            self._start(name, members, [parts[rank] for rank in members], kind, combine)
        return part

    def _start(self, name: str, members: Sequence[int], parts: Sequence[Part], kind: str, combine: Combine) -> None:
        seconds = self._seconds(name, parts, kind)
        everyone = len(members) == self._ranks
        free = max([self._free, *self._groups.values()]) if everyone else self._groups.get(members, self._free)
        start = max(self._clock.now, free)
        if self._network.cycle:
            start = max(math.ceil(start / self._network.cycle - 1e-9) * self._network.cycle, self._clock.now)
        ends = start + self._network.agreement(len(members)) + self._network.operation + seconds
        if everyone:
            self._free = ends
            self._groups.clear()
        else:
            self._groups[members] = ends
        self.count += 1
        self._clock.at(ends, self._complete, name, members, parts, combine)

    def _seconds(self, name: str, parts: Sequence[Part], kind: str) -> float:
        """Return the seconds of a collective on the wire, and count the bytes that it sends."""
        network, ranks = self._network, len(parts)
        ends = ".end." in name
        size = self._sizes.message if kind == "exchange" else self._sizes.weights if ends else self._sizes.reduced
        if kind == "exchange":
            sent = size * sum(sum(part.sent.splits) for part in parts)
            busiest = max(max(sum(part.sent.splits), sum(part.sent.coming)) for part in parts)
            seconds = network.alltoall_seconds(size * busiest, ranks)
        elif kind == "broadcast":
            sent, seconds = size * (ranks - 1), network.broadcast_seconds(size, ranks)
        else:
            sent, seconds = ring_bytes(size, ranks) * ranks, network.allreduce_seconds(size, ranks)
        self.sent += 0.0 if ends else sent / self._ranks
        return seconds

    def _complete(self, name: str, members: Sequence[int], parts: Sequence[Part], combine: Combine) -> None:
        for part, result in zip(parts, combine([part.sent for part in parts]), strict=True):
            part.then(result)
        self._settle(name, members)


class RankCollectives(InMemoryCollectives):
    """Data plane of one simulated rank."""

    def __init__(self, rank: int, size: int, plane: DataPlane) -> None:
        super().__init__(rank, size)
        self._plane = plane

    def _join(self, name: str, members: Sequence[int], sent: Sent, kind: str, combine: Combine) -> Part:
        return self._plane.join(name, members, Part(self.rank, sent), kind, combine)

    def allgather_bytes(self, payload: bytes, name: str) -> list[bytes]:
        """Raise: simulated ranks exchange no objects outside of optimizers."""
        raise RuntimeError("simulated ranks gather no bytes")


# -- the coordinator's thread ------------------------------------------------------------------------------------------


class Coordinator:
    """Coordinator of one optimizer, which handles its events one at a time.

    Attributes:
        cpu: CPU seconds of its thread.
    """

    def __init__(
        self, machine: StateMachine[Any], clock: Clock, network: Network, deliver: Callable[[Command], None]
    ) -> None:
        self._machine, self._clock, self._network, self._deliver = machine, clock, network, deliver
        self._queue: deque[tuple[int, Sequence[OptimizerEvent]]] = deque()
        """Pending messages of ranks; the first is being handled."""
        self._free = 0.0
        """Time until which the thread is busy with sending."""
        self._wakes_at: float | None = None
        self.cpu = 0.0

    def register(self, rank: int, event: OptimizerEvent) -> None:
        """Register a rank before the clock starts."""
        for command in self._machine.handle(rank, event, 0.0):
            self._deliver(command)

    def receive(self, rank: int, events: Sequence[OptimizerEvent]) -> None:
        """Queue one message of a rank, with these events."""
        self._queue.append((rank, events))
        if len(self._queue) == 1:
            self._begin()

    def _begin(self) -> None:
        """Handle the first message of the queue."""
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
        """Send the commands of one event to each rank as one message."""
        if not commands:
            return
        ranks = max((self._machine.recipients(command) for command in commands), key=len)
        seconds = self._network.command_cpu(len(ranks))
        self._free = max(self._clock.now, self._free) + seconds
        self.cpu += seconds
        for command in commands:
            self._clock.at(self._free + self._network.to_coordinator(), self._deliver, command)


# -- ranks -------------------------------------------------------------------------------------------------------------


class Unlocked:
    """Condition that never blocks, since everything runs on one thread."""

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, *error: object) -> None:
        """Do nothing."""

    def notify_all(self) -> None:
        """Do nothing: after each action the job checks which ranks can continue."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Return True."""
        return True

    def release(self) -> None:
        """Do nothing."""


Work = float | Wait
"""Next action of a training thread: compute for this number of seconds, or wait for a condition."""
HYPER: Hyper = [{"lr": 0.1}]


class Rank:
    """A simulated rank: the ``RankRuntime`` of its worker, and its training thread.

    Args:
        index: number of the rank.
        job: the simulated job.

    Attributes:
        worker: its optimizer's worker, of the family's own class.
        weights: of its model, shape (1,).
        steps: number of steps that it has taken.
        waited: seconds of waiting in its current step.
        until: condition that its training thread waits for; None if it computes or has ended.
        since: start of that wait, s.
        thread: its computations and waits.
        outbox: events that are sent at the end of the current action.
    """

    elastic = replaced = False
    failure: Exception | None = None

    def __init__(self, index: int, job: Job[Any]) -> None:
        self.rank, self.size, self._job = index, job.setup.ranks, job
        self.collectives = RankCollectives(index, self.size, job.plane)
        self.changed = Unlocked()
        self.clock = lambda: job.clock.now
        self.worker: Any = None
        self.weights: Vector = np.zeros(1)
        self.steps, self.waited, self.since = 0, 0.0, 0.0
        self.until: Callable[[], bool] | None = None
        self.thread: Iterator[Work] = iter(())
        self.outbox: list[Any] = []

    def check(self) -> None:
        """Do nothing: a simulated rank does not fail."""

    def participants(self) -> list[Any]:
        """Return its optimizer."""
        return [self.worker]

    def register(self, participant: Any, process_set: int = 0, number: int | None = None) -> int:
        """Return 0: there is one optimizer."""
        return 0

    def unregister(self, number: int) -> None:
        """Do nothing."""

    def call_soon(self, action: Callable[[], None]) -> None:
        """Run the action at once: the simulated engine takes no time."""
        action()

    def notify(self, action: Callable[[], None], hurry: bool = True) -> None:
        """Run it."""
        action()

    def wait(self, ready: Callable[[], bool], waiting_for: Callable[[], str] | None = None) -> None:
        """Refuse: the job runs programs."""
        raise RuntimeError("a simulated rank runs programs, it does not block")

    def drain(self, flush: bool = True, process_set: int | None = None, called_on: Any = None) -> None:
        """Refuse: the job runs programs."""
        raise RuntimeError("a simulated rank runs drain_program()")

    def send(self, event: Any) -> None:
        """Queue an event for the message that is sent at the end of this action."""
        if not self.outbox:
            self._job.senders.append(self)
        self.outbox.append(event)

    def turn(self) -> None:
        """Return None: the order is free."""

    def submit(
        self,
        start: Callable[[], Any],
        done: Callable[[Vector], None],
        group: Hashable = None,
        turn: int | None = None,
        usable: Callable[[Any], None] | None = None,
    ) -> None:
        """Submit this rank's part of a collective."""
        start().then = done


# -- the job -----------------------------------------------------------------------------------------------------------


W = TypeVar("W", bound=Worker)


class Job(abc.ABC, Generic[W]):
    """Job of one algorithm: production ranks and coordinator in simulated time.

    Args:
        arm: name of the arm.
        setup: the job to simulate.
        machine: state machine of the coordinator.
        sizes: bytes that ranks exchange.
        own_pace: whether each rank takes as many steps as it can.
    """

    def __init__(
        self, arm: str, setup: Setup, machine: StateMachine[Any], sizes: Sizes, own_pace: bool = False
    ) -> None:
        self.arm, self.setup, self.machine = arm, setup, machine
        self.clock = Clock()
        self.plane = DataPlane(self.clock, setup.network, setup.ranks, sizes, self._completed)
        self.coordinator = Coordinator(machine, self.clock, setup.network, self._deliver)
        self.senders: list[Rank] = []
        """Ranks with events that are sent at the end of the current action."""
        self.ranks = [Rank(index, self) for index in range(setup.ranks)]
        self.staleness: Counter[int] = Counter()
        self._own_pace = own_pace
        self._waiting: dict[int, Rank] = {}
        self._at_barrier: Counter[int] = Counter()
        self._total = self._ended = 0
        self._begun = 0.0
        self._stopped: float | None = None
        self._waited = 0.0
        for rank in self.ranks:
            rank.worker = self._worker(rank)
            rank.worker.register(["w"], [1], HYPER)
            (event,), rank.outbox, self.senders = rank.outbox, [], []
            self.coordinator.register(rank.rank, event)

    # -- the whole ----------------------------------------------------------------------------------------------

    def run(self, until: float = math.inf) -> Outcome | None:
        """Run the job to its end and return its figures; None if it has not ended by the time ``until``.

        Raises:
            RuntimeError: a deadlock: no rank can continue.
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
            stuck = [rank.rank for rank in self.ranks if rank.until is not None]
            raise RuntimeError(f"ranks {stuck[:9]} wait for {self.machine.blocked_on()}: no rank can continue")
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
            staleness=self._staleness(),
            wait_s=self._waited / count,
            sent_bytes=self.plane.sent * len(self.ranks) / count,
            collectives=self.plane.count,
            contributors=self._contributors(),
            produced=produced,
            applied=applied,
            coordinator_s=self.coordinator.cpu,
            drain_s=self.clock.now - self._stopped,
        )

    def _contributors(self) -> float | None:
        return None

    def _staleness(self) -> Counter[int]:
        """Return the histogram of the staleness of all gradients or messages."""
        found = Counter(self.staleness)
        for rank in self.ranks:
            found.update(rank.worker.stats().staleness)
        return found

    @abc.abstractmethod
    def _conserved(self) -> tuple[int, int]:
        """Return the numbers of produced and of applied gradients or messages."""

    # -- training threads ---------------------------------------------------------------------------------------

    def _train(self, rank: Rank) -> Iterator[Work]:
        while not self._has_finished(rank):
            if self.setup.barrier:
                step = rank.steps
                self._at_barrier[step] += 1
                if self._at_barrier[step] == len(self.ranks):
                    self._settle()
                yield Wait(lambda step=step: self._at_barrier[step] == len(self.ranks))  # type: ignore[misc]
                rank.waited = 0.0
            yield from self._step(rank, rank.worker)
            self._end_step(rank)
        if self.setup.drains:
            yield from rank.worker.drain_program()
        self._ended += 1

    @abc.abstractmethod
    def _worker(self, rank: Rank) -> W:
        """Return the worker of a rank, before it is registered."""

    @abc.abstractmethod
    def _step(self, rank: Rank, worker: W) -> Iterator[Work]:
        """Yield the actions of one step: compute, send, wait."""

    def _has_finished(self, rank: Rank) -> bool:
        return self._stopped is not None if self._own_pace else rank.steps >= self.setup.steps

    def _end_step(self, rank: Rank) -> None:
        rank.steps += 1
        waited, rank.waited = rank.waited, 0.0
        if self._stopped is not None:
            return  # the window is over for a rank at its own pace
        self._total += 1
        self._waited += waited
        if self._total == self.setup.untimed * len(self.ranks):
            self._begun = self.clock.now
        if self._total == self.setup.times.size and not (self._own_pace and self.setup.window is not None):
            self._stop()

    def _stop(self) -> None:
        self._stopped = self.clock.now

    def seconds_of(self, rank: Rank) -> float:
        """Return the seconds of computation of a rank's next step."""
        return float(self.setup.times[rank.steps % self.setup.steps, rank.rank])

    def _resume(self, rank: Rank) -> None:
        """Run a training thread until it computes, waits or ends."""
        if rank.until is not None:
            rank.waited += self.clock.now - rank.since
            rank.until = None
        for work in rank.thread:
            if isinstance(work, float):
                self.clock.after(work, self._resume, rank)
                break
            if not work.ready():
                rank.until, rank.since = work.ready, self.clock.now
                self._waiting[rank.rank] = rank
                break
        self._send()

    # -- engines ------------------------------------------------------------------------------------------------

    def _deliver(self, command: Command) -> None:
        """Deliver a command to all ranks."""
        for rank in self.machine.recipients(command):
            self.ranks[rank].worker.on_command(command)
        self._settle()

    def _completed(self, name: str, ranks: Sequence[int]) -> None:
        """Finish the action in which a collective of these ranks completes."""
        self._settle()

    def _settle(self) -> None:
        """End an action of the engines: send their events, and resume the threads whose wait is over."""
        self._send()
        for rank in [rank for rank in self._waiting.values() if rank.until is not None and rank.until()]:
            del self._waiting[rank.rank]
            self.clock.after(0.0, self._resume, rank)

    def _send(self) -> None:
        """Send the events of the ending action, one message per rank."""
        senders, self.senders = self.senders, []
        for rank in senders:
            events, rank.outbox = rank.outbox, []
            self.clock.after(self.setup.network.to_coordinator(), self.coordinator.receive, rank.rank, events)
