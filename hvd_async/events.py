"""The messages of the control plane: what ranks tell the coordinator, and what it commands.

All are frozen msgspec structs; ``encode``/``decode_event``/``decode_command`` are the wire format (MessagePack). The
sender of an event is known from its authenticated connection, so no event names its own rank.
A leaf module: it imports nothing of the package.

Terms (the same everywhere): a *step* is a rank's own count of ``opt.step()``; a *round* one partial allreduce of the
whole model; a *bucket* a flat buffer of some parameters' gradients. Steps and rounds are numbered from 1.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

Hyper: TypeAlias = list[dict[str, Any]]
"""Hyperparameters of a round: one dictionary (name -> number, bool, None or list of numbers) per parameter group."""


class EagerConfig(msgspec.Struct, frozen=True, tag=True):
    """What all ranks of a partial allreduce must have in common before the first round.

    Attributes:
        quorum: "solo", "majority", "all", "auto", an int (ranks) or a float (fraction of the ranks).
        max_staleness: rounds.
        grace: seconds to wait for more ranks once the quorum is there.
        seed: of majority's initiator draw.
        buckets: how many buckets a round has.
        pace: "steps", where every rank does the same number of steps, or "rounds", where a late rank does fewer.
    """

    quorum: str | int | float
    max_staleness: int
    grace: float
    seed: int
    buckets: int
    pace: str = "steps"

    @property
    def counts(self) -> int:
        """How many numbers ``Done.produced`` has."""
        return self.buckets


class GossipConfig(msgspec.Struct, frozen=True, tag=True):
    """What all ranks that gossip must have in common before the first exchange.

    Attributes:
        algorithm: "sgp", "osgp", "dpsgd", "adpsgd" or "allreduce".
        graph: the topology's name, and a digest of its edges and their weights.
        neighbours: of each rank (by its place among those that share the optimizer); AD-PSGD alone needs them here.
        max_staleness: steps (OSGP).
        max_local_steps: steps a rank may take between two averagings (AD-PSGD).
        average_every: steps between two averages over all ranks; 0: never.
        compression: how messages travel.
        local_size: ranks that are averaged before they gossip; 1: none.
    """

    algorithm: str
    graph: str
    neighbours: list[list[int]] = []
    max_staleness: int = 0
    max_local_steps: int = 0
    average_every: int = 0
    compression: str = "none"
    local_size: int = 1

    @property
    def counts(self) -> int:
        """As ``EagerConfig.counts``: steps."""
        return 1


class Standing(msgspec.Struct, frozen=True):
    """How it stands between ranks that follow a leader, at a drain or cut.

    Attributes:
        leader: the rank whose mean loss is the lowest; the lowest-numbered where none is known.
        steps: since the last pull that was due, of each group of the ranks and, last, of all.
        means: mean losses by place; None where there is none that is finite.
    """

    leader: int
    steps: list[int]
    means: list[float | None]


class LeaderConfig(msgspec.Struct, frozen=True, tag=True):
    """What all ranks that follow a leader must have in common before the first pull.

    Attributes:
        algorithm: "lsgd" or "easgd".
        groups: of ranks, by their places among those that share the optimizer; each has its own leader (LSGD).
        local_period, global_period: pulls are due when the ranks have taken so many steps each, on the average: of a
            group towards its leader, of all towards the global leader or the centre.
        settings: what else must be the same, for people and for comparison: strengths of the pulls and the like.
        buffers: "average" if batch-norm statistics are averaged at each pull, else "local".
        standing: of an earlier run's cut, if this one goes on from there.
    """

    algorithm: str
    groups: list[list[int]]
    local_period: int
    global_period: int
    settings: str
    buffers: str = "local"
    standing: Standing | None = None

    @property
    def counts(self) -> int:
        """As ``EagerConfig.counts``: steps."""
        return 1


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


class Offered(msgspec.Struct, frozen=True, tag=True):
    """This rank has a message for other ranks, ``key`` of its own; its engine holds it until an exchange takes it."""

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
    gossip: its steps)."""

    optimizer: int
    produced: list[int]
    flush: bool = True


class Failed(msgspec.Struct, frozen=True, tag=True):
    """This rank is ending on an error."""

    error: str


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
    of ranks that follow a leader.
    """

    optimizer: int
    rounds: int
    produced: list[int]
    last: int
    flushed: bool = True
    standing: Standing | None = None


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


class Bye(msgspec.Struct, frozen=True, tag=True):
    """Every rank is leaving: close."""


OptimizerEvent: TypeAlias = (
    Opened | Stepped | Arrived | Took | Offered | Wanted | Starved | Averaged | Iterated | Landed | Done
)
Event: TypeAlias = Hello | OptimizerEvent | Failed | Leaving
OptimizerCommand: TypeAlias = Agreed | Go | Settle | Exchange | Average | Pull | Retired | Drained | Refused
Command: TypeAlias = Welcome | OptimizerCommand | Lost | Bye

DecodeError = msgspec.DecodeError
_encoder = msgspec.msgpack.Encoder()
_events: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)


def encode(message: Event | Command) -> bytes:
    """The message's wire form."""
    return _encoder.encode(message)


def decode_event(data: bytes) -> Event:
    """The event in ``data``.

    Raises:
        DecodeError: it is none.
    """
    return _events.decode(data)


def decode_command(data: bytes) -> Command:
    """The command in ``data``.

    Raises:
        DecodeError: it is none.
    """
    return _commands.decode(data)
