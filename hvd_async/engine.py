"""The engine: the one thread of a rank that touches Horovod and the control plane, whatever the training thread does.

A Horovod collective starts when every member has submitted it, so somebody must submit this rank's part while its
training thread computes or sleeps. The engine owns all state it works on; other threads post functions to it and wait
for results. It sleeps until a command, a post or the next time a collective may be done.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from hvd_async.errors import EngineError, HvdAsyncError, RankLostError, WaitTimeoutError
from hvd_async.events import Bye, Command, Event, Failed, Leaving, Lost, Welcome
from hvd_async.notices import notice
from hvd_async.protocols import Channel, Collectives, Gone, Handle, Vector

OPTIMIZERS = 1 << 16
"""Of one process set: how far apart the numbers of two process sets' optimizers begin."""
CAUSE_WAIT = 5.0
"""Seconds a rank whose collective failed waits to hear from the coordinator which rank is to blame."""
BEGINNING = (
    "others to begin: every rank of the job must wrap an optimizer, and step or drain it. Horovod's warnings name "
    "those that are missing, by hvd_async.rendezvous"
)


class Participant(Protocol):
    """One optimizer's engine-side half.

    Attributes:
        last_done: the rank that was last to be done in the last drain, -1 before there was one.
    """

    last_done: int

    def obey(self, command: Command) -> None:
        """Carry out a command for this optimizer (engine thread)."""

    def check_done(self) -> None:
        """Raise, if this rank cannot be done now (training thread)."""

    def announce(self, flush: bool) -> None:
        """Say that this rank is done with this optimizer, to drain (``flush``) or to cut it (training thread)."""

    def serve(self) -> bool:
        """Apply what has come, without waiting; whether that is all (training thread, as the rest)."""

    @property
    def served(self) -> bool:
        """Whether ``serve`` would do something, or has done all."""

    def conclude(self, flush: bool) -> None:
        """All has come: end the drain or cut."""


class Engine:
    """One a process; serves any number of optimizers. Start once; a stopped engine is replaced, not restarted.

    Args:
        collectives: the data plane.
        connect: makes the control plane's channel; called on the engine thread, may block and raise.
    """

    def __init__(self, collectives: Collectives, connect: Callable[[], Channel]) -> None:
        self.collectives = collectives
        self.rank, self.size = collectives.rank, collectives.size
        self.failure: Exception | None = None
        self.timeout = float(os.environ.get("HVD_ASYNC_TIMEOUT", "inf"))
        """Opt-in limit (s) on every wait for other ranks."""
        self._warn_after = float(os.environ.get("HVD_ASYNC_WARN_AFTER", "60"))
        self._connect = connect
        self._channel: Channel | None = None
        self._posts: deque[Callable[[], None]] = deque()
        self._flights: list[tuple[Handle, Callable[[Vector], None]]] = []
        self._participants: dict[int, Participant] = {}
        self._opened: Counter[int] = Counter()
        self._lock = threading.Lock()
        self.changed = threading.Condition()
        """Held while what ``wait`` looks at changes, and notified then."""
        self._stopping = self._stop_called = False
        self._leaving = False
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

    def drain(self, flush: bool = True, process_set: int | None = None) -> None:
        """Drain (or, without ``flush``, cut) every optimizer that has opened, or all of a process set (Horovod's id).

        A rank is done with all of them or with none, and serves all at once. If it waited in the first one's drain for
        ranks that are busy with both, its second would keep those waiting, and pile up rounds.
        """
        participants = [
            participant
            for number, participant in sorted(self._participants.items())  # in one order on all ranks: ends communicate
            if process_set is None or number // OPTIMIZERS == process_set
        ]
        for participant in participants:
            participant.check_done()
        for participant in participants:
            participant.announce(flush)
        left = participants
        while left := [participant for participant in left if not participant.serve()]:
            self.wait(lambda: any(participant.served for participant in left))
        for participant in participants:
            participant.conclude(flush)

    def register(self, participant: Participant, process_set: int = 0) -> int:
        """Enter an optimizer; returns its number, the same on all ranks if they open those of a process set (its
        Horovod id, 0 for all ranks) in one order."""
        with self._lock:
            number = process_set * OPTIMIZERS + self._opened[process_set]
            self._opened[process_set] += 1
            self._participants[number] = participant
        return number

    def participants(self) -> list[Participant]:
        """All that are registered, in order."""
        return list(self._participants.values())

    def post(self, action: Callable[[], None]) -> None:
        """Have the engine thread run ``action``, after all posted before it.

        Raises:
            the engine's failure, if it has failed.
        """
        self.check()
        self._posts.append(action)
        if self._channel is not None:
            self._channel.wake()

    def _run_collective(self, start: Callable[[], Handle]) -> Vector:
        future: Future[Vector] = Future()

        def begin() -> None:
            self.submit(start, future.set_result)

        self.post(begin)
        self.wait(future.done)
        return future.result()

    def sum(self, vector: Vector, name: str, process_set: Any = None) -> Vector:
        """The sum of ``vector`` over all ranks; every rank must call it. ``vector`` is given away."""
        return self._run_collective(lambda: self.collectives.sum(vector, name, process_set))

    def broadcast(self, vector: Vector, root: int, name: str, process_set: Any = None) -> Vector:
        """Rank ``root``'s ``vector``; every rank must call it. ``vector`` is given away."""
        return self._run_collective(lambda: self.collectives.broadcast(vector, root, name, process_set))

    def wait(self, ready: Callable[[], bool], waiting_for: Callable[[], str] | None = None) -> None:
        """Wait until ``ready()``; a failure of the engine ends the wait with its error.

        Args:
            ready: checked after every change that the engine makes; the lock of ``changed`` is held then.
            waiting_for: what a warning says is missing, where the coordinator does not know.

        Raises:
            WaitTimeoutError: the opt-in limit ran out. Otherwise the wait goes on as long as the engine lives:
                a slow rank is warned about by the coordinator, a lost one makes the engine fail.
        """
        started = time.monotonic()
        warn_at = started + self._warn_after
        with self.changed:
            while not ready():
                self.check()
                if (self._channel is None or waiting_for is not None) and time.monotonic() > warn_at:
                    warn_at += self._warn_after
                    what = BEGINNING if self._channel is None or waiting_for is None else waiting_for()
                    notice(f"rank {self.rank} has waited {self._warn_after:.0f} s more for {what}. Waiting on.")
                left = started + self.timeout - time.monotonic()
                if left <= 0:
                    raise WaitTimeoutError(f"rank {self.rank} waited longer than HVD_ASYNC_TIMEOUT={self.timeout:g} s")
                self.changed.wait(min(1.0, left))

    @property
    def stopped(self) -> bool:
        """Whether it has come to its end without a failure."""
        return self.failure is None and self._left.is_set()

    @property
    def replaced(self) -> bool:
        """Whether ``stop`` was called: optimizers are to meet again on a new one."""
        return self._stop_called

    def check(self) -> None:
        """Raise the engine's failure, if it has failed; a lost rank as the framework's Horovod error."""
        failure = self.failure
        if self.stopped:
            raise EngineError("the engine has been stopped: shutdown() was called, or every rank has left")
        if isinstance(failure, RankLostError):
            raise self.collectives.failure(str(failure)) from failure
        if isinstance(failure, HvdAsyncError | self.collectives.failure):
            raise failure
        if failure is not None:
            raise EngineError(f"the engine of rank {self.rank} failed: {failure}") from failure

    def leave(self, timeout: float = threading.TIMEOUT_MAX) -> None:
        """Stop when all ranks have come to this point, or after ``timeout`` s, or at once if the engine has failed.

        (A rank that ends earlier would end Horovod for all; the coordinator warns of ranks that are slow to come.)
        """
        if self.failure is None:
            self._posts.append(self._say_leaving)
            if self._channel is not None:
                self._channel.wake()
            self._left.wait(min(timeout, self.timeout))
        self.stop()

    def stop(self, error: str | None = None, timeout: float = 5.0) -> None:
        """Stop now; with ``error``, tell the other ranks that this one is ending on it."""
        if error is not None and self.failure is None:
            self._posts.append(lambda: self.send(Failed(error)))
        self._stop_called = True
        self._posts.append(self._stop_now)
        if self._channel is not None:
            self._channel.wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    # -- engine thread ----------------------------------------------------------------------------------------

    def send(self, event: Event) -> None:
        """Send an event to the coordinator (engine thread)."""
        assert self._channel is not None
        self._channel.send(event)

    def submit(self, start: Callable[[], Handle], done: Callable[[Vector], None]) -> None:
        """Start a collective and have ``done`` called with its result (engine thread)."""
        self._flights.append((start(), done))

    def _say_leaving(self) -> None:
        self._leaving = True
        self.send(Leaving())

    def _stop_now(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        try:
            self.collectives.start(self._wake)
            self._channel = self._connect()
            while not self._stopping:
                message = self._channel.receive(self._next_look())
                if message is not None:
                    self._obey(message)
                self._run_posts()
                self._land()
        except Exception as error:  # noqa: BLE001  it comes home: raised in the caller's next call
            self._fail(self._cause_of(error))
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
        """Seconds the engine may sleep: until a collective may be done, for ever if it will be woken."""
        if self._posts:
            return 0.0
        return min((t for t in (handle.poll_in() for handle, _ in self._flights) if t is not None), default=None)

    def _land(self) -> None:
        """Hand over the results of the collectives that are done."""
        landed = [flight for flight in self._flights if flight[0].done()]
        if not landed:
            return
        self._flights = [flight for flight in self._flights if flight not in landed]
        for handle, done in landed:
            done(handle.result())
        with self.changed:
            self.changed.notify_all()

    def _obey(self, message: Command | Gone) -> None:
        match message:
            case Welcome():
                pass
            case Bye():
                self._stopping = True
            case Lost(rank, host, reason, context):
                raise RankLostError(rank, host, reason, context)
            case Gone(reason, host):
                if not self._leaving:
                    raise RankLostError(0, host, reason)
                self._stopping = True
            case _:
                self._participants[message.optimizer].obey(message)

    def _cause_of(self, error: Exception) -> Exception:
        """Horovod says that a collective failed, not why; the coordinator soon knows who is gone, so ask it first."""
        if not isinstance(error, self.collectives.failure) or self._channel is None:
            return error
        deadline = time.monotonic() + CAUSE_WAIT
        while (left := deadline - time.monotonic()) > 0:
            match self._channel.receive(left):
                case Lost(rank, host, reason, context):
                    return RankLostError(rank, host, reason, context)
                case Gone(reason, host):
                    return RankLostError(0, host, reason)
        return error

    def _fail(self, error: Exception) -> None:
        self.failure = error
        if self._channel is not None and not isinstance(error, RankLostError):
            self._channel.send(Failed(f"{type(error).__name__}: {error}"))
        with self.changed:
            self.changed.notify_all()
