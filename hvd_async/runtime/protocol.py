"""Protocol of ranks and coordinator: the messages, the families that add their own, and the wire format.

All messages are frozen msgspec structs. Events go from a rank to the coordinator and state a fact; commands go from the
coordinator to a rank and say what to do. The sender of an event is known from its authenticated connection, so an event
does not contain its rank. The messages here serve every optimizer; a family adds its own (``algorithms/*/config.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    """Settings that must be equal on all ranks of an optimizer before it begins; each family has a subclass."""

    @property
    def counts(self) -> int:
        """The length of ``Finished.produced``."""
        return 1


class OptimizerEvent(msgspec.Struct, frozen=True):
    """Event of a rank about one of its optimizers, by its number."""

    optimizer: int


class OptimizerCommand(msgspec.Struct, frozen=True):
    """Command for the ranks of one optimizer, by its number."""

    optimizer: int


# -- events: rank -> coordinator ------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Handshake: this rank's engine is connected."""

    host: str
    pid: int


class Registered(OptimizerEvent, Generic[C], frozen=True, tag=True):
    """This rank's optimizer is about to step (or drain) for the first time.

    Attributes:
        config: its settings.
        names, checksums: the name of each parameter, and the CRC-32 of its bytes.
        members: the ranks that share the optimizer (a Horovod process set); empty for all ranks.
        loaded: number of pending gradients that this rank brings from an earlier run.
        hyper: the hyperparameters with which these are applied if no rank steps.
        timeline: whether this rank records a timeline, which contains the reasons for which collectives start.
    """

    config: C
    names: list[str]
    checksums: list[int]
    members: list[int] = []
    loaded: int = 0
    hyper: Hyper = []
    timeline: bool = False


class Finished(OptimizerEvent, frozen=True, tag=True):
    """This rank waits in ``drain()`` or ``cut()``.

    Attributes:
        produced: number of its gradients per bucket since it registered; for gossip, number of its steps.
        flush: whether it is a drain.
        shown: number of rounds since the last drain or cut that user code on this rank saw before they were applied.
        resumes: whether it sends ``Resumed`` afterwards, before which no exchange or pull may start.
        hyper: its present hyperparameters; empty if they are not known.
        start: checksum of the weights with which it continued after the last drain, if each rank has its own.
    """

    produced: list[int]
    flush: bool = True
    shown: int = 0
    resumes: bool = False
    hyper: Hyper = []
    start: int | None = None


class Resumed(OptimizerEvent, frozen=True, tag=True):
    """This rank has completed a drain or cut."""


class CollectiveReady(OptimizerEvent, frozen=True, tag=True):
    """This rank waits in a collective of this optimizer, outside of rounds and exchanges.

    Attributes:
        index: the number of the collective on this rank, from 1.
        kind: "sum", "broadcast", or "compare" of ``names`` and ``checksums``, for which no tensor is sent.
        what: human-readable name of the call; the same on all ranks.
        length, dtype: of the vector, as ``Collectives.describe`` returns them.
        root: the rank whose vector a broadcast sends. If it no longer has the optimizer, the lowest rank that has it.
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
    """This rank no longer has this optimizer; its engine serves until no rank has. ``produced``: see ``Finished``."""

    produced: list[int]


class NoSuchOptimizer(OptimizerEvent, frozen=True, tag=True):
    """This rank, which waits in a drain, has to register an optimizer, and has wrapped none that matches."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """This rank ends on an error. ``horovod``: it is an error of Horovod, which does not tell which rank caused it."""

    error: str
    horovod: bool = False


class Present(msgspec.Struct, frozen=True, tag=True):
    """Answer to ``CallRoll``."""


class HostsChanged(msgspec.Struct, frozen=True, tag=True):
    """Hosts of an elastic job have come or gone: Horovod has notified this rank."""


class CommitsMade(msgspec.Struct, frozen=True, tag=True):
    """Answer to ``CountCommits``: the number of commits of this rank's elastic state. Its next commit waits."""

    made: int


class Leaving(msgspec.Struct, frozen=True, tag=True):
    """This rank's engine is about to stop, with nothing left to do."""


# -- commands: coordinator -> rank ----------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Every rank is connected."""


class Accepted(OptimizerCommand, frozen=True, tag=True):
    """Every rank has registered this optimizer, and they match: steps may begin."""


class Drained(OptimizerCommand, Generic[D], frozen=True, tag=True):
    """All ranks have finished.

    Attributes:
        rounds: number of rounds since the start.
        produced: number of gradients per bucket since the start.
        last: the rank that finished last.
        flushed: whether it was a drain, after which no gradient is pending; after a cut each rank keeps its own.
        details: the content of the family.
        whole: whether every rank that has stepped since the last drain had the optimizer then, and still has it.
        copied_from: the rank whose weights all ranks copy, since its user code saw more rounds than that of others;
            None if no copy is needed.
        gone: the ranks that no longer have the optimizer, and take no further steps.
    """

    rounds: int
    produced: list[int]
    last: int
    flushed: bool = True
    details: D | None = None
    whole: bool = True
    copied_from: int | None = None
    gone: list[int] = []


class Rejected(OptimizerCommand, frozen=True, tag=True):
    """The ranks' optimizers do not match; ``problem`` says how they differ and how to fix it."""

    problem: str


class RunCollective(OptimizerCommand, frozen=True, tag=True):
    """Submit the collective in which ``ranks`` wait; all others take part with zeros. See ``CollectiveReady``.

    ``problem``: why it cannot run, or the result of a comparison; then no rank submits anything.
    """

    kind: str
    what: str
    length: int
    dtype: str
    root: int
    ranks: list[int]
    problem: str | None = None


class RegisterOptimizer(OptimizerCommand, frozen=True, tag=True):
    """Other ranks have registered this optimizer; ``rank``, which waits in a drain, has to register it now."""

    rank: int
    names: list[str]
    members: list[int] = []


class Unregister(OptimizerCommand, frozen=True, tag=True):
    """No rank has this optimizer any longer: forget it."""


class RankLost(msgspec.Struct, frozen=True, tag=True):
    """A rank is lost; the job cannot continue. ``handed_over``: see ``RankLostError``."""

    rank: int
    host: str
    reason: str
    context: str
    handed_over: dict[int, list[int]] = msgspec.field(default_factory=dict)


class CallRoll(msgspec.Struct, frozen=True, tag=True):
    """Horovod has failed on some rank: answer with ``Present``."""


class CountCommits(msgspec.Struct, frozen=True, tag=True):
    """Hosts have come or gone: answer with ``CommitsMade``."""


class StopAtCommit(msgspec.Struct, frozen=True, tag=True):
    """Stop at the commit of this number, as all ranks do, and continue with the hosts of that time."""

    commit: int


class JobFailed(msgspec.Struct, frozen=True, tag=True):
    """Horovod has failed, and the job cannot continue, although no rank is known to be lost. ``problem`` says why."""

    problem: str


class Close(msgspec.Struct, frozen=True, tag=True):
    """Every rank is leaving: close."""


JOB_EVENTS = (Hello, Failed, Present, HostsChanged, CommitsMade, Leaving)
"""Events about a rank."""
OPTIMIZER_EVENTS = (Finished, Resumed, CollectiveReady, OptimizerDeleted, NoSuchOptimizer)
"""Events about an optimizer, in addition to ``Registered``, which has a family's configuration."""
JOB_COMMANDS = (Welcome, RankLost, CallRoll, CountCommits, StopAtCommit, JobFailed, Close)
OPTIMIZER_COMMANDS = (Accepted, Rejected, RunCollective, RegisterOptimizer, Unregister)
"""Commands for an optimizer, in addition to ``Drained``, which has a family's details."""

Event: TypeAlias = Hello | Failed | Present | HostsChanged | CommitsMade | Leaving | OptimizerEvent
Command: TypeAlias = Welcome | RankLost | CallRoll | CountCommits | StopAtCommit | JobFailed | Close | OptimizerCommand


# -- families and algorithms ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """A family of algorithms: its messages and its state machine.

    Attributes:
        name: "eager", "gossip", "leader".
        config: the settings that all ranks of an optimizer must have in common.
        events: the family's own events, from rank to coordinator.
        commands: the family's own commands, from coordinator to rank.
        state_machine: the machine that the coordinator runs for an optimizer.
        details: the family's content of ``Drained``; None if there is none.
    """

    name: str
    config: type[Config]
    events: tuple[type[OptimizerEvent], ...]
    commands: tuple[type[OptimizerCommand], ...]
    state_machine: type[StateMachine[Any]]
    details: type[msgspec.Struct] | None = None


@dataclass(frozen=True)
class Algorithm:
    """An algorithm as data; a family may add fields.

    Attributes:
        name: for example "sgp".
        family: the name of its family.
        options: its options and their defaults; all other options are rejected.
        sends: what ranks send to each other.
        waits_for: the ranks for which a step waits; "period" for all ranks, every ``period`` steps.
        symmetric_graph: whether its graph must be symmetric, so that both ends of each edge send.
        about: a human-readable clause that follows its name and describes it.
        compressions: the compressions of messages that it supports.
    """

    name: str
    family: str
    options: Mapping[str, Any]
    sends: Literal["gradients", "weights"]
    waits_for: Literal["all", "quorum", "neighbours", "none", "period"]
    symmetric_graph: bool = False
    about: str = ""
    compressions: tuple[str, ...] = ("none",)


# -- the wire format ------------------------------------------------------------------------------------------

DecodeError = msgspec.DecodeError
_encoder = msgspec.msgpack.Encoder()


def encode(message: Event | Command) -> bytes:
    """Return the wire form of an event or a command."""
    return _encoder.encode(message)


def packed(encoded: Sequence[msgspec.Raw]) -> bytes:
    """Return one message with these events or commands, each in its wire form."""
    return _encoder.encode(encoded)


class Codec:
    """Decoder of the messages of the runtime and of these families; it rejects all others.

    Attributes:
        events: the union of all events.
        commands: the union of all commands.
        decode_event, decode_command: return the event or the command in some bytes; raise ``DecodeError`` if they are
            not valid.
        decode_events, decode_commands: as these, for all events of a rank's message, or all commands of the
            coordinator's.
    """

    def __init__(self, families: Sequence[Family]) -> None:
        configs: Any = Union[tuple(family.config for family in families)]  # noqa: UP007  (built at run time)
        details: Any = Union[(None, *(family.details for family in families if family.details is not None))]
        own_events = [event for family in families for event in family.events]
        own_commands = [command for family in families for command in family.commands]
        self.events: Any = Union[(*JOB_EVENTS, *OPTIMIZER_EVENTS, Registered[configs], *own_events)]
        self.commands: Any = Union[(*JOB_COMMANDS, *OPTIMIZER_COMMANDS, Drained[details], *own_commands)]
        several: Any = list  # (subscripted at run time)
        self.decode_event: Callable[[bytes], Event] = _decoder_of(self.events)
        self.decode_command: Callable[[bytes], Command] = _decoder_of(self.commands)
        self.decode_events: Callable[[bytes], list[Event]] = _decoder_of(several[self.events])
        self.decode_commands: Callable[[bytes], list[Command]] = _decoder_of(several[self.commands])


def _decoder_of(kind: Any) -> Callable[[bytes], Any]:
    """Return a function that decodes messages of a kind, and raises ``DecodeError`` if they are not valid."""
    decoder = msgspec.msgpack.Decoder(kind)

    def decode(data: bytes) -> Any:
        try:
            return decoder.decode(data)
        except DecodeError:
            raise
        except Exception as error:  # text that is not UTF-8, deep nesting, an unhashable key
            raise DecodeError(f"{type(error).__name__}: {error}") from error

    return decode
