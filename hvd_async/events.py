"""The messages of the control plane: what ranks tell the coordinator, and what it commands.

All are frozen msgspec structs; ``codec`` has their wire format. The sender of an event is known from its authenticated
connection, so no event names its own rank.

Terms (the same everywhere): a *step* is a rank's own count of ``opt.step()``; a *round* one partial allreduce of the
whole model; a *bucket* a flat buffer of some parameters' gradients. Steps and rounds are numbered from 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from hvd_async.configs import EagerConfig, GossipConfig, LeaderConfig, Standing
from hvd_async.end_messages import EndCommand, EndEvent, RegisterOptimizer

Number: TypeAlias = bool | int | float | None
if TYPE_CHECKING:
    Hyper: TypeAlias = list[dict[str, Any]]  # (bindings know by its name what a value is)
else:
    Hyper = list[dict[str, Number | list[Number]]]
"""Hyperparameters of a round: one dictionary (name -> number, bool, None or list of numbers) per parameter group."""


# -- events: rank -> coordinator ------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The handshake: this rank's engine is connected."""

    host: str
    pid: int


class Opened(msgspec.Struct, frozen=True, tag=True):
    """This rank's optimizer is about to step (or drain) for the first time.

    ``names[i]`` and ``checksums[i]`` (CRC-32 of its bytes) describe the i-th parameter. ``members`` are the ranks that
    share the optimizer (a Horovod process set), all ranks if it is empty. ``loaded``: this rank brings gradients from
    an earlier run that no round has carried yet; ``hyper`` is what it would apply them with, should nobody step.
    """

    optimizer: int
    config: EagerConfig | GossipConfig | LeaderConfig
    names: list[str]
    checksums: list[int]
    members: list[int] = []
    loaded: bool = False
    hyper: Hyper = []


class Stepped(msgspec.Struct, frozen=True, tag=True):
    """This rank is in ``step()`` number ``step``, with these hyperparameters; None: those it told last."""

    optimizer: int
    step: int
    hyper: Hyper | None = None


class Arrived(msgspec.Struct, frozen=True, tag=True):
    """The gradient of ``bucket`` of this rank's step is in its engine's pending buffer."""

    optimizer: int
    bucket: int
    step: int


class Took(msgspec.Struct, frozen=True, tag=True):
    """This rank's weights are at ``version``: its next gradient is computed there (pace "rounds" only)."""

    optimizer: int
    version: int


class Received(msgspec.Struct, frozen=True, tag=True):
    """Answers ``ReportReceived`` number ``call``: ``landed[b]`` rounds of bucket b have come back to this engine."""

    optimizer: int
    call: int
    landed: list[int]


class Offered(msgspec.Struct, frozen=True, tag=True):
    """This rank has a message for other ranks, ``key`` of its own; its engine holds it until an exchange takes it."""

    optimizer: int
    key: int


class Passed(msgspec.Struct, frozen=True, tag=True):
    """This rank has no message of its step ``key``, in which others may have some."""

    optimizer: int
    key: int


class Wanted(msgspec.Struct, frozen=True, tag=True):
    """This rank wants to be averaged with a neighbour (AD-PSGD)."""

    optimizer: int


class Starved(msgspec.Struct, frozen=True, tag=True):
    """This rank waits for a message that was in none of the first ``seen`` exchanges, and has none to offer."""

    optimizer: int
    seen: int


class Averaged(msgspec.Struct, frozen=True, tag=True):
    """This rank is in its average number ``index`` over all ranks, with this push-sum weight, and waits for it."""

    optimizer: int
    index: int
    weight: float


class Iterated(msgspec.Struct, frozen=True, tag=True):
    """This rank has taken a step; ``loss`` is the mean of its last training losses, None before it has recorded one."""

    optimizer: int
    loss: float | None


class Landed(msgspec.Struct, frozen=True, tag=True):
    """An exchange, or a pull, is over on this rank."""

    optimizer: int
    round: int


class Done(msgspec.Struct, frozen=True, tag=True):
    """This rank is in ``drain()`` (``flush``) or ``cut()``; ``produced[b]`` gradients of bucket b since it opened (of
    gossip: its steps). Its user code has seen ``shown`` rounds before they were applied since the last drain or cut."""

    optimizer: int
    produced: list[int]
    flush: bool = True
    shown: int = 0


class Failed(msgspec.Struct, frozen=True, tag=True):
    """This rank is ending on an error; ``horovod``: on one of Horovod's, which says nothing of whose fault it is."""

    error: str
    horovod: bool = False


class Here(msgspec.Struct, frozen=True, tag=True):
    """The answer to ``CallRoll``."""


class Leaving(msgspec.Struct, frozen=True, tag=True):
    """This rank's engine is about to stop, with nothing left to do."""


# -- commands: coordinator -> rank ----------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Every rank is connected."""


class Agreed(msgspec.Struct, frozen=True, tag=True):
    """Every rank has opened this optimizer, and they fit together: steps may begin."""

    optimizer: int


class Firing(msgspec.Struct, frozen=True):
    """Why and when a bucket's round fired.

    Attributes:
        reason: for people.
        by: the rank whose event made it fire.
        arrived: how many ranks had arrived for it.
        first: when the first of them did, on the coordinator's clock (s).
        fired: when it fired, on the same clock.
        held: seconds that those ranks waited until then, added up.
    """

    reason: str
    by: int
    arrived: int
    first: float
    fired: float
    held: float


class Go(msgspec.Struct, frozen=True, tag=True):
    """Submit the pending gradient of this bucket for this round. ``hyper`` is None if it follows in ``Settle``."""

    optimizer: int
    bucket: int
    round: int
    hyper: Hyper | None
    firing: Firing


class Settle(msgspec.Struct, frozen=True, tag=True):
    """The hyperparameters of a round of which a bucket went before they were known."""

    optimizer: int
    round: int
    hyper: Hyper


class ReportReceived(msgspec.Struct, frozen=True, tag=True):
    """A round is long on its way: say at once that what was commanded before is submitted."""

    optimizer: int
    call: int


class Exchange(msgspec.Struct, frozen=True, tag=True):
    """Submit an exchange, with this rank's part of it: ``mail`` as (sender, key), ``pairs`` of ranks to be averaged."""

    optimizer: int
    round: int
    mail: list[tuple[int, int]] = []
    pairs: list[tuple[int, int]] = []


class Average(msgspec.Struct, frozen=True, tag=True):
    """Submit the average number ``index`` over ``ranks``, whose push-sum weights sum to ``weight``; all others bring
    nothing."""

    optimizer: int
    index: int
    ranks: list[int]
    weight: float


class Pull(msgspec.Struct, frozen=True, tag=True):
    """Submit a pull of the ranks of ``group`` (of all: -1) towards the weights of rank ``leader`` (the centre: -1).

    ``leader`` -2: nobody has ever told a loss, so there is no pull, and ranks are to say so.
    """

    optimizer: int
    round: int
    group: int
    leader: int


class Retired(msgspec.Struct, frozen=True, tag=True):
    """A rank is done: nothing of its steps after ``step`` (since the last drain) will come."""

    optimizer: int
    rank: int
    step: int


class Drained(msgspec.Struct, frozen=True, tag=True):
    """All ranks are done, ``last`` last: so many rounds fired, and gradients of each bucket produced, since the start.

    ``flushed``: nothing is pending any more; after a cut each rank still holds what no round has carried. ``standing``:
    of ranks that follow a leader. ``whole``: whether every rank that has stepped since the last drain still has the
    optimizer, now and at the last drain. ``mend``: the rank whose weights to take over, where user code has seen most
    rounds. ``gone``: ranks that have the optimizer no more, and take no step from now on.
    """

    optimizer: int
    rounds: int
    produced: list[int]
    last: int
    flushed: bool = True
    standing: Standing | None = None
    whole: bool = True
    mend: int | None = None
    gone: list[int] = []


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The ranks' optimizers do not fit together; ``problem`` says how, and what mends it."""

    optimizer: int
    problem: str


class Lost(msgspec.Struct, frozen=True, tag=True):
    """A rank is gone; the job cannot go on."""

    rank: int
    host: str
    reason: str
    context: str


class CallRoll(msgspec.Struct, frozen=True, tag=True):
    """Horovod has failed on some rank: say that you are ``Here``."""


class Broken(msgspec.Struct, frozen=True, tag=True):
    """Horovod has failed, and the job cannot go on, although no rank is known to be lost. ``problem`` says why."""

    problem: str


class Bye(msgspec.Struct, frozen=True, tag=True):
    """Every rank is leaving: close."""


OptimizerEvent: TypeAlias = (
    Opened
    | Stepped
    | Arrived
    | Took
    | Received
    | Offered
    | Passed
    | Wanted
    | Starved
    | Averaged
    | Iterated
    | Landed
    | Done
    | EndEvent
)
Event: TypeAlias = Hello | OptimizerEvent | Failed | Here | Leaving
OptimizerCommand: TypeAlias = (
    Agreed | Go | Settle | ReportReceived | Exchange | Average | Pull | Retired | Drained | Refused | EndCommand
)
"""For an optimizer that the rank has registered."""
Command: TypeAlias = Welcome | OptimizerCommand | RegisterOptimizer | Lost | CallRoll | Broken | Bye
