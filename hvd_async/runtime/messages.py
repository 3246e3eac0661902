"""Messages that every optimizer needs, whatever its algorithm; a family adds its own (``algorithms/*/messages.py``).

All are frozen msgspec structs; ``codec`` has their wire format. Events go from a rank to the coordinator and say what
is so, commands from the coordinator to a rank and say what to do. The sender of an event is known from its
authenticated connection, so no event names its own rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import msgspec

Number: TypeAlias = bool | int | float | None
if TYPE_CHECKING:
    Hyper: TypeAlias = list[dict[str, Any]]  # (bindings know by its name what a value is)
else:
    Hyper = list[dict[str, Number | list[Number]]]
"""Hyperparameters of a round: one dictionary (name -> number, bool, None or list of numbers) per parameter group."""

C = TypeVar("C")
D = TypeVar("D")


class Config(msgspec.Struct, frozen=True):
    """Settings that all ranks of an optimizer must share before it begins; a family's own is a subclass."""

    @property
    def counts(self) -> int:
        """How many numbers ``Finished.produced`` has."""
        return 1


class OptimizerEvent(msgspec.Struct, frozen=True):
    """A rank's event about one of its optimizers, by its number."""

    optimizer: int


class OptimizerCommand(msgspec.Struct, frozen=True):
    """A command for the ranks of one optimizer, by its number."""

    optimizer: int


# -- events: rank -> coordinator ------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The handshake: this rank's engine is connected."""

    host: str
    pid: int


class Registered(OptimizerEvent, Generic[C], frozen=True, tag=True):
    """This rank's optimizer is about to step (or drain) for the first time.

    ``names[i]`` and ``checksums[i]`` (CRC-32 of its bytes) describe the i-th parameter. ``members`` are the ranks that
    share the optimizer (a Horovod process set), all ranks if it is empty. ``loaded``: gradients of an earlier run that
    this rank brings, and no round has carried; ``hyper`` is what it would apply them with, should nobody step.
    ``timeline``: whether this rank records one, and is to be told why collectives start.
    """

    config: C
    names: list[str]
    checksums: list[int]
    members: list[int] = []
    loaded: int = 0
    hyper: Hyper = []
    timeline: bool = False


class Finished(OptimizerEvent, frozen=True, tag=True):
    """This rank is in ``drain()`` (``flush``) or ``cut()``; ``produced[b]`` gradients of bucket b since it opened (of
    gossip: its steps). Its user code has seen ``shown`` rounds before they were applied since the last drain or cut."""

    produced: list[int]
    flush: bool = True
    shown: int = 0


class CollectiveReady(OptimizerEvent, frozen=True, tag=True):
    """This rank waits in its collective number ``index`` (from 1) of this optimizer, outside of rounds and exchanges.

    Attributes:
        kind: "sum", "broadcast", or "compare" of ``names`` and ``checksums``, for which no tensor travels.
        what: for people; the same on all ranks.
        length, dtype: of the vector, as ``Collectives.describe`` tells them.
        root: the rank whose vector a broadcast sends, if it still has the optimizer; else the lowest that has.
    """

    index: int
    kind: str
    what: str
    length: int = 0
    dtype: str = ""
    root: int = -1
    names: list[str] = []
    checksums: list[int] = []


class OptimizerDeleted(OptimizerEvent, frozen=True, tag=True):
    """This rank has this optimizer no more; its engine serves until no rank has it. ``produced``: as ``Finished``'s."""

    produced: list[int]


class NoSuchOptimizer(OptimizerEvent, frozen=True, tag=True):
    """This rank was asked to register an optimizer while it waits in a drain, and has wrapped none that it could be."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """This rank is ending on an error; ``horovod``: on one of Horovod's, which says nothing of whose fault it is."""

    error: str
    horovod: bool = False


class Present(msgspec.Struct, frozen=True, tag=True):
    """The answer to ``CallRoll``."""


class HostsChanged(msgspec.Struct, frozen=True, tag=True):
    """Hosts of an elastic job have come or gone, as Horovod has told this rank."""


class CommitsMade(msgspec.Struct, frozen=True, tag=True):
    """The answer to ``CountCommits``: this rank's elastic state was committed so often; the next waits to be told."""

    made: int


class Leaving(msgspec.Struct, frozen=True, tag=True):
    """This rank's engine is about to stop, with nothing left to do."""


# -- commands: coordinator -> rank ----------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Every rank is connected."""


class Accepted(OptimizerCommand, frozen=True, tag=True):
    """Every rank has opened this optimizer, and they fit together: steps may begin."""


class Drained(OptimizerCommand, Generic[D], frozen=True, tag=True):
    """All ranks are done, ``last`` last: so many rounds fired, and gradients of each bucket produced, since the start.

    ``flushed``: nothing is pending any more; after a cut each rank still holds what no round has carried. ``details``:
    the family's own. ``whole``: whether every rank that has stepped since the last drain still has the
    optimizer, now and at the last drain. ``mend``: the rank whose weights to take over, where user code has seen most
    rounds. ``gone``: ranks that have the optimizer no more, and take no step from now on.
    """

    rounds: int
    produced: list[int]
    last: int
    flushed: bool = True
    details: D | None = None
    whole: bool = True
    mend: int | None = None
    gone: list[int] = []


class Rejected(OptimizerCommand, frozen=True, tag=True):
    """The ranks' optimizers do not fit together; ``problem`` says how, and what mends it."""

    problem: str


class RunCollective(OptimizerCommand, frozen=True, tag=True):
    """Submit the collective that ``ranks`` wait in; all others take part with zeros. As of ``CollectiveReady``.

    ``problem``: why it cannot run, or what a comparison has found; then nobody submits anything.
    """

    kind: str
    what: str
    length: int
    dtype: str
    root: int
    ranks: list[int]
    problem: str | None = None


class RegisterOptimizer(OptimizerCommand, frozen=True, tag=True):
    """Others have opened this optimizer, and ``rank`` waits in a drain before it has: it is to open it now."""

    rank: int
    names: list[str]
    members: list[int] = []


class Unregister(OptimizerCommand, frozen=True, tag=True):
    """No rank has this optimizer any more: forget it."""


class RankLost(msgspec.Struct, frozen=True, tag=True):
    """A rank is gone; the job cannot go on. ``handed_over``: as of ``RankLostError``."""

    rank: int
    host: str
    reason: str
    context: str
    handed_over: dict[int, list[int]] = msgspec.field(default_factory=dict)


class CallRoll(msgspec.Struct, frozen=True, tag=True):
    """Horovod has failed on some rank: say that you are ``Present``."""


class CountCommits(msgspec.Struct, frozen=True, tag=True):
    """Hosts have come or gone: say how many commits this rank has made."""


class StopAtCommit(msgspec.Struct, frozen=True, tag=True):
    """All ranks stop at their commit of this number, and go on with the hosts that there are then."""

    commit: int


class JobFailed(msgspec.Struct, frozen=True, tag=True):
    """Horovod has failed, and the job cannot go on, although no rank is known to be lost. ``problem`` says why."""

    problem: str


class Close(msgspec.Struct, frozen=True, tag=True):
    """Every rank is leaving: close."""


JOB_EVENTS = (Hello, Failed, Present, HostsChanged, CommitsMade, Leaving)
"""About the rank as a whole."""
OPTIMIZER_EVENTS = (Finished, CollectiveReady, OptimizerDeleted, NoSuchOptimizer)
"""About any optimizer, beside ``Registered``, which has a family's configuration."""
JOB_COMMANDS = (Welcome, RankLost, CallRoll, CountCommits, StopAtCommit, JobFailed, Close)
OPTIMIZER_COMMANDS = (Accepted, Rejected, RunCollective, RegisterOptimizer, Unregister)
"""For any optimizer, beside ``Drained``, which has a family's details."""

Event: TypeAlias = Hello | Failed | Present | HostsChanged | CommitsMade | Leaving | OptimizerEvent
Command: TypeAlias = Welcome | RankLost | CallRoll | CountCommits | StopAtCommit | JobFailed | Close | OptimizerCommand
