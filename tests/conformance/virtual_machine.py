"""Virtual time: prices of what a rank's threads do, their clocks, and the streams of its GPU.

Each thread is a real one with a clock of its own. Only one runs at a time: at each ``pause`` it is the one whose clock
is lowest. So every run takes the same course, and no result depends on the time of the machine. Times are in
milliseconds, prices in microseconds.

A stream is a queue that is worked off as far as it is known: a collective that another rank has not joined yet has no
time, nor has anything behind it. A thread that waits for such an event pauses until it is known.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

# -- prices ------------------------------------------------------------------------------------------------------------


class Price(NamedTuple):
    """Prices on the host of an H100, in microseconds unless stated otherwise.

    "Recorded": measured on an H100 (scripts/benchmarks/figures.md). "Fitted": chosen by hand so that modes have about
    the ratios recorded there with one rank. "Estimate": the order of magnitude that microbenchmarks on other machines
    give, never fitted. "Assumption": nothing supports the number but its plausibility.
    """

    python: float = 0.60
    """A Python call, with the attribute reads and loops until the next one. Fitted."""
    c: float = 0.40
    """A C call. Fitted."""
    aten: float = 7.0
    """An operator that launches a kernel: binding, dispatcher and launch. Estimate."""
    tensor: float = 0.35
    """Each tensor of a ``_foreach_`` operator, more. Estimate."""
    hook: float = 4.0
    """To enter Python from autograd: the interpreter lock, the tensor's wrapper. Fitted."""
    record: float = 4.0
    """To record an event. Estimate."""
    follow: float = 3.0
    """To let a stream wait for an event. Estimate."""
    copy: float = 12.0
    """To start a copy to the host. Estimate."""
    submit: float = 45.0
    """To start a collective of a process group. Estimate."""
    take: float = 12.0
    """To let a stream wait for a collective. Estimate."""
    sync: float = 25.0
    """To notice that the device has done what a thread waits for, after it has. Estimate."""
    block: float = 60.0
    """From an event until a thread that sleeps on it in the driver runs (cudaEventBlockingSync). Estimate."""
    wake: float = 90.0
    """From a notification until the other thread runs. Estimate."""
    glance: float = 40.0
    """The engine wakes up, polls its collectives and finds nothing done. Assumption."""
    look: float = 250.0
    """The engine wakes up and finds work: its loop, polls and messages, without the work. Fitted."""
    trip: float = 700.0
    """To the coordinator's process and back, its work included. Fitted."""
    collective: float = 30.0
    """A collective on the device, once all ranks have joined it: one rank's kernel. Assumption."""
    transfer: float = 500.0
    """More for a collective of several ranks: 25 MB between two GPUs at 50 GB/s. Assumption."""
    lock: float = 1.5
    """Share of the engine's time that the training thread loses, as it waits for the interpreter lock. Fitted."""
    forward_host: float = 12.4
    """Milliseconds to launch the model's forward pass. Fitted: it sets the ratio of ``sgp``."""
    backward_host: float = 14.0
    """Milliseconds to launch its backward pass. Recorded."""
    forward_device: float = 11.0
    """Milliseconds that the device needs for the forward pass. Their sum with the backward pass is about what was
    recorded for a step, 33; how it is split is an assumption."""
    backward_device: float = 22.4
    """Milliseconds for the backward pass."""
    kernels: float = 960
    """Kernels of the model in a step. Estimate."""


PRICE_SETS = {
    "fitted": Price(),
    "lock": Price(python=0.3, c=0.2, hook=3.0, lock=2.6, look=170.0, forward_host=12.6),
    "backward": Price(backward_host=16.0, lock=0.9),
    "python": Price(python=1.0, c=0.7, hook=8.0, lock=1.0, forward_host=11.8),
}
"""Prices that give about the recorded ratios: the first fit, a dearer lock, a slower backward pass, dearer Python. With
one rank all come within 0.03 of what was recorded, except ``solo``, which they predict 0.03 to 0.05 too fast. What
holds under one set only is no prediction."""
DEPTH = 1000
"""Kernels that may wait in a stream; a further launch waits. CUDA's is 1024."""
LIMIT = 60_000.0
"""Milliseconds of virtual time after which a run has failed: nothing comes that a thread waits for."""
PATIENCE = 120.0
"""Seconds of real time that a thread may run until another one's turn comes, before the run fails."""

# -- threads -----------------------------------------------------------------------------------------------------------


class Actor:
    """A thread in virtual time.

    Args:
        name: "T", "E", "W" or "C": training, engine, watcher or coordinator, and the rank.
        machine: of its rank; None for the coordinator.

    Attributes:
        clock: its time.
        counts, spent: number of events, and milliseconds, by what.
        current: the stream that its kernels go to.
        landed: whether the engine has taken a collective's result since it last slept.
        charged: whether its calls and operators cost time.
        waited: milliseconds for which it has waited for conditions.
    """

    def __init__(self, name: str, machine: Machine | None) -> None:
        self.name, self.machine = name, machine
        self.clock = 0.0
        self.counts: Counter[str] = Counter()
        self.spent: defaultdict[str, float] = defaultdict(float)
        self.current = machine.stream("training") if machine is not None else None
        self.landed = self.charged = False
        self.waited = 0.0
        self.baton = threading.Semaphore(0)
        self.ready: Callable[[], float | None] = lambda: 0.0
        """Returns the time at which it may continue; None if that is not known yet."""
        self._asleep: deque[tuple[float, float]] = deque(maxlen=8)

    def host(self, us: float, what: str) -> None:
        """Work. If the thread is an engine, its training thread loses the interpreter lock, unless it sleeps."""
        assert self.machine is not None
        ms = us / 1e3
        training = self.machine.training
        if self is not training and training is not None and not training.sleeps(self.clock):
            lost = self.machine.price.lock * ms
            training.clock += lost
            training.spent["lock"] += lost
        self.clock += ms
        self.spent[what] += ms

    def sleeps(self, when: float) -> bool:
        """Return whether it waits for something at that time."""
        return any(start <= when < end for start, end in self._asleep)

    def slept(self, since: float, what: str) -> None:
        """Note a wait that has just ended; count it if it took time."""
        self.spent[what] += self.clock - since
        self.counts[what] += self.clock > since

    def begin_sleep(self) -> None:
        """Note that it waits from now on."""
        self._asleep.append((self.clock, LIMIT))

    def end_sleep(self) -> None:
        """Note that the wait has ended."""
        start, _ = self._asleep.pop()
        self._asleep.append((start, self.clock))


class World:
    """The threads of all ranks and of the coordinator.

    Args:
        names: of the threads, in the order in which they run at the same time.

    Attributes:
        over: whether the run has ended: a thread that pauses then gets a ``SystemExit``.
        failure: the first error of a training thread.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names, self._actors = list(names), dict[str, Actor]()
        self._local = threading.local()
        self._entered = threading.Condition()
        self.over = False
        self.failure: BaseException | None = None

    @property
    def me(self) -> Actor:
        """The calling thread."""
        actor: Actor = self._local.actor
        return actor

    @property
    def found(self) -> Actor | None:
        """The calling thread, None if it has not entered."""
        return getattr(self._local, "actor", None)

    def actor(self, name: str) -> Actor | None:
        """Return a thread that has entered."""
        return self._actors.get(name)

    def seconds(self) -> float:
        """Return the calling thread's time in seconds, as ``time.monotonic``."""
        actor = self.found
        return 0.0 if actor is None else actor.clock / 1e3

    def enter(self, name: str, machine: Machine | None = None) -> Actor:
        """Make the calling thread one of the world's; return when it is its turn."""
        actor = self._local.actor = Actor(name, machine)
        with self._entered:
            self._actors[name] = actor
            self._entered.notify_all()
        self._await_turn(actor)
        return actor

    def run(self) -> None:
        """Let the threads begin once all have entered."""
        with self._entered:
            if not self._entered.wait_for(lambda: len(self._actors) == len(self._names), PATIENCE):
                raise TimeoutError(f"of {self._names} only {list(self._actors)} have begun")
        self._actors = {name: self._actors[name] for name in self._names}
        self._actors[self._names[0]].baton.release()

    def pause(self, actor: Actor, ready: Callable[[], float | None]) -> None:
        """Let the other threads run until it is this one's turn; ``ready`` returns the time from which it may run."""
        actor.ready = ready
        following = self._following()
        if following is not actor:
            following.baton.release()
            self._await_turn(actor)
        when = ready()
        assert when is not None
        actor.clock = max(actor.clock, when)

    def breathe(self, actor: Actor) -> None:
        """Let the others run up to this thread's time. Call it where the thread holds no lock."""
        self.pause(actor, lambda: actor.clock)

    def leave(self, actor: Actor) -> None:
        """End the calling thread's part."""
        actor.ready = lambda: None
        if not self.over:
            self._following().baton.release()

    def end(self, failure: BaseException | None = None) -> None:
        """End the run."""
        self.failure, self.over = self.failure or failure, True
        for actor in self._actors.values():
            actor.baton.release()

    def _following(self) -> Actor:
        if self.over:
            raise SystemExit
        times = [(when, place) for place, a in enumerate(self._actors.values()) if (when := a.ready()) is not None]
        when, place = min(times, default=(LIMIT, 0))
        if when >= LIMIT:
            clocks = {name: round(actor.clock, 3) for name, actor in self._actors.items()}
            raise RuntimeError(f"no thread can continue, or none gets anywhere: {clocks}")
        return list(self._actors.values())[place]

    def _await_turn(self, actor: Actor) -> None:
        if not actor.baton.acquire(timeout=PATIENCE):
            raise TimeoutError(f"{actor.name} had no turn: does another thread wait while it holds a lock?")
        if self.over:
            raise SystemExit


class Waiting:
    """A condition in virtual time, instead of ``Engine.changed``. No thread pauses while it holds it.

    Attributes:
        landed: whether the last notification followed the completion of a collective.
    """

    def __init__(self, world: World, price: Price) -> None:
        self._world, self._price = world, price
        self._notified: dict[Actor, float | None] = {}
        self.landed = False

    def __enter__(self) -> None:
        """Do nothing: no other thread runs."""

    def __exit__(self, *error: object) -> None:
        """Do nothing."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Return True."""
        return True

    def release(self) -> None:
        """Do nothing."""

    def notify_all(self) -> None:
        """Wake the threads that wait."""
        me = self._world.found
        if me is None or self._world.over:
            return
        for actor, when in self._notified.items():
            if when is None:
                self._notified[actor], self.landed = me.clock + self._price.wake / 1e3, me.landed

    def wait(self, timeout: float) -> None:
        """Sleep until notified."""
        me = self._world.me
        since, deadline = me.clock, me.clock + timeout * 1e3
        self._notified[me] = None
        me.begin_sleep()
        self._world.pause(me, lambda: deadline if self._notified[me] is None else self._notified[me])
        me.end_sleep()
        me.waited += me.clock - since
        del self._notified[me]


# -- the device --------------------------------------------------------------------------------------------------------


class Event:
    """An event of a stream.

    Attributes:
        when: its time; None while it is not known.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.when: float | None = None

    def known(self) -> float | None:
        """Return its time if it can be known by now."""
        if self.when is None:
            self._stream.advance()
        return self.when

    def query(self) -> bool:
        """Return whether the device has passed it at the calling thread's time."""
        when = self.known()
        return when is not None and when <= self._stream.machine.world.me.clock

    def synchronize(self) -> None:
        """Let the calling thread wait for it."""
        self._stream.machine.await_event(self, "device: event")


class _Work(ABC):
    """Next operation of a stream."""

    @abstractmethod
    def run(self, stream: Stream) -> bool:
        """Advance the stream's time, or return False: it is not known yet."""


class _Kernels(_Work):
    def __init__(self, at: Sequence[float], ms: float, phase: str) -> None:
        self._at, self._ms, self._phase = at, ms, phase

    def run(self, stream: Stream) -> bool:
        for at in self._at:
            start = max(stream.end, at)
            stream.idle[self._phase] += start - stream.end
            stream.starts.append(start)
            stream.end = start + self._ms
        return True


class _Record(_Work):
    def __init__(self, event: Event) -> None:
        self._event = event

    def run(self, stream: Stream) -> bool:
        self._event.when = stream.end
        return True


class _Wait(_Work):
    def __init__(self, event: Event) -> None:
        self._event = event

    def run(self, stream: Stream) -> bool:
        when = self._event.known()
        if when is None:
            return False
        stream.end = max(stream.end, when)
        return True


class Meeting:
    """A collective on the device: it begins when all ranks' streams have reached it.

    Args:
        members: its ranks.
        ms: how long it then takes.
    """

    def __init__(self, members: Collection[int], ms: float) -> None:
        self._members, self._ms = frozenset(members), ms
        self.streams: dict[int, Stream] = {}
        self.begun: dict[int, float] = {}

    def ends(self) -> float | None:
        """Return the time at which it ends; None if it is not known yet."""
        for rank, stream in self.streams.items():
            if rank not in self.begun:
                stream.advance()
        return max(self.begun.values()) + self._ms if self.begun.keys() == self._members else None


class _Meet(_Work):
    def __init__(self, meeting: Meeting, at: float) -> None:
        self._meeting, self._at = meeting, at

    def run(self, stream: Stream) -> bool:
        self._meeting.begun.setdefault(stream.machine.rank, max(stream.end, self._at))
        ends = self._meeting.ends()
        if ends is None:
            return False
        stream.end = ends
        return True


class Stream:
    """A stream of a rank's GPU, with the methods of ``torch.cuda.Stream`` that the library uses.

    Attributes:
        end: the time at which what is known of its work ends.
        starts: when each of the last kernels began.
        idle: milliseconds without work, by phase.
    """

    device = torch.device("cpu")

    def __init__(self, machine: Machine, name: str) -> None:
        self.machine, self.name = machine, name
        self.end = 0.0
        self.starts: deque[float] = deque()
        self.idle: defaultdict[str, float] = defaultdict(float)
        self._queue: deque[_Work] = deque()
        self._queued = 0
        """Kernels that are in ``starts`` or will be."""
        self._advances = False

    def push(self, work: _Work) -> None:
        """Queue work."""
        self._queue.append(work)

    def advance(self) -> None:
        """Work off what is known."""
        if self._advances:  # (by way of another stream)
            return
        self._advances = True
        while self._queue and self._queue[0].run(self):
            self._queue.popleft()
        self._advances = False

    def launch(self, actor: Actor, ms: float, count: int = 1, host: float = 0.0, what: str = "") -> None:
        """Queue kernels, each of ``ms / count``; ``host`` us of the thread's time go before each."""
        launched = []
        for _ in range(count):
            if host:
                actor.host(host, what)
            if self._queued >= DEPTH:
                self._make_room(actor)
            self._queued += 1
            launched.append(actor.clock)
        actor.counts["kernels"] += count
        self.push(_Kernels(launched, ms / count, self.machine.phase))

    def _make_room(self, actor: Actor) -> None:
        self.advance()
        if not self.starts:

            def begun() -> float | None:
                self.advance()
                return self.starts[0] if self.starts else None

            self.machine.world.pause(actor, begun)
        since = actor.clock
        actor.clock = max(actor.clock, self.starts.popleft())
        actor.spent["queue is full"] += actor.clock - since
        self._queued -= 1

    def mark(self) -> Event:
        """Return an event after the work queued so far, at no cost."""
        event = Event(self)
        self.push(_Record(event))
        return event

    def meet(self, meeting: Meeting, after: Stream, at: float) -> Event:
        """Queue this rank's part of a collective that was submitted ``at`` a time; return its end."""
        meeting.streams[self.machine.rank] = self
        self.push(_Wait(after.mark()))
        self.push(_Meet(meeting, at))
        return self.mark()

    def record_event(self) -> Event:
        """See ``torch.cuda.Stream``."""
        self.machine.world.me.host(self.machine.price.record, "events")
        return self.mark()

    def wait_event(self, event: Event) -> None:
        """See ``torch.cuda.Stream``."""
        self.machine.world.me.host(self.machine.price.follow, "events")
        self.push(_Wait(event))

    def wait_stream(self, other: Stream) -> None:
        """See ``torch.cuda.Stream``."""
        self.wait_event(other.record_event())


class Machine:
    """A rank's GPU, and what its threads pay.

    Args:
        world: its threads.
        rank: its number.
        price: of everything.

    Attributes:
        training: its training thread, once it has begun.
        phase: of its step; idle times of the device are counted by it.
        metered: whether calls and operators cost time.
        watched: for the rank's watcher, when it got each event, the event and what follows.
    """

    def __init__(self, world: World, rank: int, price: Price) -> None:
        self.world, self.rank, self.price = world, rank, price
        self.training: Actor | None = None
        self.phase, self.metered = "step", False
        self.watched: deque[tuple[float, Event, Callable[[], None]]] = deque()
        self._streams: dict[str, Stream] = {}

    def stream(self, name: str) -> Stream:
        """Return a stream: "training", "engine" or "nccl"."""
        if name not in self._streams:
            self._streams[name] = Stream(self, name)
        return self._streams[name]

    def await_event(self, event: Event, what: str) -> None:
        """Let the calling thread wait for an event, if it is not done yet."""
        actor, sync = self.world.me, self.price.sync / 1e3
        since = actor.clock
        when = event.known()
        if when is not None and when <= since:
            return

        def seen() -> float | None:
            known = event.known()
            return None if known is None else known + sync

        actor.begin_sleep()
        self.world.pause(actor, seen)
        actor.end_sleep()
        actor.slept(since, what)

    def await_stream(self, what: str) -> None:
        """Let the calling thread wait for its current stream."""
        stream = self.world.me.current
        assert stream is not None
        self.await_event(stream.mark(), what)


@contextmanager
def on_stream(actor: Actor, stream: Stream) -> Iterator[None]:
    """Send a thread's kernels to a stream inside the context."""
    before, actor.current = actor.current, stream
    try:
        yield
    finally:
        actor.current = before
