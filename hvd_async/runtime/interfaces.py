"""Interfaces of the control plane, of the data plane and of the runtime of a rank.

One implementation per file: ``transport.py`` (ZeroMQ) and ``testing.py`` (in memory) for messages;
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
"""Messages between ranks as bytes: a 2-D uint8 array of the binding's framework, one row per message."""


T = TypeVar("T")


class Gone(NamedTuple):
    """End of a connection. ``host`` is the host of the other end, if it is known."""

    reason: str
    host: str = "?"


class Channel(Protocol):
    """Connection of a rank to the coordinator. Only its engine thread uses it, except for ``wake``.

    Attributes:
        port: the TCP port at which the coordinator listens; None if there is none.
    """

    port: int | None

    def send(self, event: Event) -> None:
        """Queue an event for the next ``flush`` or ``receive``; never blocks."""

    def flush(self) -> None:
        """Send all queued events, in one message."""

    def receive(self, timeout: float | None) -> Command | Gone | None:
        """Return the next command; None after ``timeout`` s or on ``wake``; ``Gone`` once the coordinator is lost."""

    def wake(self) -> None:
        """Make the current or next ``receive`` return at once (any thread)."""

    def close(self) -> None:
        """Send what is queued, for a limited time, then close. Calling it again does nothing."""


class Hub(Protocol):
    """The coordinator's end of all channels. Only the coordinator thread uses it, except for ``wake``.

    Attributes:
        has_more: whether ``receive`` would return at once an event that arrived with the last one.
    """

    @property
    def has_more(self) -> bool: ...

    def send(self, ranks: Sequence[int], command: Command) -> None:
        """Queue a command for these ranks; never blocks.

        It is sent once the events that have arrived, or many of them, were received. Commands reach a rank in the order
        in which they were queued.
        """

    def flush(self) -> None:
        """Send all queued commands."""

    def receive(self, timeout: float | None) -> tuple[Sequence[int], Event | Gone] | None:
        """Return the ranks that have sent the next event, and this event; ``Gone`` as the event once they are lost.

        Returns:
            None after ``timeout`` seconds or on ``wake``.
        """

    def wake(self) -> None:
        """Make the current or next ``receive`` return (any thread)."""

    def close(self) -> None:
        """Send what is queued, for a limited time, then close."""


Take: TypeAlias = Callable[[], Vector]
"""Function that returns the result of a collective before it is done, on the training thread. Work that the thread
queues on its device afterwards runs after the collective, and the host waits for nothing. It may be called more than
once. Raises the framework's error if the collective is known to have failed."""


class Handle(Protocol):
    """Collective in flight."""

    @property
    def in_stages(self) -> bool:
        """Whether ``done`` also starts the next stage, for which other ranks wait."""

    @property
    def take(self) -> Take | None:
        """Function by which the result may be taken before the collective is done; None if it may not."""

    def done(self) -> bool:
        """Whether ``result`` would return at once."""

    def result(self) -> Vector:
        """Return the result; raise the framework's error if the collective failed. Call it once, after ``done``."""

    def seconds_to_poll(self) -> float | None:
        """Return the seconds until ``done`` is worth polling again; None if completion wakes the engine."""


class FiniteFlag(Protocol):
    """Whether a vector is finite, which its device computes while the host continues."""

    def is_known(self) -> bool:
        """Return whether ``is_finite`` returns at once."""

    def is_finite(self) -> bool:
        """Return whether all elements are finite; wait until this is known."""

    def choose(self, vector: Vector, other: Vector) -> Vector:
        """Return a new vector, without a wait: ``vector`` if the flag is of a finite one, else ``other``."""

    def apart(self, *vectors: Vector) -> AbstractContextManager[None]:
        """Return a context in which the engine thread computes from vectors, behind no later work of the device."""


class CompletedHandle:
    """Completed collective of a single rank.

    Args:
        vector: its result.
    """

    in_stages = False
    take = None

    def __init__(self, vector: Vector) -> None:
        self._vector = vector

    def done(self) -> bool:
        """Return True."""
        return True

    def result(self) -> Vector:
        """Return the vector."""
        return self._vector

    def seconds_to_poll(self) -> float:
        """Return 0."""
        return 0.0


def lane_of(name: str) -> str:
    """Return the lane of a collective: its name without the number at its end.

    All ranks of a process set submit the collectives of a lane in the same order. Collectives of different lanes may be
    submitted in different orders, unless the data plane is ``in_order``.
    """
    stem, _, number = name.rpartition(".")
    return stem if number.isdigit() else name


class Collectives(Protocol):
    """Collectives of a framework, over Horovod or torch.distributed. Only the engine thread calls its methods.

    Horovod matches the ranks' collectives by their names, a process group of Gloo by their order in each lane
    (``lane_of``), and one of NCCL by their order.
    ``process_set`` is Horovod's (or a test's) object for some of the ranks, None for all; ``root`` is a global rank.
    """

    rank: int
    size: int
    host: str
    failure: type[Exception]
    """The framework's error after a failure of Horovod. A lost rank is raised as this type, for elastic training."""
    in_order: bool
    """Whether all ranks must submit all collectives in the same order, which is that of the coordinator's commands."""

    @property
    def on_gpu(self) -> bool:
        """Whether this process has tensors on a GPU, as far as is known at the first step of its first optimizer."""

    def allreduce_sum(
        self, vector: Vector, name: str, process_set: Any = None, keep: bool = False, scale: float = 1.0
    ) -> Handle:
        """Start the sum of ``vector`` over all ranks, multiplied by ``scale``.

        Args:
            vector: shape (n,); ownership is transferred to the collective, unless ``keep``.
            name: the name of the collective.
            process_set: the ranks that take part; None for all.
            keep: whether to leave ``vector`` unchanged.
            scale: factor of the sum.
        """

    def allreduce_extreme(self, vector: Vector, name: str, largest: bool) -> Handle:
        """Start the elementwise maximum (or minimum) of ``vector`` over all ranks."""

    def broadcast(self, vector: Vector, root: int, name: str, process_set: Any = None) -> Handle:
        """Start sending the vector of rank ``root`` to all ranks; the other vectors may be overwritten."""

    def describe(self, vector: Vector) -> tuple[int, str]:
        """Return the length of a vector and its kind: dtype and what else ``zeros`` needs, the same on all ranks."""

    def zeros(self, length: int, kind: str) -> Vector:
        """Return zeros of a kind that ``describe`` has returned, on this or another rank."""

    def empty_like(self, vector: Vector) -> Vector:
        """Return an uninitialized vector of the same size and dtype, which ``broadcast`` can overwrite."""

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

        The result is the received rows, in the order of their senders, shape (``sum(coming)``, bytes).

        Args:
            rows: shape (n, bytes); not changed. The same shape in all calls with a name on all ranks, as Horovod's
                response cache requires.
            splits: number of rows for each rank.
            coming: number of rows from each rank, which must send that number.
            name: the name of the collective.
            process_set: the ranks that take part; None for all.
            into: memory that can hold all received rows; None to let the binding allocate it.
        """

    def process_set_of(self, groups: Sequence[Sequence[int]], make: bool) -> Any:
        """Return the group to which this rank belongs, as a value for ``process_set=``; None if it belongs to none.

        Args:
            groups: the ranks of each group; all of them call this with the same value.
            make: whether all ranks of the job call it, so that it can create missing process sets and wait for them.

        Raises:
            ValueError: a group has no process set, and none can be created; the message says what to do.
        """

    def allgather_bytes(self, payload: bytes, name: str) -> list[bytes]:
        """Return the payloads of all ranks, in rank order; blocks until every rank has called it."""

    def release(self, optimizer: int) -> None:
        """End what the optimizer of a number has used alone: no rank has it any longer, or begins a collective of it.
        Those in flight still complete."""

    def start(self, wake: Any) -> None:
        """Called once by the engine before any other method; ``wake()`` makes the engine poll its handles."""

    def stop(self) -> None:
        """Called once at the end; ends its threads."""


def pack(payload: bytes) -> bytes:
    """Return ``payload`` prefixed with its length, so that gathered payloads can be separated."""
    return struct.pack("<Q", len(payload)) + payload


def unpack(gathered: bytes) -> list[bytes]:
    """Return the payloads of concatenated results of ``pack``."""
    payloads = []
    while gathered:
        (length,) = struct.unpack_from("<Q", gathered)
        payloads.append(gathered[8 : 8 + length])
        gathered = gathered[8 + length :]
    return payloads


# -- the runtime of a rank ---------------------------------------------------------------------------------------------


class Wait(msgspec.Struct):
    """A program's wait.

    Attributes:
        ready: returns whether the program may continue; called after every change, while ``RankRuntime.changed`` is
            held.
        waiting_for: returns what is missing, for a warning; None if the coordinator knows.
        counts: whether its time counts as waiting in ``stats()``.
    """

    ready: Callable[[], bool]
    waiting_for: Callable[[], str] | None = None
    counts: bool = True


Program: TypeAlias = Generator[Wait, None, T]
"""Code of a rank's training thread as a generator, which yields each wait and returns a T."""


class Changed(AbstractContextManager[Any], Protocol):
    """Condition that is held while state changes for which a program waits, and notified afterwards."""

    def notify_all(self) -> None:
        """Make all waits check their condition again."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """See ``threading.Condition``."""

    def release(self) -> None:
        """See ``threading.Condition``."""


class RankRuntime(Protocol):
    """Runtime of a rank: its engine, or a replacement in simulations and tests.

    Two sides of a rank use it: its programs and what they call (the training thread), and its reactions to commands,
    posts and collectives (the engine thread), which run one at a time.

    Attributes:
        rank, size: this rank, and the number of ranks in the job.
        elastic: whether training continues without ranks that are lost.
        collectives: the data plane.
        changed: condition that is held while state changes for which programs wait.
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
        """Whether it was stopped, and optimizers register again on a new one."""

    @property
    def failure(self) -> Exception | None:
        """The error by which it has failed; None if it has not."""

    def drain(self, flush: bool = True, process_set: int | None = None, called_on: Any = None) -> None:
        """Drain or cut all optimizers of this process, or of a process set; ``called_on``: the worker of the optimizer
        that the user has drained."""

    def clock(self) -> float:
        """Return seconds from an arbitrary origin."""

    def check(self) -> None:
        """Raise if it has failed or ended."""

    def participants(self) -> Sequence[Any]:
        """Return all registered optimizers."""

    def register(self, participant: Any, process_set: int = 0, number: int | None = None) -> int:
        """Register an optimizer and return its number, the same on all ranks."""

    def unregister(self, number: int) -> None:
        """Forget an optimizer that never started to train."""

    def call_soon(self, action: Callable[[], None]) -> None:
        """Run ``action`` on the engine's side, after all actions posted before it. Raises as ``check``."""

    def notify(self, action: Callable[[], None], hurry: bool = True) -> None:
        """Like ``call_soon``, but never raises; without ``hurry`` it may run some milliseconds later."""

    def wait(self, ready: Callable[[], bool], waiting_for: Callable[[], str] | None = None) -> None:
        """Block until ``ready()`` is true, for ``Worker.run``. A single-threaded runtime raises: it runs programs."""

    def send(self, event: Event) -> None:
        """Send an event to the coordinator (engine's side)."""

    def turn(self) -> int | None:
        """Reserve the next turn for a collective that may start later, when its command arrives (engine's side). None
        if the data plane is not ``in_order``."""

    def submit(
        self,
        start: Callable[[], Handle],
        done: Callable[[Vector], None],
        group: Hashable = None,
        turn: int | None = None,
        usable: Callable[[Take], None] | None = None,
    ) -> None:
        """Start a collective, in its turn (engine's side).

        Args:
            start: starts it; called later if it has to wait for its turn.
            done: called with its result, when it is complete.
            group: equal for collectives whose results are only useful together.
            turn: its turn, if one was reserved.
            usable: called with the handle's ``take`` once it is submitted, if there is one.
        """
