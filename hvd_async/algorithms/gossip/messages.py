"""Messages of gossip between ranks and coordinator, and the configuration that ranks must have in common."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from hvd_async.runtime.messages import Config, OptimizerCommand, OptimizerEvent

STAGES = 3
"""Where the ranks of a host step together, a step's messages are of so many stages: a message's key is the number of
its step times this, + that of its stage."""


class GossipConfig(Config, frozen=True, tag=True):
    """Configuration that all ranks of an optimizer must have in common before the first exchange.

    Attributes:
        algorithm: a name of ``options.ALGORITHMS``.
        graph: the topology's name, and a digest of its edges and their weights.
        neighbours: places of each rank's neighbours, by its own place (of hosts, if
            ranks are averaged there first); empty except for AD-PSGD.
        max_staleness: steps that a message may be late (OSGP), or an average (outer optimizers).
        gossip_every: steps between two in which messages are sent, if they may not be later than that.
        max_local_steps: steps a rank may take between two averagings (AD-PSGD).
        average_every: steps between two averages over all ranks; 0: never.
        compression: encoding of messages.
        local_size: ranks that are averaged before they gossip; 1: none.
        quasi_global: whether what gossip does to the weights corrects the momentum.
        fragments: parts of the weights that are averaged in turn (outer optimizers).
        outer_lr, outer_momentum: an outer optimizer's.
    """

    algorithm: str
    graph: str
    neighbours: list[list[int]] = msgspec.field(default_factory=list)
    max_staleness: int = 0
    gossip_every: int = 1
    max_local_steps: int = 0
    average_every: int = 0
    compression: str = "none"
    local_size: int = 1
    quasi_global: bool = False
    fragments: int = 1
    outer_lr: float = 0.0
    outer_momentum: float = 0.0

    @property
    def period(self) -> int:
        """Steps between two sending steps. When it sends, a rank of OSGP has received all earlier messages: with more
        in flight it would keep too little of x and w, and z = x / w would diverge."""
        return max(self.gossip_every, self.max_staleness)


class MessageQueued(OptimizerEvent, frozen=True, tag=True):
    """This rank has queued messages of its step ``key``, which its engine keeps until an exchange takes them."""

    key: int


class MessageComing(OptimizerEvent, frozen=True, tag=True):
    """This rank will queue messages of its step ``key``, or none, once it has received those of earlier steps: it is
    mixing, and has queued all of its own that come before. So when all active ranks have said this, nobody waits for
    anything that is not in an exchange."""

    key: int


class NoMessage(OptimizerEvent, frozen=True, tag=True):
    """This rank has no message of its step ``key``, in which others may have some."""

    key: int


class PairRequested(OptimizerEvent, frozen=True, tag=True):
    """This rank is ready to be averaged with a neighbour (AD-PSGD)."""


class WaitingForMessage(OptimizerEvent, frozen=True, tag=True):
    """This rank waits for a message that was in none of the first ``seen`` exchanges, and has none queued."""

    seen: int


class AverageEntered(OptimizerEvent, frozen=True, tag=True):
    """This rank is in its average number ``index`` over all ranks, and waits for it; with its push-sum weight, or one
    for each part of its weights (hierarchical gossip). Under an outer optimizer it does not wait; the average is of
    fragment ``part``, and the weight is its learning rate."""

    index: int
    weights: list[float]
    part: int = 0


class ExchangeDone(OptimizerEvent, frozen=True, tag=True):
    """An exchange has completed on this rank."""

    round: int


class StartExchange(OptimizerCommand, frozen=True, tag=True):
    """Submit an exchange, with this rank's part of it.

    Attributes:
        round: its number.
        senders: queued messages, as (first rank, last rank, key): one of each rank from the first to the last, in
            order. An exchange of all ranks is told in a few bytes, however many there are.
        pairs: of ranks to average; of hosts to average, each named by its first rank.
        gathers: whether each rank sends the ranks of its host the part of their weights that it owns, once all earlier
            exchanges have completed: the last exchange before an end (AD-PSGD of hosts).
    """

    round: int
    senders: list[tuple[int, int, int]] = msgspec.field(default_factory=list)
    pairs: list[tuple[int, int]] = msgspec.field(default_factory=list)
    gathers: bool = False

    @property
    def messages(self) -> list[tuple[int, int]]:
        """The queued messages, as (sender, key)."""
        return [(rank, key) for first, last, key in self.senders for rank in range(first, last + 1)]

    def keys_of(self, rank: int) -> list[int]:
        """Return the keys of a rank's messages in it."""
        return [key for first, last, key in self.senders if first <= rank <= last]


class StartAverage(OptimizerCommand, frozen=True, tag=True):
    """Submit the average number ``index`` over some ranks, whose push-sum weights sum to ``weights``; all others
    contribute zeros. ``spans`` are those ranks, as (first, last); ``part`` is the fragment that is averaged."""

    index: int
    spans: list[tuple[int, int]]
    weights: list[float]
    part: int = 0

    @property
    def ranks(self) -> list[int]:
        """The ranks, in order."""
        return [rank for first, last in self.spans for rank in range(first, last + 1)]


def spans_of(ranks: Iterable[int]) -> list[tuple[int, int]]:
    """Return ranks as (first, last) of each run of consecutive numbers."""
    return [(first, last) for first, last, _ in senders_of((rank, 0) for rank in ranks)]


def senders_of(messages: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return messages, (sender, key), as ``StartExchange.senders``: a run of consecutive ranks has the same key."""
    runs: list[tuple[int, int, int]] = []
    first = last = key = 0
    for rank, own in messages:
        if runs and rank == last + 1 and own == key:
            last = rank
            runs[-1] = (first, last, key)
        else:
            first, last, key = rank, rank, own
            runs.append((first, last, key))
    return runs


class RankFinished(OptimizerCommand, frozen=True, tag=True):
    """A rank has finished: it sends nothing of its steps after ``step`` (since the last drain).

    ``gone``: it has the optimizer no more.
    """

    rank: int
    step: int
    gone: bool = False


EVENTS = (MessageQueued, MessageComing, NoMessage, PairRequested, WaitingForMessage, AverageEntered, ExchangeDone)
COMMANDS = (StartExchange, StartAverage, RankFinished)
