"""Ranks as threads of a process, for tests: real engines, a real coordinator, messages and collectives in memory.

``Cluster(4).run(work)`` calls ``work(rank)`` in four threads; an optimizer wrapped there uses that rank's engine. With
``jitter`` every command is delayed by a random time, so that orders occur that are rare on one machine.
No network, no Horovod: fast unit tests, which do not replace tests of real jobs.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hvd_async.algorithms.registry import FAMILIES
from hvd_async.runtime.coordinator import Coordinator
from hvd_async.runtime.engine import Engine
from hvd_async.runtime.in_memory import Combine, InMemoryCollectives, Sent
from hvd_async.runtime.interfaces import Channel, Gone, Handle, Take
from hvd_async.runtime.lifecycle import use_engine
from hvd_async.runtime.protocol import Codec, Command, Event, Failed, Hello, Leaving, encode

T = TypeVar("T")
CODEC = Codec(FAMILIES)


def stop_engine(optimizer: Any) -> None:
    """Drain this process's optimizers and stop its engine; Horovod stays up, and later optimizers start a new engine.

    Args:
        optimizer: one of the wrapped optimizers. All ranks call this function.
    """
    optimizer._async.lifecycle.shutdown()


class InjectedError(RuntimeError):
    """Error that a test injects; also replaces the error of Horovod."""


class _Mailbox:
    """Queue whose items become visible in order, each after a random delay."""

    def __init__(self, jitter: float, seed: str) -> None:
        self._items: queue.Queue[tuple[float, Any]] = queue.Queue()
        self._jitter, self._random = jitter, random.Random(seed)
        self._held: deque[tuple[float, Any]] = deque()

    def put(self, item: Any) -> None:
        due = time.monotonic() + (self._random.random() * self._jitter if item is not None else 0.0)
        self._items.put((due, item))

    def get(self, timeout: float | None) -> Any:
        """Return the next item; None after ``timeout`` seconds or on a wake-up."""
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while True:
            now = time.monotonic()
            if self._held and self._held[0][0] <= now:
                return self._held.popleft()[1]
            until = min(deadline, self._held[0][0] if self._held else float("inf"))
            if until <= now and until == deadline:
                return None
            try:
                due, item = self._items.get(timeout=None if until == float("inf") else max(0.0, until - now))
            except queue.Empty:
                continue
            if item is None:
                return None
            self._held.append((due, item))


class MemoryHub:
    """The coordinator's end of all channels, in memory. Messages are encoded and decoded as on a network."""

    has_more = False

    def __init__(self, size: int, jitter: float = 0.0, seed: int = 0) -> None:
        self._inbox = _Mailbox(0.0, "hub")
        self._outboxes = [_Mailbox(jitter, f"{seed}:{rank}") for rank in range(size)]
        self._lock = threading.Lock()

    def send(self, ranks: Sequence[int], command: Command) -> None:
        data = encode(command)
        for rank in ranks:
            self._outboxes[rank].put(data)

    def flush(self) -> None:
        """Do nothing: no message is queued."""

    def receive(self, timeout: float | None) -> tuple[Sequence[int], Event | Gone] | None:
        item = self._inbox.get(timeout)
        if item is None:
            return None
        rank, data = item
        return (rank,), data if isinstance(data, Gone) else CODEC.decode_event(data)

    def wake(self) -> None:
        self._inbox.put(None)

    def close(self) -> None:
        for outbox in self._outboxes:
            outbox.put(Gone("closed"))

    def channel(self, rank: int) -> MemoryChannel:
        """Return the channel of a rank."""
        return MemoryChannel(self._inbox, self._outboxes[rank], rank)


class MemoryChannel:
    """A rank's end of its channel, in memory."""

    port: int | None = None

    def __init__(self, hub: _Mailbox, own: _Mailbox, rank: int) -> None:
        self._hub, self._own, self._rank = hub, own, rank
        self._left = False
        self.send(Hello(f"host{rank}", rank))

    def send(self, event: Event) -> None:
        self._left = self._left or isinstance(event, Leaving | Failed)
        self._hub.put((self._rank, encode(event)))

    def flush(self) -> None:
        """Do nothing: no message is queued."""

    def receive(self, timeout: float | None) -> Command | Gone | None:
        data = self._own.get(timeout)
        return data if data is None or isinstance(data, Gone) else CODEC.decode_command(data)

    def wake(self) -> None:
        self._own.put(None)

    def close(self) -> None:
        if not self._left:
            self._left = True
            self._hub.put((self._rank, Gone("closed its channel without a goodbye")))


class _Meeting:
    """Collective in flight, complete when every rank has submitted its part."""

    def __init__(self) -> None:
        self.parts: dict[int, Any] = {}
        self.result: Any = None
        self.complete = threading.Event()


class Switchboard:
    """Collectives in flight of all ranks, in memory, by name.

    Attributes:
        count: number of completed collectives of tensors.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, _Meeting] = {}
        self.wakes: dict[int, Callable[[], None]] = {}
        self.count = 0

    def join(
        self,
        rank: int,
        name: str,
        part: Any,
        combine: Callable[[list[Any]], Any],
        ranks: Sequence[int],
        tensor: bool = True,
    ) -> _Meeting:
        with self._lock:
            meeting = self._open.setdefault(name, _Meeting())
            if rank in meeting.parts or rank not in ranks:
                raise InjectedError(f"rank {rank} submitted {name} twice, or is not among {ranks}")
            meeting.parts[rank] = part
            last = len(meeting.parts) == len(ranks)
            if last:
                del self._open[name]
                self.count += tensor
        if last:
            meeting.result = combine([meeting.parts[r] for r in ranks])
            meeting.complete.set()
            for wake in list(self.wakes.values()):
                wake()
        return meeting


class _MemoryHandle:
    in_stages = False
    take: Take | None = None

    def __init__(self, meeting: _Meeting, place: int) -> None:
        self._meeting, self._place = meeting, place

    def done(self) -> bool:
        return self._meeting.complete.is_set()

    def completes_within(self, seconds: float) -> bool:
        """Wait until it is done, for a limited time; return whether it is."""
        return self._meeting.complete.wait(seconds)

    def result(self) -> Any:
        return self._meeting.result[self._place]

    def seconds_to_poll(self) -> float | None:
        return None


class MemoryCollectives(InMemoryCollectives):
    """Collectives among threads, for NumPy, torch and TensorFlow arrays."""

    failure: type[Exception] = InjectedError

    def __init__(self, board: Switchboard, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._board = board

    def start(self, wake: Callable[[], None]) -> None:
        self._board.wakes[self.rank] = wake

    def stop(self) -> None:
        self._board.wakes.pop(self.rank, None)

    @property
    def started(self) -> bool:
        """Whether the engine has started it and not stopped it."""
        return self.rank in self._board.wakes

    def _join(self, name: str, members: Sequence[int], sent: Sent, kind: str, combine: Combine) -> Handle:
        return _MemoryHandle(self._board.join(self.rank, name, sent, combine, members), members.index(self.rank))

    def allgather_bytes(self, payload: bytes, name: str) -> list[bytes]:
        meeting = self._board.join(self.rank, name, payload, list, self._everyone, tensor=False)
        if not meeting.complete.wait(60.0):
            raise InjectedError(f"{name}: not all ranks have called it")
        return list(meeting.result)


class Cluster:
    """Cluster of ranks as threads.

    Args:
        size: number of ranks.
        jitter: upper limit of the random delay of commands, in seconds.
        seed: seed of the jitter.
        warn_after: see ``Coordinator``.
        wrap: wraps the collectives of each rank, to inject faults.
    """

    def __init__(
        self,
        size: int,
        jitter: float = 0.0,
        seed: int = 0,
        warn_after: float = 60.0,
        wrap: Callable[[MemoryCollectives], MemoryCollectives] = lambda collectives: collectives,
    ) -> None:
        self.size = size
        self._hub = MemoryHub(size, jitter, seed)
        self.board = Switchboard()
        self.coordinator = Coordinator(self._hub, FAMILIES, [f"host{rank}" for rank in range(size)], warn_after)
        self.engines: list[Engine] = []
        for rank in range(size):
            collectives = wrap(MemoryCollectives(self.board, rank, size))
            self.engines.append(Engine(collectives, self._connector(rank)))

    def _connector(self, rank: int) -> Callable[[], Channel]:
        return lambda: self._hub.channel(rank)

    def run(self, work: Callable[[int], T], timeout: float = 600.0) -> list[T]:
        """Call ``work(rank)`` on every rank, each in a thread, then leave without an error.

        Returns:
            The results of the calls, in rank order.

        Raises:
            the first error of the lowest rank that failed; TimeoutError if ranks are still running after ``timeout`` s.
        """
        outcomes = self.outcomes(work, timeout)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]

    def outcomes(self, work: Callable[[int], T], timeout: float = 600.0) -> Sequence[T | BaseException]:
        """Like ``run``, but return errors instead of the results of ranks that raise."""
        outcomes: list[T | BaseException] = [TimeoutError(f"rank {r} did not finish") for r in range(self.size)]

        def rank_main(rank: int) -> None:
            engine = self.engines[rank]
            with use_engine(engine):
                try:
                    outcomes[rank] = work(rank)
                    engine.leave(timeout)
                except BaseException as error:  # noqa: BLE001  returned to the caller
                    outcomes[rank] = error
                    engine.stop(f"{type(error).__name__}: {error}")

        self.coordinator.start()
        for engine in self.engines:
            engine.start()
        threads = [
            threading.Thread(target=rank_main, args=(r,), name=f"rank-{r}", daemon=True) for r in range(self.size)
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for engine in self.engines:
            engine.stop()
        self.coordinator.stop()
        return outcomes
