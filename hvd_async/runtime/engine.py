"""The engine: the one thread of a rank that touches Horovod and the control plane, whatever the training thread does.

A Horovod collective starts when every member has submitted it, so somebody must submit this rank's part while its
training thread computes or sleeps. The engine owns all state it works on; other threads post functions to it and wait
for results. It sleeps until a command, a post or the next time a collective may be done.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Protocol

from hvd_async.errors import CollectiveFailedError, EngineError, HvdAsyncError, RankLostError, WaitTimeoutError
from hvd_async.runtime import time_limits
from hvd_async.runtime.descriptors import release_connections
from hvd_async.runtime.interfaces import Channel, Collectives, Gone, Handle, Vector
from hvd_async.runtime.log import warn
from hvd_async.runtime.nested_calls import unfinished_until_it_returns
from hvd_async.runtime.protocol import (
    CallRoll,
    Close,
    Command,
    CommitsMade,
    CountCommits,
    Event,
    Failed,
    JobFailed,
    Leaving,
    NoSuchOptimizer,
    OptimizerCommand,
    Present,
    RankLost,
    RegisterOptimizer,
    StopAtCommit,
    Unregister,
    Welcome,
)

OPTIMIZERS = 1 << 16
"""Numbers that each process set has for its optimizers."""
UNHURRIED = 0.005
"""Seconds between two looks at collectives, at least, and for which a gradient may wait that leaves before its step,
while no thread waits for what these bring: whenever the engine wakes up, it competes with the training thread for the
interpreter lock. A thread that begins to wait wakes the engine."""
BEGINNING = (
    "others to begin: every rank of the job must wrap an optimizer, and step or drain it. Horovod's warnings name "
    "those that are missing, by hvd_async.rendezvous"
)


@dataclass(frozen=True, eq=False)
class _Flight:
    """A collective on its way; ``done`` takes its result. ``group`` is of ``submit``."""

    handle: Handle
    done: Callable[[Vector], None]
    group: Hashable


class Engine:
    """One a process; serves any number of optimizers. Start once; a stopped engine is replaced, not restarted.

    Args:
        collectives: the data plane.
        connect: makes the control plane's channel; called on the engine thread, may block and raise.
    """

    def __init__(self, collectives: Collectives, connect: Callable[[], Channel]) -> None:
        self.collectives = collectives
        self.rank, self.size = collectives.rank, collectives.size
        self.hosts: tuple[str, ...] = ()
        """Each rank's host, by its name; empty until the ranks have met, and in tests without hosts."""
        self.failure: Exception | None = None
        self.told = False
        """Whether a caller was told of the failure."""
        self.timeout = time_limits.timeout()
        """Opt-in limit (s) on every wait for other ranks."""
        self.elastic = False
        """Whether training goes on without ranks that are lost: gradients are kept until their round is there."""
        self.commits = Commits()
        """Of elastic training."""
        self._warn_after = time_limits.warn_after()
        self._connect = connect
        self._channel: Channel | None = None
        self.unhurried = UNHURRIED
        """0: the engine wakes up for each action."""
        self._posts: deque[Callable[[], None]] = deque()
        self._more_to_come = False
        """Whether a thread posts actions that may wait."""
        self._looks_at = 0.0
        """Until when (``time.monotonic``) a sleeping engine will have woken up by itself; 0 if it will not."""
        self._in_flight: list[_Flight] = []
        self._watched: list[Handle] = []
        """The last collective of each group in flight, and all that have stages; these determine when to look."""
        self._participants: dict[int, Participant] = {}
        self._opened: Counter[int] = Counter()
        self.asked: list[RegisterOptimizer] = []
        """Optimizers that other ranks have opened, and that this rank is asked for while it waits in a drain."""
        self.find: Callable[[RegisterOptimizer], Participant | None] = lambda _: None
        """Opens the optimizer of this process that is asked for, under its number; None if there is none."""
        self._lock = threading.Lock()
        self.changed = threading.Condition()
        """Held while what ``wait`` looks at changes, and notified then."""
        self._waits: dict[int, Callable[[], bool]] = {}
        """The condition that each thread waits for, by thread identifier; guarded by ``changed``."""
        self._stopping = self._stop_called = False
        self._leaving = self._closing = False
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"hvd_async-engine-{self.rank}", daemon=True)

    # -- any thread -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def unregister(self, number: int) -> None:
        """Forget an optimizer that never came to train."""
        with self._lock:
            self._participants.pop(number, None)

    @unfinished_until_it_returns
    def drain(self, flush: bool = True, process_set: int | None = None, leaving: bool = False) -> None:
        """Drain (or, without ``flush``, cut) every optimizer that has opened, or all of a process set (Horovod's id).

        Args:
            leaving: the process is ending: what a step would still have completed goes as it is, with a warning.
        """
        drain(self, self.in_process_set(process_set), flush, leaving)

    def in_process_set(self, process_set: int | None) -> list[Participant]:
        """Return the optimizers of a process set (Horovod's id) or, for None, all: in one order on all ranks."""
        numbered = sorted(self._participants.items())
        return [one for number, one in numbered if process_set in (None, number // OPTIMIZERS) and not one.deleted]

    def take_asked(self) -> list[Participant]:
        """Open the optimizers that other ranks have asked for, as far as this process has them; return these."""
        found: list[Participant] = []
        while self.asked:
            asked = self.asked.pop(0)
            if asked.optimizer in self._participants:
                continue
            participant = self.find(asked)
            if participant is None:
                self._count(asked.optimizer)
                self.call_soon(lambda number=asked.optimizer: self.send(NoSuchOptimizer(number)))  # type: ignore[misc]
            else:
                found.append(participant)
        return found

    def register(self, participant: Participant, process_set: int = 0, number: int | None = None) -> int:
        """Enter an optimizer; returns its number, the same on all ranks if they open those of a process set (its
        Horovod id, 0 for all ranks) in one order.

        Args:
            number: which it has on the ranks that asked for it.
        """
        with self._lock:
            if number is None:
                number = process_set * OPTIMIZERS + self._opened[process_set]
            self._count(number)
            self._participants[number] = participant
        return number

    def _count(self, number: int) -> None:
        process_set, place = divmod(number, OPTIMIZERS)
        self._opened[process_set] = max(self._opened[process_set], place + 1)

    def participants(self) -> list[Participant]:
        """All that are registered, in order."""
        return list(self._participants.values())

    def call_soon(self, action: Callable[[], None]) -> None:
        """Have the engine thread run ``action``, after all posted before it.

        Raises:
            the engine's failure, if it has failed.
        """
        self.check()
        self._posts.append(action)
        if self._channel is not None:
            self._channel.wake()

    def notify(self, action: Callable[[], None], hurry: bool = True) -> None:
        """Post an action, for nothing if the engine has ended. Takes no lock: a finalizer may call it.

        Args:
            hurry: wake the engine for it, even if it is about to wake up by itself.
        """
        self._posts.append(action)
        if not hurry:
            self._more_to_come = self.unhurried > 0
            if time.monotonic() < self._looks_at:
                return
        if self._channel is not None:
            self._channel.wake()

    @unfinished_until_it_returns
    def wait(self, ready: Callable[[], bool], waiting_for: Callable[[], str] | None = None) -> None:
        """Wait until ``ready()``; a failure of the engine ends the wait with its error.

        Args:
            ready: checked after every change that the engine makes; the lock of ``changed`` is held then.
            waiting_for: what a warning says is missing, where the coordinator does not know.

        Raises:
            WaitTimeoutError: the opt-in limit ran out. Otherwise the wait goes on as long as the engine lives:
                a slow rank is warned about by the coordinator, a lost one makes the engine fail.
        """
        self.check()  # (before the lock: in a forked child nobody may be there to release it)
        started = time.monotonic()
        warn_at = started + self._warn_after
        with self._waiting(ready):
            while not ready():
                self.check()
                if (self._channel is None or waiting_for is not None) and time.monotonic() > warn_at:
                    warn_at += self._warn_after
                    what = BEGINNING if self._channel is None or waiting_for is None else waiting_for()
                    warn(f"rank {self.rank} has waited {self._warn_after:.0f} s more for {what}. Waiting on.")
                left = started + self.timeout - time.monotonic()
                if left <= 0:
                    raise WaitTimeoutError(f"rank {self.rank} waited longer than HVD_ASYNC_TIMEOUT={self.timeout:g} s")
                self.changed.wait(min(1.0, left))

    @contextlib.contextmanager
    def _waiting(self, ready: Callable[[], bool]) -> Iterator[None]:
        """Hold ``changed`` while this thread waits; meanwhile the engine looks at collectives more often."""
        thread = threading.get_ident()
        with self.changed:
            try:
                self._waits[thread] = ready
                if self._in_flight:
                    self._wake()
                yield
            finally:
                self._waits.pop(thread, None)

    @property
    def stopped(self) -> bool:
        """Whether it has come to its end without a failure."""
        return self.failure is None and self._left.is_set()

    @property
    def replaced(self) -> bool:
        """Whether ``stop`` was called: optimizers are to meet again on a new one."""
        return self._stop_called

    clock = staticmethod(time.monotonic)
    """Return seconds from an arbitrary origin."""

    def check(self) -> None:
        """Raise the engine's failure, if it has failed; a lost rank as the framework's Horovod error."""
        failure = self.failure
        if failure is None and not self._left.is_set():
            return
        self.told = self.told or failure is not None
        if self.stopped:
            raise EngineError("the engine has been stopped: shutdown() was called, or every rank has left")
        if isinstance(failure, RankLostError | CollectiveFailedError):
            raise self.collectives.failure(str(failure)) from failure
        if isinstance(failure, HvdAsyncError | self.collectives.failure):
            raise failure
        if failure is not None:
            raise EngineError(f"the engine of rank {self.rank} failed: {failure}") from failure

    def leave(self, timeout: float = threading.TIMEOUT_MAX) -> None:
        """Stop when all ranks have come to this point, or after ``timeout`` s, or at once if the engine has failed.

        Until then the engine serves the ranks that go on, who wait for this one no more. (A rank that ends earlier
        would end Horovod for all; the coordinator warns of ranks that are slow to come.)
        """
        if self.failure is None:
            for participant in self.participants():
                participant.delete()
            self._posts.append(self._say_leaving)
            if self._channel is not None:
                self._channel.wake()
            self._left.wait(min(timeout, self.timeout))
        self.stop()

    def stop(self, error: str | None = None, timeout: float = 5.0) -> None:
        """Stop now; with ``error``, tell the other ranks that this one is ending on it."""
        if error is not None and self.failure is None:
            horovod = error.startswith(f"{self.collectives.failure.__name__}:")  # raised in the training thread
            self._posts.append(lambda: self.send(Failed(error, horovod)))
        self._stop_called = True
        self._posts.append(self._stop_now)
        if self._channel is not None:
            self._channel.wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def forked(self) -> None:
        """(In a forked child.) Be of no use, and let go of the connections."""
        self.failure = EngineError("this process was forked from a rank after training had begun: it has no engine")
        if self._channel is not None and self._channel.port is not None:
            release_connections(self._channel.port)

    # -- engine thread ----------------------------------------------------------------------------------------

    def send(self, event: Event) -> None:
        """Send an event to the coordinator (engine thread)."""
        assert self._channel is not None
        self._channel.send(event)

    def submit(self, start: Callable[[], Handle], done: Callable[[Vector], None], group: Hashable = None) -> None:
        """Start a collective and have ``done`` called with its result (engine thread).

        Args:
            group: equal for collectives whose results are of use only together. While a later one of them is under way
                the engine does not wake up for the earlier: each look costs more than what it looks at. (But for those
                with stages: ranks may have submitted a group in other orders, and each would look at another one.)
                None: of no group.
        """
        handle = start()
        self._in_flight.append(_Flight(handle, done, object() if group is None or handle.in_stages else group))
        self._watch()

    def _watch(self) -> None:
        self._watched = [*{flight.group: flight.handle for flight in self._in_flight}.values()]

    def _say_leaving(self) -> None:
        self._leaving = True
        self.send(Leaving())

    def _stop_now(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        try:
            self.collectives.start(self._wake)
            self._channel = self._connect()
            while not (self._stopping or (self._closing and not self._in_flight)):
                message = self._channel.receive(seconds := self._next_look())
                self._looks_at = 0.0  # (before it runs the posts: what comes later wakes it)
                if message is not None:
                    self._on_command(message)
                elif seconds and not self._posts and not any(handle.done() for handle in self._watched):
                    continue  # (nothing is done yet, as in most looks)
                self._run_posts()
                self._channel.flush()  # (before results that may take long to look at)
                self._complete_collectives()
        except Exception as error:  # noqa: BLE001  it comes home: raised in the caller's next call
            asked = self._channel if isinstance(error, self.collectives.failure) else None
            self._fail(error if asked is None else cause_of(error, asked))
        finally:
            self._left.set()
            if self._channel is not None:
                self._channel.close()
            self.collectives.stop()

    def _wake(self) -> None:
        if self._channel is not None:
            self._channel.wake()

    def _run_posts(self) -> None:
        while self._posts:
            self._posts.popleft()()

    def _next_look(self) -> float | None:
        """Return how many seconds the engine may sleep: until a collective may be done, or more posts are due that do
        not wake it; None if it will be woken."""
        seconds = self._next_collective()
        if self._more_to_come:
            self._more_to_come = False
            seconds = self.unhurried if seconds is None else min(seconds, self.unhurried)
        if seconds is not None and 0.0 < seconds <= self.unhurried:
            self._looks_at = time.monotonic() + seconds
        return 0.0 if self._posts else seconds  # (in this order: what was posted before has not seen ``_looks_at``)

    def _next_collective(self) -> float | None:
        """Return in how many seconds a collective may be done; None if each wakes the engine, or there is none."""
        seconds = [t for t in (handle.seconds_to_poll() for handle in self._watched) if t is not None]
        soonest = min(seconds, default=None)
        if soonest is None or soonest <= 0.0 or self._waits:
            return soonest
        return max(soonest, self.unhurried)

    def _complete_collectives(self) -> None:
        """Hand over the results of the collectives that are done."""
        landed = [flight for flight in self._in_flight if flight.handle.done()]
        if not landed:
            return
        self._in_flight = [flight for flight in self._in_flight if flight not in landed]
        self._watch()
        for flight in landed:
            flight.done(flight.handle.result())
        with self.changed:  # (a thread woken too early would take the interpreter lock for nothing)
            if any(ready() for ready in self._waits.values()):
                self.changed.notify_all()

    def _on_command(self, message: Command | Gone) -> None:
        match message:
            case Welcome():
                self._looks_at = 0.0  # (before it runs the posts: what comes later wakes it)
            case Close():
                self._closing = True  # (what was commanded before has to come to its end: all ranks are in it)
            case Gone() if self._leaving:
                self._stopping = True
            case RankLost() | JobFailed() | Gone():
                raise error_of(message)
            case CallRoll():
                self.send(Present())
            case CountCommits():
                with self.changed:
                    self.send(self.commits.answer())
            case StopAtCommit(commit):
                with self.changed:
                    self.commits.stop_at = commit
                    self.changed.notify_all()
            case RegisterOptimizer():
                if message.rank == self.rank:
                    with self.changed:
                        self.asked.append(message)
                        self.changed.notify_all()
            case Unregister(number):
                self.unregister(number)
            case _:
                participant = self._participants.get(message.optimizer)
                if participant is not None:  # (else it was refused)
                    participant.on_command(message)

    def _fail(self, error: Exception) -> None:
        self.failure = error
        told = isinstance(error, RankLostError | CollectiveFailedError | self.collectives.failure)
        if self._channel is not None and not told:
            self._channel.send(Failed(f"{type(error).__name__}: {error}"))
        with self.changed:
            self.changed.notify_all()


# -- drains ---------------------------------------------------------------------------------------------------


class Participant(Protocol):
    """What the engine needs of an optimizer: the interface of ``Worker``.

    Attributes:
        last_done: the rank that finished last in the last drain, -1 before there was one.
        deleted: whether the optimizer was deleted, and only serves the other ranks.
    """

    last_done: int
    deleted: bool

    def on_command(self, command: OptimizerCommand) -> None:
        """Carry out a command for this optimizer (engine thread)."""

    def delete(self) -> None:
        """Note that the optimizer was deleted (any thread)."""

    def check_finished(self, flush: bool) -> None:
        """Raise if this rank cannot finish now, with a drain (``flush``) or a cut (training thread)."""

    def announce_finished(self, flush: bool) -> None:
        """Announce that this rank has finished, to drain (``flush``) or to cut the optimizer (training thread)."""

    def apply_available(self) -> bool:
        """Apply what was received, without waiting; return whether that is all (training thread, as the rest)."""

    @property
    def has_available(self) -> bool:
        """Whether ``apply_available`` would do something, or has done all."""

    def complete_drain(self) -> None:
        """End the drain or cut, after all was received."""


def drain(engine: Engine, live: list[Participant], flush: bool, leaving: bool) -> None:
    """Drain (or, without ``flush``, cut) optimizers, and those that other ranks open meanwhile.

    A rank has finished with all of them or with none, and serves all at once. If it waited in the first one's drain for
    ranks that are busy with both, its second would keep those waiting, and pile up rounds.

    Args:
        engine: the engine that serves them.
        live: the optimizers, in the same order on all ranks, since ends communicate.
        flush: drain; else cut.
        leaving: whether the process is ending; then a gradient that a step would have completed is sent as it is, with
            a warning.
    """
    if not leaving:
        for participant in live:
            participant.check_finished(flush)
    for participant in live:
        participant.announce_finished(flush)
    left = list(live)

    def may_go_on() -> bool:
        return bool(engine.asked) or any(one.has_available or one.deleted for one in left)

    while True:
        found = engine.take_asked()
        for participant in found:
            participant.announce_finished(flush)
        live, left = live + found, left + found
        left = [participant for participant in left if not (participant.deleted or participant.apply_available())]
        if not (left or engine.asked):  # (a request precedes the end to which it belongs)
            break
        engine.wait(may_go_on)
    for participant in live:
        if not participant.deleted:
            participant.complete_drain()


# -- commits of elastic training ------------------------------------------------------------------------------


class Commits:
    """A rank's part in the choice of the commit at which all ranks stop, since hosts have come or gone.

    All ranks have to stop at the same commit: one that continued would call a collective of the user's that the others
    never reach. Horovod notifies rank 0 alone. Rank 0 notifies the coordinator, which asks every rank how many commits
    it has made, and names the one after the highest. No rank waits for it, but for a rank that has answered and comes
    to its next commit meanwhile.

    It lives as long as the engine. Its fields change while the engine's ``changed`` is held.

    Attributes:
        made: commits since the engine was started, which all ranks do at the same place of their program.
        stop_at: the number of the commit at which all ranks stop; None if it is not known.
    """

    def __init__(self) -> None:
        self.made = 0
        self.stop_at: int | None = None
        self._asked = False

    def answer(self) -> CommitsMade:
        """Return the answer to ``CountCommits`` (engine thread)."""
        self._asked = True
        return CommitsMade(self.made)

    def commit(self, engine: Engine) -> bool:
        """Count a commit; return whether all ranks stop at it.

        Args:
            engine: this rank's engine.
        """
        with engine.changed:
            self.made += 1
            asked = self._asked
        if asked:
            engine.wait(lambda: self.stop_at is not None, lambda: "all ranks to say how many commits they have made")
        return self.stop_at is not None and self.made >= self.stop_at


# -- why a job cannot go on -----------------------------------------------------------------------------------

CAUSE_WAIT = 10.0
"""Seconds that a rank waits for the cause, in addition to those after which a silent rank is declared lost."""


def error_of(message: RankLost | JobFailed | Gone) -> HvdAsyncError:
    """Return the error that a rank raises for this command, or for the end of its connection to the coordinator."""
    match message:
        case RankLost(rank, host, reason, context, handed_over):
            return RankLostError(rank, host, reason, context, handed_over)
        case JobFailed(problem):
            return CollectiveFailedError(problem)
        case Gone(reason, host):
            return RankLostError(0, host, reason)


def cause_of(error: Exception, channel: Channel) -> Exception:
    """Let the coordinator find out which rank is lost: Horovod reports that a collective has failed, and not why.

    Args:
        error: Horovod's error.
        channel: the channel to the coordinator.

    Returns:
        The error to raise: Horovod's own, if no rank is known to be lost.
    """
    channel.send(Failed(f"{type(error).__name__}: {error}", horovod=True))
    deadline = time.monotonic() + time_limits.dead_after() + CAUSE_WAIT
    while (left := deadline - time.monotonic()) > 0:
        match channel.receive(left):
            case JobFailed():
                return error
            case RankLost() | Gone() as message:
                return error_of(message)
    return error
