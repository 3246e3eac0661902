"""What ranks and the coordinator say to each other: messages, the families that add their own, and the wire format.

All messages are frozen msgspec structs. Events go from a rank to the coordinator and state a fact; commands go from the
coordinator to a rank and say what to do. The sender of an event is known from its authenticated connection, so no event
names its own rank. The messages here serve every optimizer; a family adds its own (``algorithms/*/config.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar, Union

import msgspec

if TYPE_CHECKING:
    from hvd_async.runtime.machine import StateMachine

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


# -- families and algorithms ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """One family of algorithms: its messages and its state machine.

    Attributes:
        name: "eager", "gossip", "leader".
        config: what all ranks of its optimizers must have in common.
        events: its own, from rank to coordinator.
        commands: its own, from coordinator to rank.
        state_machine: what the coordinator runs for one optimizer.
        details: the family's own content of ``Drained``; None if there is none.
    """

    name: str
    config: type[Config]
    events: tuple[type[OptimizerEvent], ...]
    commands: tuple[type[OptimizerCommand], ...]
    state_machine: type[StateMachine[Any]]
    details: type[msgspec.Struct] | None = None


@dataclass(frozen=True)
class Algorithm:
    """One algorithm, as data; a family may add fields of its own.

    Attributes:
        name: "sgp".
        family: the name of its family.
        options: its own options and their defaults; all others are refused.
        sends: what ranks send each other.
        waits_for: whom a step waits for; "period" stands for all ranks, after so many steps and not after each.
        symmetric_graph: whether both ends of each edge of its graph must send.
        about: what sets it apart, for people: a clause that its name begins.
        compressions: how messages may travel.
    """

    name: str
    family: str
    options: Mapping[str, Any]
    sends: Literal["gradients", "weights"]
    waits_for: Literal["all", "quorum", "neighbours", "nobody", "period"]
    symmetric_graph: bool = False
    about: str = ""
    compressions: tuple[str, ...] = ("none",)


# -- the wire format ------------------------------------------------------------------------------------------

DecodeError = msgspec.DecodeError
_encoder = msgspec.msgpack.Encoder()
M = TypeVar("M")


def encode(message: Event | Command) -> bytes:
    """Return one event's or command's wire form."""
    return _encoder.encode(message)


def packed(encoded: Sequence[msgspec.Raw]) -> bytes:
    """Return the message that carries these events or commands, each in its wire form."""
    return _encoder.encode(encoded)


class Codec:
    """Reads the messages of the runtime and of these families, and no others.

    Attributes:
        events: the union of all that a rank may send.
        commands: the union of all that the coordinator may.
    """

    def __init__(self, families: Sequence[Family]) -> None:
        configs: Any = Union[tuple(family.config for family in families)]  # noqa: UP007  (made when it runs)
        details: Any = Union[(None, *(family.details for family in families if family.details is not None))]
        own_events = [event for family in families for event in family.events]
        own_commands = [command for family in families for command in family.commands]
        self.events: Any = Union[(*JOB_EVENTS, *OPTIMIZER_EVENTS, Registered[configs], *own_events)]
        self.commands: Any = Union[(*JOB_COMMANDS, *OPTIMIZER_COMMANDS, Drained[details], *own_commands)]
        several: Any = list  # (made when it runs)
        self._event: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(self.events)
        self._command: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(self.commands)
        self._events: msgspec.msgpack.Decoder[list[Event]] = msgspec.msgpack.Decoder(several[self.events])
        self._commands: msgspec.msgpack.Decoder[list[Command]] = msgspec.msgpack.Decoder(several[self.commands])

    def decode_event(self, data: bytes) -> Event:
        """Return the event in ``data``.

        Raises:
            DecodeError: it is none.
        """
        return _decode(self._event, data)

    def decode_command(self, data: bytes) -> Command:
        """Return the command in ``data``.

        Raises:
            DecodeError: it is none.
        """
        return _decode(self._command, data)

    def decode_events(self, data: bytes) -> list[Event]:
        """Return the events that a rank's message carries.

        Raises:
            DecodeError: it is none.
        """
        return _decode(self._events, data)

    def decode_commands(self, data: bytes) -> list[Command]:
        """Return the commands that a message of the coordinator carries.

        Raises:
            DecodeError: it is none.
        """
        return _decode(self._commands, data)


def _decode(decoder: msgspec.msgpack.Decoder[M], data: bytes) -> M:
    try:
        return decoder.decode(data)
    except DecodeError:
        raise
    except Exception as error:  # text that is not UTF-8, nesting without end, a key that cannot be one
        raise DecodeError(f"{type(error).__name__}: {error}") from error
