"""The interfaces between the parts: what the engine needs of a control plane and of a data plane.

One implementation a file: ``transport.py`` (ZeroMQ) and ``testing.py`` (in memory) for messages,
``torch/collectives.py``, ``tensorflow/collectives.py`` and ``testing.py`` for tensors.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import msgspec

from hvd_async.runtime.protocol import Command, Event

Vector: TypeAlias = Any
"""A flat (1-D) array of the binding's framework: NumPy, torch or TensorFlow. The core only uses ``+=`` and ``[-1]``."""

Rows: TypeAlias = Any
"""Messages between ranks as bytes: a 2-D uint8 array of the binding's framework, a row each."""


T = TypeVar("T")


class Gone(NamedTuple):
    """A connection ended. ``host`` is that of the other end, where this end knows it."""

    reason: str
    host: str = "?"


class Channel(Protocol):
    """A rank's connection to the coordinator. Only its engine thread uses it, but for ``wake``.

    Attributes:
        port: the TCP port at which the coordinator listens; None if there is none.
    """

    port: int | None

    def send(self, event: Event) -> None:
        """Send with the next ``flush`` or ``receive``; never blocks."""

    def flush(self) -> None:
        """Send what was queued since the last time, in one message."""

    def receive(self, timeout: float | None) -> Command | Gone | None:
        """The next command; None after ``timeout`` s or on ``wake()``; ``Gone`` once the coordinator is lost."""

    def wake(self) -> None:
        """From any thread: make a ``receive`` that is waiting, or the next one, return at once."""

    def close(self) -> None:
        """Send what is queued (bounded), then close. Calling it again does nothing."""


class Hub(Protocol):
    """The coordinator's end of all channels. Only the coordinator thread uses it, but for ``wake``.

    Attributes:
        has_more: whether ``receive`` would return an event at once that has come with the last one.
    """

    @property
    def has_more(self) -> bool: ...

    def send(self, ranks: Sequence[int], command: Command) -> None:
        """Send to these ranks when the events that are there have been received, or many; never blocks.

        Commands reach a rank in the order sent.
        """

    def flush(self) -> None:
        """Send what was queued since the last time."""

    def receive(self, timeout: float | None) -> tuple[Sequence[int], Event | Gone] | None:
        """The next event and the ranks that have all sent it; ``Gone`` once these are lost; None after ``timeout`` s or
        on ``wake``."""

    def wake(self) -> None:
        """From any thread: make ``receive`` return."""

    def close(self) -> None:
        """Send what is queued (bounded), then close."""


class Handle(Protocol):
    """A collective on its way."""

    @property
    def in_stages(self) -> bool:
        """Whether ``done`` also begins what follows, for which other ranks wait."""

    def done(self) -> bool:
        """Whether ``result`` would return at once."""

    def result(self) -> Vector:
        """The collective's result, or the framework's error if it failed. Call once, when ``done``."""

    def seconds_to_poll(self) -> float | None:
        """Seconds until it is worth asking ``done`` again; None if completion wakes the engine by itself."""


class CompletedHandle:
    """A collective that had nowhere to go: of one rank.

    Args:
        vector: its result.
    """

    in_stages = False

    def __init__(self, vector: Vector) -> None:
        self._vector = vector

    def done(self) -> bool:
        """At once."""
        return True

    def result(self) -> Vector:
        """Return the vector."""
        return self._vector

    def seconds_to_poll(self) -> float:
        """At once."""
        return 0.0


def lane_of(name: str) -> str:
    """Return the lane of a collective: its name without the number at its end.

    All ranks of a process set submit the collectives of a lane in one order. Those of different lanes may be submitted
    in different orders, which a plane that matches collectives by order must allow for.
    """
    stem, _, number = name.rpartition(".")
    return stem if number.isdigit() else name


class Collectives(Protocol):
    """Collectives in one framework, over Horovod or torch.distributed. Only the engine thread calls these.

    Horovod matches the ranks' collectives by their names, a process group by their order in each lane (``lane_of``).
    ``process_set`` is Horovod's (or the test's) object for some of the ranks, None for all; ``root`` is a global rank.
    """

    rank: int
    size: int
    host: str
    failure: type[Exception]
    """The framework's error where Horovod failed; a lost rank is raised as this, so that elastic can act."""

    @property
    def on_gpu(self) -> bool:
        """Whether this process has tensors on a GPU, as far as can be told when its first optimizer steps."""

    def allreduce_sum(
        self, vector: Vector, name: str, process_set: Any = None, keep: bool = False, scale: float = 1.0
    ) -> Handle:
        """Start the sum of ``vector`` over all ranks, x ``scale``; ``vector`` belongs to the collective from now on,
        unless it is to be kept as it is."""

    def allreduce_extreme(self, vector: Vector, name: str, largest: bool) -> Handle:
        """Start the elementwise maximum (or minimum) of ``vector`` over all ranks."""

    def broadcast(self, vector: Vector, root: int, name: str, process_set: Any = None) -> Handle:
        """Start sending rank ``root``'s vector to all; the others' may be written over."""

    def describe(self, vector: Vector) -> tuple[int, str]:
        """Its length, and its kind: its dtype and whatever else ``zeros`` has to know, the same on all ranks."""

    def zeros(self, length: int, kind: str) -> Vector:
        """Zeros of a kind that ``describe`` told, here or on another rank."""

    def empty_like(self, vector: Vector) -> Vector:
        """A new one of this one's size, whatever it holds: for ``broadcast`` to write over."""

    def alltoall(
        self,
        rows: Rows,
        splits: list[int],
        coming: list[int],
        name: str,
        process_set: Any = None,
        into: Rows | None = None,
    ) -> Handle:
        """Start sending the first ``sum(splits)`` rows, ``splits[i]`` of them to the i-th rank, in order.

        ``coming[i]`` rows come from the i-th rank, which must send as many. The result is these rows, in the order of
        the senders, shape (``sum(coming)``, bytes). ``rows`` is not changed; it must have the same shape in all calls
        of a name on all ranks, which Horovod's cache of responses wants. ``into`` is memory for what comes, which must
        hold all of it; None: the binding finds some.
        """

    def process_set_of(self, groups: Sequence[Sequence[int]], make: bool) -> Any:
        """That of these groups of ranks in which this rank is, as ``process_set=`` takes it; None if it is in none.

        Ranks of all groups call it, and with ``make`` all ranks of the job: it may wait for them, to make what is not
        known yet.

        Raises:
            ValueError: a group is not known, and cannot be made; the message says what to do.
        """

    def allgather_bytes(self, payload: bytes, name: str) -> list[bytes]:
        """All ranks' payloads, in rank order; blocks until every rank has called it."""

    def start(self, wake: Any) -> None:
        """Called once by the engine before any other: ``wake()`` makes the engine look at its handles."""

    def stop(self) -> None:
        """Called once at the end; frees threads of its own."""


def pack(payload: bytes) -> bytes:
    """``payload`` with its length before it, so that an allgather of several can be taken apart."""
    return struct.pack("<Q", len(payload)) + payload


def unpack(gathered: bytes) -> list[bytes]:
    """The payloads of concatenated ``pack``s."""
    payloads = []
    while gathered:
        (length,) = struct.unpack_from("<Q", gathered)
        payloads.append(gathered[8 : 8 + length])
        gathered = gathered[8 + length :]
    return payloads


# -- what a rank needs of the world ------------------------------------------------------------------------------------


class Wait(msgspec.Struct):
    """A program's wait.

    Attributes:
        ready: whether the program may go on; checked after every change, while ``RankRuntime.changed`` is held.
        waiting_for: what a warning says is missing, where the coordinator does not know; None where it knows.
    """

    ready: Callable[[], bool]
    waiting_for: Callable[[], str] | None = None


Program: TypeAlias = Generator[Wait, None, T]
"""What a rank's training thread does, up to its next wait and on; returns a T."""


class Changed(AbstractContextManager[Any], Protocol):
    """The condition that is held while state changes that a program waits for, and notified then."""

    def notify_all(self) -> None:
        """Have all waits look again."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As ``threading.Condition``'s."""

    def release(self) -> None:
        """As ``threading.Condition``'s."""


class RankRuntime(Protocol):
    """What a rank needs of the world: its engine, and in simulations and tests something in place of it.

    Two sides of a rank use it: its programs and what they call (the training thread), and its reactions to commands,
    posts and collectives (the engine thread), which run one after the other.

    Attributes:
        rank, size: of the job.
        elastic: whether training continues without ranks that are lost.
        collectives: the data plane.
        changed: held while what programs wait for changes.
    """

    rank: int
    size: int
    elastic: bool

    @property
    def collectives(self) -> Collectives: ...

    @property
    def changed(self) -> Changed: ...

    @property
    def replaced(self) -> bool:
        """Whether it was stopped, and optimizers are to meet again on a new one."""

    @property
    def failure(self) -> Exception | None:
        """What it has failed by."""

    def drain(self, flush: bool = True, process_set: int | None = None) -> None:
        """Drain or cut all optimizers of this process, or of a process set."""

    def clock(self) -> float:
        """Return seconds from an arbitrary origin."""

    def check(self) -> None:
        """Raise if it has failed or ended."""

    def register(self, participant: Any, process_set: int = 0, number: int | None = None) -> int:
        """Enter an optimizer and return its number, the same on all ranks."""

    def unregister(self, number: int) -> None:
        """Forget an optimizer that never came to train."""

    def call_soon(self, action: Callable[[], None]) -> None:
        """Run ``action`` on the engine's side, after all posted before it. Raises as ``check``."""

    def notify(self, action: Callable[[], None], hurry: bool = True) -> None:
        """As ``call_soon``, but never raises; without ``hurry`` it may run some ms later."""

    def wait(self, ready: Callable[[], bool], waiting_for: Callable[[], str] | None = None) -> None:
        """Block until ``ready()``, for ``Worker.run``; a runtime of one thread runs programs itself, and raises."""

    def send(self, event: Event) -> None:
        """Send an event to the coordinator (engine's side)."""

    def submit(self, start: Callable[[], Handle], done: Callable[[Vector], None], group: Hashable = None) -> None:
        """Start a collective and have ``done`` called with its result (engine's side)."""
