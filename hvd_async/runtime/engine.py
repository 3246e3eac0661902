"""The engine: the only thread of a rank that uses Horovod and the control plane, whatever the training thread does.

A Horovod collective starts when every member has submitted it. The engine submits this rank's part while the training
thread computes or sleeps. It owns all state it works on; other threads post functions to it and wait for results. It
sleeps until a command, a post or the next time at which a collective may be done.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

from hvd_async.errors import CollectiveFailedError, EngineError, HvdAsyncError, RankLostError, WaitTimeoutError
from hvd_async.runtime import time_limits
from hvd_async.runtime.descriptors import release_connections
from hvd_async.runtime.interfaces import Channel, Collectives, Gone, Handle, Take, Vector
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
    Present,
    RankLost,
    RegisterOptimizer,
    StopAtCommit,
    Unregister,
    Welcome,
)
from hvd_async.runtime.worker import Worker

OPTIMIZERS = 1 << 16
"""Number of optimizer numbers per process set."""
UNHURRIED = 0.005
"""Minimum seconds between two polls of collectives while no thread waits for their results; also the longest wait of a
gradient that is handed over before its step. Each time the engine wakes up, it competes with the training thread for
the interpreter lock. A thread that begins to wait wakes the engine."""
GATHERS = 0.003
"""Seconds for which a sleeping engine, if its collectives have an order (NCCL), lets others join an action that may
wait: the first buckets leave close together, while the device waits for the host."""
IN_GRAPH = "node hvd_async/hvd_async."
"""Part of TensorFlow's error after a failure of Horovod in one of this library's collectives in a training graph."""
BEGINNING = (
    "others to begin: every rank of the job must wrap an optimizer, and step or drain it. The output of the "
    "missing ranks says why they have not"
)


@dataclass(frozen=True, eq=False)
class _Flight:
    """Collective in flight. ``done`` is called with its result; for ``group``, see ``Engine.submit``. ``is_used``: its
    result is used already, so that nothing waits for its completion but counts and ends."""

    handle: Handle
    done: Callable[[Vector], None]
    group: Hashable
    is_used: bool


class CollectiveOrder:
    """Starts collectives in the order of the coordinator's commands, which is the same on all ranks.

    Each collective gets its turn when its command arrives. If it has to wait, for a message that is not queued yet or
    because its name is in use, all later ones wait too.
    """

    def __init__(self) -> None:
        self._free = self._next = 0
        self._starts: dict[int, Callable[[], None]] = {}

    def turn(self) -> int:
        """Reserve the next turn."""
        self._free += 1
        return self._free - 1

    def start(self, turn: int | None, start: Callable[[], None]) -> None:
        """Call ``start`` when it is its turn; None: the next one."""
        self._starts[self.turn() if turn is None else turn] = start
        while self._next in self._starts:
            self._starts.pop(self._next)()
            self._next += 1


class Engine:
    """Engine of a process, for any number of optimizers. Start it once; a stopped engine is replaced, not restarted.

    Args:
        collectives: the data plane.
        connect: returns the channel of the control plane; called on the engine thread, may block and raise.
    """

    def __init__(self, collectives: Collectives, connect: Callable[[], Channel]) -> None:
        self.collectives = collectives
        self.rank, self.size = collectives.rank, collectives.size
        self.hosts: tuple[str, ...] = ()
        """Name of each rank's host; empty before the rendezvous, and in tests without hosts."""
        self.failure: Exception | None = None
        self.failure_was_raised = False
        """Whether the failure was raised in a caller."""
        self.timeout = time_limits.timeout()
        """Opt-in limit (s) of every wait for other ranks."""
        self.elastic = False
        """Whether training continues without lost ranks: gradients are then kept until their round has arrived."""
        self.commits = Commits()
        """The commits of elastic training."""
        self._warn_after = time_limits.warn_after()
        self._connect = connect
        self._channel: Channel | None = None
        self.unhurried = UNHURRIED
        """``UNHURRIED``, or 0: the engine wakes up for each action."""
        self._posts: deque[Callable[[], None]] = deque()
        self._more_to_come = self._hurried = False
        """Whether an action was posted that may wait, or one that may not."""
        self._looks_at = 0.0
        """The time (``time.monotonic``) by which a sleeping engine wakes up without a post; 0 if it does not."""
        self._in_flight: list[_Flight] = []
        self._order = CollectiveOrder() if collectives.in_order else None
        self._watched: list[Handle] = []
        """The collectives to be polled: the last one of each group in flight, and all that have stages."""
        self._participants: dict[int, Worker] = {}
        self._opened: Counter[int] = Counter()
        self.asked: list[RegisterOptimizer] = []
        """Optimizers that other ranks have registered, and that this rank has to register while it waits in a drain."""
        self.find: Callable[[RegisterOptimizer], Worker | None] = lambda _: None
        """Registers the requested optimizer of this process, with the given number; None if there is none."""
        self._ended_on: Worker | None = None
        """The optimizer on which the last drain or cut was called."""
        self._lock = threading.Lock()
        self.changed = threading.Condition()
        """Held while state changes that ``wait`` checks, and notified afterwards."""
        self._waits: dict[int, Callable[[], bool]] = {}
        """The condition that each thread waits for, by thread identifier; guarded by ``changed``."""
        self._stopping = self._stop_called = False
        self._leaving = self._closing = False
        self._left, self._has_left = threading.Event(), False  # (the second is quicker to look at, in each hook)
        self._thread = threading.Thread(target=self._run, name=f"hvd_async-engine-{self.rank}", daemon=True)

    # -- any thread -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def unregister(self, number: int) -> None:
        """Forget an optimizer that never started to train."""
        with self._lock:
            self._participants.pop(number, None)

    @unfinished_until_it_returns
    def drain(
        self,
        flush: bool = True,
        process_set: int | None = None,
        called_on: Worker | None = None,
        leaving: bool = False,
    ) -> None:
        """Drain (or, without ``flush``, cut) all registered optimizers, or those of a process set, including any that
        other ranks register meanwhile.

        A rank finishes with all of them at once. If it waited in the drain of the first one for ranks that use both,
        these ranks would wait for its part in the second one, whose rounds would accumulate.

        Args:
            flush: True to drain, False to cut.
            process_set: Horovod's id of the process set; None for all.
            called_on: the optimizer whose method was called; None if all were ended at once.
            leaving: whether the process is ending. A gradient that a step would still have completed is then sent as it
                is, with a warning.
        """
        if called_on is not None and self._ended_on is not None:
            called_on.check_drain_after(self._ended_on)
        numbered = sorted(self._participants.items())  # (in the same order on all ranks, since ends communicate)
        live = [one for number, one in numbered if process_set in (None, number // OPTIMIZERS) and not one.deleted]
        if not leaving:
            for participant in live:
                participant.check_finished(flush)
        for participant in live:
            participant.announce_finished(flush)
        left = list(live)

        def may_continue() -> bool:
            return bool(self.asked) or any(one.has_available or one.deleted for one in left)

        while True:
            found = self.take_asked()
            for participant in found:
                participant.announce_finished(flush)
            live, left = live + found, left + found
            left = [participant for participant in left if not (participant.deleted or participant.apply_available())]
            if not (left or self.asked):  # (a request arrives before the end to which it belongs)
                break
            self.wait(may_continue)
        for participant in live:
            if not participant.deleted:
                participant.complete_drain()
        self._ended_on = called_on

    def take_asked(self) -> list[Worker]:
        """Register the optimizers that other ranks have requested, if this process has them; return these."""
        found: list[Worker] = []
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

    def gather(self, payload: bytes, name: str) -> list[bytes]:
        """Return the payloads of all ranks, which call this; after the rendezvous, so that a data plane that matches
        calls by their order takes neither for the other."""
        self.wait(lambda: self._channel is not None)
        return self.collectives.allgather_bytes(payload, name)

    def register(self, participant: Worker, process_set: int = 0, number: int | None = None) -> int:
        """Register an optimizer and return its number.

        The number is the same on all ranks if they register the optimizers of each process set in the same order.

        Args:
            participant: the optimizer.
            process_set: Horovod's id of its process set, 0 for all ranks.
            number: its number on the ranks that have requested it; None to assign one.
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

    def participants(self) -> list[Worker]:
        """Return all registered optimizers, in order."""
        return list(self._participants.values())

    def call_soon(self, action: Callable[[], None]) -> None:
        """Run ``action`` on the engine thread, after all actions posted before it.

        Raises:
            the failure of the engine, if it has failed.
        """
        self.check()
        self._posts.append(action)
        self._wake()

    def notify(self, action: Callable[[], None], hurry: bool = True) -> None:
        """Post an action, which is dropped if the engine has ended. Takes no lock: a finalizer may call it.

        Args:
            hurry: wake the engine for it, even if the engine is about to wake up anyway.
        """
        self._posts.append(action)
        if hurry:
            self._hurried = True
        else:
            self._more_to_come = self.unhurried > 0
            if time.monotonic() < self._looks_at:
                return
        if self._channel is not None:
            self._channel.wake()

    @unfinished_until_it_returns
    def wait(self, ready: Callable[[], bool], waiting_for: Callable[[], str] | None = None) -> None:
        """Wait until ``ready()`` is true; a failure of the engine ends the wait with its error.

        Args:
            ready: checked after every change that the engine makes, while ``changed`` is held.
            waiting_for: returns what is missing, for a warning; None if the coordinator knows.

        Raises:
            WaitTimeoutError: the opt-in limit has passed. Without it the wait continues as long as the engine lives:
                the coordinator warns about a slow rank, and a lost rank makes the engine fail.
        """
        self.check()  # (before the lock: in a forked child, its holder may not exist)
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
        """Hold ``changed`` while this thread waits; meanwhile the engine polls collectives more often."""
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
        """Whether it has ended without a failure."""
        return self.failure is None and self._has_left

    @property
    def replaced(self) -> bool:
        """Whether ``stop`` was called: optimizers register again on a new engine."""
        return self._stop_called

    clock = staticmethod(time.monotonic)
    """Return seconds from an arbitrary origin."""

    def check(self) -> None:
        """Raise the failure of the engine, if it has failed; a lost rank as the Horovod error of the framework."""
        failure = self.failure
        if failure is None and not self._has_left:
            return
        self.failure_was_raised = self.failure_was_raised or failure is not None
        if self.stopped:
            raise EngineError("the engine has been stopped: shutdown() was called, or every rank has left")
        if isinstance(failure, RankLostError | CollectiveFailedError):
            raise self.collectives.failure(str(failure)) from failure
        if isinstance(failure, HvdAsyncError | self.collectives.failure):
            raise failure
        if failure is not None:
            raise EngineError(f"the engine of rank {self.rank} failed: {failure}") from failure

    def leave(self, timeout: float = threading.TIMEOUT_MAX) -> None:
        """Stop when all ranks have called this, or after ``timeout`` seconds, or at once if the engine has failed.

        Until then the engine serves the ranks that continue, which no longer wait for this one. (A rank that ended
        earlier would end Horovod for all ranks. The coordinator warns about ranks that are late.)
        """
        if self.failure is None:
            for participant in self.participants():
                participant.delete()
            self._posts.append(self._report_leaving)
            self._wake()
            self._left.wait(min(timeout, self.timeout))
        self.stop()

    def stop(self, error: str | None = None, timeout: float = 5.0) -> None:
        """Stop now.

        Args:
            error: the error on which this rank ends, which is reported to the other ranks; None if there is none.
            timeout: seconds to wait for the thread.
        """
        if error is not None and self.failure is None:
            # (raised in the training thread, or by a collective of its graph)
            horovod = error.startswith(f"{self.collectives.failure.__name__}:") or IN_GRAPH in error
            self._posts.append(lambda: self.send(Failed(error, horovod)))
        self._stop_called = True
        self._posts.append(self._stop_now)
        self._wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def forked(self) -> None:
        """Disable the engine in a forked child, and close its copies of the connections."""
        self.failure = EngineError("this process was forked from a rank after training had begun: it has no engine")
        if self._channel is not None and self._channel.port is not None:
            release_connections(self._channel.port)

    # -- engine thread ----------------------------------------------------------------------------------------

    def send(self, event: Event) -> None:
        """Send an event to the coordinator (engine thread)."""
        assert self._channel is not None
        self._channel.send(event)

    def turn(self) -> int | None:
        """Reserve the next turn, see ``RankRuntime.turn`` (engine thread)."""
        return None if self._order is None else self._order.turn()

    def submit(
        self,
        start: Callable[[], Handle],
        done: Callable[[Vector], None],
        group: Hashable = None,
        turn: int | None = None,
        usable: Callable[[Take], None] | None = None,
    ) -> None:
        """Start a collective; ``done`` will be called with its result (engine thread).

        Args:
            start: starts the collective; called later if it has to wait for its turn.
            done: takes the result.
            group: equal for collectives whose results are only useful together; None for a separate one. While a later
                one of a group is in flight, the engine does not wake up for the earlier ones, since polling costs more
                than it gains. Collectives with stages are always polled: ranks may have submitted a group in different
                orders, and would poll different ones.
            turn: its turn, if one was reserved.
            usable: called with its handle's ``take`` once it is submitted, if there is one.
        """
        if self._order is None:
            self._begin(start, done, group, usable)
        else:
            self._order.start(turn, lambda: self._begin(start, done, group, usable))

    def _begin(
        self,
        start: Callable[[], Handle],
        done: Callable[[Vector], None],
        group: Hashable,
        usable: Callable[[Take], None] | None,
    ) -> None:
        handle = start()
        group = object() if group is None or handle.in_stages else group
        is_used = usable is not None and handle.take is not None
        self._in_flight.append(_Flight(handle, done, group, is_used))
        if usable is not None and handle.take is not None:
            usable(handle.take)

    def _report_leaving(self) -> None:
        self._leaving = True
        self.send(Leaving())

    def _stop_now(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        try:
            self.collectives.start(self._wake)
            self._channel = self._connect()
            with self.changed:
                self.changed.notify_all()
            while not (self._stopping or (self._closing and not self._in_flight)):
                message = self._channel.receive(seconds := self._next_look())
                may_gather = self._more_to_come and not self._hurried and self._order is not None
                if message is None and seconds is None and may_gather:
                    self._looks_at = time.monotonic() + GATHERS
                    message = self._channel.receive(GATHERS)
                self._hurried, self._looks_at = False, 0.0  # (before the posts run: later ones wake the engine)
                if message is not None:
                    self._on_command(message)
                elif seconds and not self._posts and not any(handle.done() for handle in self._watched):
                    continue  # (nothing is done yet, as in most polls)
                while self._posts:
                    self._posts.popleft()()
                self._channel.flush()  # (before results, which may take long to process)
                self._complete_collectives()
        except Exception as error:  # noqa: BLE001  raised again in the next call
            asked = self._channel if isinstance(error, self.collectives.failure) else None
            self._fail(error if asked is None else cause_of(error, asked))
        finally:
            self._has_left = True
            self._left.set()
            if self._channel is not None:
                self._channel.close()
            self.collectives.stop()

    def _wake(self) -> None:
        self._hurried = True  # (first: the engine may be about to sleep on)
        if self._channel is not None:
            self._channel.wake()

    def _next_look(self) -> float | None:
        """Return the seconds that the engine may sleep; None to sleep until it is woken.

        It wakes up when a collective may be done, unless that wakes it, or when posts that do not wake it may have
        arrived.
        """
        # (Otherwise completion of what is used is noticed at the next wake-up. A rank without a training thread has no
        # other, and later collectives may need the name.)
        waited = bool(self._waits) or self._closing or any(one.deleted for one in self.participants())
        watched = {one.group: one for one in self._in_flight if waited or not one.is_used}.values()
        self._watched = [one.handle for one in watched]
        polled = [(one.handle.seconds_to_poll(), self.unhurried * one.is_used) for one in watched]
        polls = [max(seconds, least) for seconds, least in polled if seconds is not None]
        seconds = min(polls, default=None)
        if seconds is not None and seconds > 0.0 and not self._waits:
            seconds = max(seconds, self.unhurried)
        if self._more_to_come:
            self._more_to_come = False
            seconds = self.unhurried if seconds is None else min(seconds, self.unhurried)
        if seconds is not None and 0.0 < seconds <= self.unhurried:
            self._looks_at = time.monotonic() + seconds
        return 0.0 if self._posts else seconds  # (read last: their threads saw no ``_looks_at``)

    def _complete_collectives(self) -> None:
        """Call ``done`` of each collective that is done with its result."""
        landed = [flight for flight in self._in_flight if flight.handle.done()]
        if not landed:
            return
        self._in_flight = [flight for flight in self._in_flight if flight not in landed]
        for flight in landed:
            flight.done(flight.handle.result())
        with self.changed:  # (a thread woken too early would only compete for the interpreter lock)
            if any(ready() for ready in self._waits.values()):
                self.changed.notify_all()

    def _on_command(self, message: Command | Gone) -> None:
        match message:
            case Welcome():
                self._looks_at = 0.0  # (before the posts run: later ones wake the engine)
            case Close():
                self._closing = True  # (collectives in flight have to finish: all ranks take part in them)
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
                self.collectives.release(number)
            case _:
                participant = self._participants.get(message.optimizer)
                if participant is not None:  # (otherwise it was refused)
                    participant.on_command(message)

    def _fail(self, error: Exception) -> None:
        self.failure = error
        is_known = isinstance(error, RankLostError | CollectiveFailedError | self.collectives.failure)
        if self._channel is not None and not is_known:
            self._channel.send(Failed(f"{type(error).__name__}: {error}"))
        with self.changed:
            self.changed.notify_all()


# -- commits of elastic training ------------------------------------------------------------------------------


class Commits:
    """Commits of a rank, and the one at which all ranks stop after hosts have come or gone.

    All ranks have to stop at the same commit: a rank that continued would call a collective of the user's program that
    the others never reach. Horovod notifies only rank 0, which notifies the coordinator. The coordinator requests the
    number of commits of every rank, and chooses the commit after the highest. A rank waits for the choice only if it
    has answered and reaches its next commit meanwhile.

    It lives as long as the engine. Its fields change while ``Engine.changed`` is held.

    Attributes:
        made: number of commits since the engine started, which all ranks do at the same place of their program.
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
            engine.wait(lambda: self.stop_at is not None, lambda: "all ranks to report their number of commits")
        return self.stop_at is not None and self.made >= self.stop_at


# -- why a job cannot continue --------------------------------------------------------------------------------

CAUSE_WAIT = 10.0
"""Seconds that a rank waits for the cause, in addition to the silence after which a rank is declared lost."""


def error_of(message: RankLost | JobFailed | Gone) -> HvdAsyncError:
    """Return the error to raise for this command, or for the end of the connection to the coordinator."""
    match message:
        case RankLost(rank, host, reason, context, handed_over):
            return RankLostError(rank, host, reason, context, handed_over)
        case JobFailed(problem):
            return CollectiveFailedError(problem)
        case Gone(reason, host):
            return RankLostError(0, host, reason)


def cause_of(error: Exception, channel: Channel) -> Exception:
    """Ask the coordinator which rank is lost: Horovod reports that a collective has failed, but not why.

    Args:
        error: Horovod's error.
        channel: the channel to the coordinator.

    Returns:
        The error to raise: that of Horovod if no rank is known to be lost.
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
